"""Buffers that a forward pass assigns anew have, after a step, what PyTorch gives them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.frontends.errors import FrontendError

Assign = Callable[[nn.Module, Tensor], None]


def swap(module: nn.Module, _: Tensor) -> None:
    module.one, module.other = module.other, module.one


def chain(module: nn.Module, _: Tensor) -> None:
    module.one, module.other = module.other, module.one + module.other


def view(module: nn.Module, _: Tensor) -> None:
    module.one = module.other.flip(0)[:]


def count(module: nn.Module, _: Tensor) -> None:
    module.one = module.one + 1
    module.one = module.one * 2


def mean(module: nn.Module, x: Tensor) -> None:
    module.other = 0.9 * module.other + 0.1 * x.detach().mean(0)


def of_a_parameter(module: nn.Module, _: Tensor) -> None:
    module.one = module.layer.bias.detach() * 2


def itself(module: nn.Module, _: Tensor) -> None:
    module.one = module.one


def then_writes(module: nn.Module, x: Tensor) -> None:
    module.one = module.one.roll(1)
    module.one[0] = x.detach().sum()
    with torch.no_grad():
        module.one[1:3].mul_(x.mean())
        module.other = module.other.roll(1)
    with torch.no_grad():
        module.other[2] = x.sum()


def writes_what_it_is_a_view_of(module: nn.Module, x: Tensor) -> None:
    rows = x.detach() * 2
    module.one = rows.chunk(2)[0][1]
    rows.t()[1].add_(3)


def swaps_then_writes(module: nn.Module, x: Tensor) -> None:
    module.one, module.other = module.other, module.one + 1
    module.one[2:].mul_(x.detach().mean())
    module.other.add_(1)


def keeps_what_it_was(module: nn.Module, x: Tensor) -> None:
    before = module.other[2:4]
    module.other = module.other * 3
    module.one = module.one * before.sum() + module.other.view(2, 4)[1].sum()
    before.add_(x.detach().mean())


def none(module: nn.Module, _: Tensor) -> None:
    module.other, module.also_other = module.other * 1, None


def wider(module: nn.Module, x: Tensor) -> None:
    module.one = torch.cat([module.one, x[0]])


def other_type(module: nn.Module, _: Tensor) -> None:
    module.one = module.one.double()


def new(module: nn.Module, x: Tensor) -> None:
    module.register_buffer("seen", x.mean(0))


def parameter(module: nn.Module, _: Tensor) -> None:
    module.layer.bias = nn.Parameter(module.layer.bias + 1)


def tied(module: nn.Module, x: Tensor) -> None:
    module.tied = module.tied + x.mean()


def same(module: nn.Module, _: Tensor) -> None:
    module.one = module.other


def part_of_same(module: nn.Module, _: Tensor) -> None:
    module.one = module.other[:]


def own_parameter(module: nn.Module, _: Tensor) -> None:
    module.one = module.layer.bias.detach()


class Assigning(nn.Module):
    """Reads a buffer, also for the backward pass, then assigns some."""

    def __init__(self, assign: Assign) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.assign = assign
        for name in ("one", "other", "also_other", "tied"):
            self.register_buffer(name, torch.rand(8))
        self.register_buffer("also_tied", self.tied)

    def forward(self, x: Tensor) -> Tensor:
        """As large as its operand."""
        y = self.layer(x) * self.one
        self.assign(self, y)
        return y * self.other


class Loss(nn.Module):
    """A loss of another module's result, which reads the buffers after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and a buffer."""
        return self.module(x).square().mean(), self.module.one * 1


class Outermost(Assigning):
    """The module that assigns gives the loss."""

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        return super().forward(x).square().mean()


class Former(Assigning):
    """Gives a view of what a buffer was, and a buffer that has the former contents of another."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Loss, and buffers."""
        before = self.one[2:4]
        loss = super().forward(x).square().mean()
        return loss, before, self.one, self.other


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "assign",
    [
        *(swap, chain, view, count, mean, of_a_parameter, itself, then_writes),
        *(writes_what_it_is_a_view_of, swaps_then_writes, keeps_what_it_was),
    ],
)
@pytest.mark.parametrize("make", [Outermost, Former, lambda assign: Loss(Assigning(assign))])
def test_assigned_buffers(
    make: Callable[[Assign], nn.Module], assign: Assign, training: bool
) -> None:
    module = make(assign)
    plain, batches = copy.deepcopy(module), [torch.randn(4, 8) for _ in range(3)]
    program = partitioner.compile(module, (batches[0],), devices=1, training=training)
    assert isinstance(program, ModuleProgram)
    for batch in batches:
        with torch.set_grad_enabled(training):
            expected = plain(batch)
        if training:
            result, gradients = program.gradients(batch)
            (expected[0] if isinstance(expected, tuple) else expected).backward()
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad)
                parameter.grad = None
        else:
            result = program(batch)
        torch.testing.assert_close(result, expected)
        for name, buffer in plain.named_buffers():
            torch.testing.assert_close(program.whole.get_buffer(name), buffer)


@pytest.mark.parametrize(
    ("assign", "line"),
    [
        (none, r"forward deletes its buffer module\.also_other"),
        (same, r"buffer module\.one a tensor that is another buffer or parameter, too"),
        (part_of_same, r"buffer module\.one a tensor that is another buffer or parameter, too"),
        (own_parameter, r"buffer module\.one a tensor that is another buffer or parameter, too"),
        (wider, r"buffer module\.one, float32\[8\], a tensor of float32\[16\]: a buffer's size"),
        (other_type, r"buffer module\.one, float32\[8\], a tensor of float64\[8\]"),
        (new, r"forward makes its buffer module\.seen"),
        (parameter, r"forward assigns its parameter module\.layer\.bias"),
        (tied, r"forward assigns its buffer module\.tied, which has another name"),
    ],
)
def test_what_a_graph_cannot_assign(assign: Assign, line: str) -> None:
    with pytest.raises(FrontendError, match=line):
        partitioner.compile(Loss(Assigning(assign)), (torch.randn(4, 8),), devices=1, training=True)
