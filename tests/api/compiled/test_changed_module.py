"""A module that changes after it was compiled: its program sees it, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.frontends.errors import FrontendError


@dataclass
class Config:
    """Numbers in a configuration."""

    beta: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [8, 8])


class Statistics(nn.Module):
    """Two layers, batch statistics, numbers, and a buffer that is replaced in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.cold = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.factor = 2.0
        self.config = Config()
        self.scales: list[Any] = [1.0, torch.ones(8), float("nan")]
        self.log: dict[str, list[int]] = {"sizes": []}
        self.shape: torch.Size | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.shape = x.shape
        self.calls = self.calls + 1
        self.log["sizes"].append(len(x))
        y = self.b(self.cold(self.norm(self.a(x)))) * self.factor + self.calls
        y = y * self.config.beta * self.scales[0] * self.scales[1]
        return y.square().mean(), y


def compiled(*, training: bool = True) -> tuple[Statistics, partitioner.ModuleProgram, Tensor]:
    torch.manual_seed(0)
    module, x = Statistics().train(training), torch.randn(4, 8)
    program = partitioner.compile(module, x, cluster="2xideal", training=training)
    assert isinstance(program, partitioner.ModuleProgram)
    return module, program, x


def test_calls_write_the_modules_buffers() -> None:
    module, program, x = compiled()
    other = compiled()[0]
    for call in (program, module, program.gradients, program):
        call(x)
    assert program.verify()  # which writes none
    for _ in range(4):
        other(x)
    assert module.calls == 4
    torch.testing.assert_close(module.state_dict(), other.state_dict())


@pytest.mark.parametrize("training", [False, True])
def test_written_weights_count(training: bool) -> None:
    """Also those that are constants of the graphs, which were made in an earlier call."""
    module, program, x = compiled(training=training)
    program(x)
    with torch.no_grad():
        module.b.weight.mul_(3)
        module.cold.bias.add_(1)
    other = compiled(training=training)[0]
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(program(x), other(x))


def cast(m: Statistics) -> None:
    m.half()


def replace(m: Statistics) -> None:
    m.a.weight = nn.Parameter(torch.zeros(8, 8))


def tie(m: Statistics) -> None:
    m.b.weight = m.a.weight


def freeze(m: Statistics) -> None:
    m.a.requires_grad_(False)


def thaw(m: Statistics) -> None:
    m.cold.requires_grad_(True)


def evaluate(m: Statistics) -> None:
    m.eval()


def evaluate_part(m: Statistics) -> None:
    m.norm.eval()


def set_number(m: Statistics) -> None:
    m.factor = 5.0


def set_part(m: Statistics) -> None:
    m.norm.momentum = 0.5


def set_in_object(m: Statistics) -> None:
    m.config.beta = 5.0


def set_deeply(m: Statistics) -> None:
    m.config.sizes[1] = 9


def set_in_list(m: Statistics) -> None:
    m.scales[0] = 2.0


def set_tensor_in_list(m: Statistics) -> None:
    m.scales[1] = torch.ones(8)


def shorten(m: Statistics) -> None:
    m.scales.pop()


def hook(m: Statistics) -> None:
    m.register_forward_hook(lambda *_: None)


def hook_part(m: Statistics) -> None:
    m.norm.register_full_backward_hook(lambda *_: None)


def hook_parameter(m: Statistics) -> None:
    m.a.weight.register_hook(lambda g: g * 2)


def hook_accumulation(m: Statistics) -> None:
    m.a.weight.register_post_accumulate_grad_hook(lambda _: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            cast,
            r"a\.weight is torch\.float16 now and was torch\.float32 when the module was traced",
        ),
        (replace, r"a\.weight was replaced by another tensor since the module was traced"),
        (tie, r"b\.weight was replaced by another tensor"),
        (freeze, r"a\.weight is requires_grad=False now and was requires_grad=True"),
        (thaw, r"cold\.weight is requires_grad=True now and was requires_grad=False"),
        (evaluate, r"Statistics is in evaluation mode now and was in training mode"),
        (evaluate_part, r"norm is in evaluation mode now and was in training mode"),
        (set_number, r"factor is 5\.0 now and was 2\.0 when the module was traced: compile it ag"),
        (set_part, r"norm\.momentum is 0\.5 now and was 0\.1"),
        (set_in_object, r"config\.beta is 5\.0 now and was 1\.0"),
        (set_deeply, r"config\.sizes\[1\] is 9 now and was 8"),
        (set_in_list, r"scales\[0\] is 2\.0 now and was 1\.0"),
        (set_tensor_in_list, r"scales\[1\] is a torch\.float32 of \[8\] now and was a torch"),
        (shorten, r"scales \(length\) is 2 now and was 3"),
        (hook, r"Statistics has other hooks than when the module was traced, which would not"),
        (hook_part, r"norm has other hooks than when"),
        (hook_parameter, r"a\.weight has other hooks than when"),
        (hook_accumulation, r"a\.weight has other hooks than when"),
    ],
)
def test_other_changes_are_refused(change: Callable[[Statistics], None], message: str) -> None:
    module, program, x = compiled()
    module(x)
    program(x)
    change(module)
    for call in (program, program.gradients):
        with pytest.raises(FrontendError, match=message):
            call(x)


def test_gradients_do_not_count_in_inference() -> None:
    module, program, x = compiled(training=False)
    freeze(module)
    program(x)


def test_hooks_of_parameters_do_not_count_in_inference() -> None:
    module, program, x = compiled(training=False)
    module.a.weight.register_hook(lambda g: g * 2)
    program(x)
    module.norm.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(FrontendError, match="norm has other hooks than when"):
        program(x)
