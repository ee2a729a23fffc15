"""A module whose layers lie on one rank each, trained by a gloo group: jobs of module_jobs.py."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import partitioner
from jobs.modules import checkpoints
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.running.rank_module import RankModule
from partitioner.strategies.constraints import Constraints, Pin

SPLIT = {"first": 0, "second": 1, "last": 0}


class Layers(nn.Module):
    """Three layers, one of them with a bias that is tied to another's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.second.bias = self.first.bias
        self.register_buffer("version", torch.tensor(3, dtype=torch.int16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        hidden = self.second(self.first(x).tanh()).tanh()
        return (self.last(hidden) - y).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, 6, generator=draw), torch.randn(4, 1, generator=draw)


@cache
def program(how: str) -> partitioner.ModuleProgram:
    """Layers placed by hand, or a known kind of parallelism."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"parallel": how}
    if how == "placed":
        pins = partitioner.Constraints.placed(SPLIT)
        options = {"strategy": "inter", "constraints": pins}
    compiled = partitioner.compile(Layers(), batch(0), devices=2, training=True, **options)
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def pair(how: str = "placed") -> tuple[RankModule, Layers]:
    """A rank's module, and the whole model on one process."""
    torch.manual_seed(0)
    return program(how).module(), Layers()


def same(module: RankModule, whole: nn.Module) -> None:
    state = module.full_state_dict()
    expected = whole.state_dict()
    assert sorted(state) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor)


def holds_the_whole_state(rank: int) -> None:
    module, whole = pair()
    assert ("last.weight" in module.state_dict()) == (rank == 0)
    same(module, whole)


def clips(module: RankModule, whole: Layers, order: float) -> None:
    for one in (module, whole):
        for parameter in one.parameters():
            parameter.grad = None
        one(*batch(1)).backward()
    limit = 0.02
    norm = module.clip_grad_norm_(limit, order)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), limit, order)
    assert expected > limit
    torch.testing.assert_close(norm, expected, check_dtype=False)
    for name, parameter in module.named_parameters():
        right = whole.get_parameter(name).grad
        gradient = parameter.grad
        whole_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(whole_gradient, right)


def clips_by_the_whole_norm(rank: int) -> None:
    for how in ("placed", "zero3"):
        module, whole = pair(how)
        for order in (2.0, 1.0, math.inf):
            clips(module, whole, order)
    with pytest.raises(BackendError, match="norm_type is 0, not from 1 to infinity"):
        module.clip_grad_norm_(1.0, 0)
    if rank == 1:
        for parameter in module.parameters():
            parameter.grad.to_local().fill_(math.nan)  # type: ignore[union-attr]
    with pytest.raises(BackendError, match="the norm of all gradients is nan"):
        module.clip_grad_norm_(1.0, error_if_nonfinite=True)


def resumes(_: int) -> None:
    """Each rank saves the state of its own layers; they go on in new modules."""
    module, whole = pair()
    make = torch.optim.AdamW
    update, right = make(module.parameters(), lr=0.1), make(whole.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            checkpoints.save(module, update, "placed", flat=True)
            module, _ = pair()
            update = make(module.parameters(), lr=0.5)
            checkpoints.restore(module, update, "placed", flat=True)
        for one, its in ((module, update), (whole, right)):
            one(*batch(step)).backward()
            its.step()
            its.zero_grad()
    same(module, whole)


@cache
def inference() -> partitioner.ModuleProgram:
    torch.manual_seed(0)
    compiled = partitioner.compile(nn.Linear(6, 8), torch.randn(4, 6), devices=2, cluster="ideal")
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def has_no_state_for_inference(_: int) -> None:
    net, x = inference().whole, batch(0)[0]
    module = inference().module()
    torch.testing.assert_close(module(x), net(x))
    for ask in (
        module.state_dict,
        module.full_state_dict,
        lambda: module.load_state_dict(net.state_dict()),
    ):
        with pytest.raises(BackendError, match="for inference has its weights as constants"):
            ask()


class Rare(nn.Module):
    """Complex numbers and short integers, summed and gathered; results nobody sends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor([7.0]))

    def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        z, j = torch.view_as_complex(x) * 2, i + 1
        summed = z.sum(0).abs(), j.sum(0, dtype=torch.int16)
        return z, z.conj().imag, j, *summed, x[:0] * 2, self.number


def rare_batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randint(100, (4, 6), generator=draw, dtype=torch.int16)
    return torch.randn(4, 6, 2, generator=draw), whole


@cache
def rare() -> partitioner.ModuleProgram:
    pins = [Pin(name, tensor=name, dim=0) for name in ("mul", "add")]
    compiled = partitioner.compile(
        Rare(), rare_batch(), devices=2, cluster="ideal", constraints=Constraints(tuple(pins))
    )
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def carries_rare_types(_: int) -> None:
    compiled, batch = rare(), rare_batch()
    code = compiled.rank(0).code
    for name in ("all_reduce", "view_as_real_copy", "torch.int32", "torch.uint8"):
        assert name in code, code
    torch.testing.assert_close(compiled.module()(*batch), compiled.whole(*batch))


class Twice(nn.Module):
    """Layers that a list holds too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.layers = nn.ModuleList([self.first, self.norm])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def twice() -> partitioner.ModuleProgram:
    compiled = partitioner.compile(
        Twice(), torch.randn(4, 6), devices=2, training=True, parallel="dp"
    )
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def lists_parameters_by_their_first_names(_: int) -> None:
    names = [list(dict(one.named_parameters())) for one in (twice().module(), twice().whole)]
    assert names[0] == names[1]


def groups_end_though_the_module_lives(_: int) -> None:
    """A thread of a group that drops a tensor while Python shuts down would abort the process."""
    module, _ = pair()
    module(*batch(0)).backward()
    before = _gloo_threads()
    dist.destroy_process_group()
    assert before
    assert _gloo_threads() == []


def _gloo_threads() -> list[str]:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("gloo_tcp")]
