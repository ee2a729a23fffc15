"""Steps of optimizers over DTensors compute with local parts, and do the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors import local_steps
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor
from partitioner.backends.torch.guards.changes import count_steps
from partitioner.backends.torch.guards.originals import watch

o = torch.optim
RANKS = 3
OPTIMIZERS: tuple[tuple[type[Optimizer], dict[str, Any]], ...] = (
    (o.SGD, {}),
    (o.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (o.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (o.AdamW, {}),
    (o.AdamW, {"foreach": True}),
    (o.AdamW, {"fused": True}),
    (o.RMSprop, {"centered": True, "momentum": 0.5}),
    (o.Adagrad, {"lr_decay": 0.1}),
    (o.Adadelta, {}),
    (o.Adamax, {}),
    (o.NAdam, {}),
    (o.RAdam, {}),
    (o.ASGD, {"lr": 0.1}),
)


class Owner:
    """Stands for a rank's module, with which the watching of steps ends."""


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=store)
    yield DeviceMesh("cpu", list(range(RANKS)))
    torch.distributed.destroy_process_group()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step of an optimizer, whether it computed with parts."""
    known, taken = local_steps.over_parts, []

    def noted(*args: Any) -> local_steps.Arguments | None:
        arguments = known(*args)
        taken.append(arguments is not None)
        return arguments

    monkeypatch.setattr("partitioner.backends.torch.guards.changes.over_parts", noted)
    return taken


def distributed(local: Tensor, mesh: DeviceMesh, rows: int | tuple[()], place: Any) -> RankTensor:
    shape = torch.Size((rows, *local.shape[1:]) if isinstance(rows, int) else rows)
    stride = torch.empty(shape, device="meta").stride()
    one = DTensor.from_local(local, mesh, [place], run_check=False, shape=shape, stride=stride)
    return RankTensor.of(local, one._spec)


def parameters(mesh: DeviceMesh) -> list[nn.Parameter]:
    """Rank 0's parts: of uneven cuts, of one row, of a vector and a number that are whole."""
    torch.manual_seed(0)
    return [
        nn.Parameter(distributed(torch.randn(3, 2), mesh, 7, Shard(0))),
        nn.Parameter(distributed(torch.randn(1, 5), mesh, 2, Shard(0))),
        nn.Parameter(distributed(torch.randn(4), mesh, 4, Replicate())),
    ]


def step(optimizer: Optimizer, number: int) -> None:
    """A step with gradients that are drawn for it."""
    random = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9  # as a schedule does
        for parameter in group["params"]:
            local = torch.randn(parameter.to_local().shape, generator=random)
            (place,) = parameter.placements
            parameter.grad = distributed(local, parameter.device_mesh, parameter.shape[0], place)
    optimizer.step()


def watched(some: list[nn.Parameter]) -> Owner:
    owner = Owner()
    count_steps(owner, {str(i): one for i, one in enumerate(some)}, {}, holds_all=True)
    return owner


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_parts_are_updated_as_dtensors_are(
    kind: Callable[..., Optimizer], options: dict[str, Any], mesh: DeviceMesh, steps: list[bool]
) -> None:
    ours, theirs = parameters(mesh), parameters(mesh)
    updates = kind(ours, **options), kind(theirs, **options)
    owner = watched(ours)
    for number in range(4):
        before = [one._version for one in ours]
        for update in updates:
            step(update, number)
        assert all(one._version > was for one, was in zip(ours, before, strict=True))
    del owner
    assert steps == [True, False] * 4  # theirs are no parameters of a rank's module
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.to_local(), other.to_local())
        assert updates[0].state[one].keys() == updates[1].state[other].keys()
        for name, value in updates[1].state[other].items():
            mine = updates[0].state[one][name]
            assert type(mine) is type(value)
            if isinstance(value, DTensor):
                assert (mine.placements, mine.shape) == (value.placements, value.shape)
                assert torch.equal(mine.to_local(), value.to_local())
            else:
                assert torch.equal(mine, value)


def test_a_single_number_gets_its_state_from_pytorch(mesh: DeviceMesh, steps: list[bool]) -> None:
    """Of state that has no dims, nothing tells what is a part of it and what a count of steps."""
    number = nn.Parameter(distributed(torch.ones(()), mesh, (), Replicate()))
    owner, update = watched([number]), o.AdamW([number], lr=0.1)
    for _ in range(3):
        number.grad = distributed(torch.ones(()), mesh, (), Replicate())
        update.step()
    del owner
    assert steps == [False, True, True]
    kinds = {name: isinstance(value, DTensor) for name, value in update.state[number].items()}
    assert kinds == {"step": False, "exp_avg": True, "exp_avg_sq": True}
    assert number.to_local().item() == pytest.approx(0.7, abs=1e-2)


def test_fused_sgd_runs_where_pytorch_has_no_rule(mesh: DeviceMesh, steps: list[bool]) -> None:
    some, plain = parameters(mesh), [nn.Parameter(one.to_local()) for one in parameters(mesh)]
    owner = watched(some)
    ours, theirs = (o.SGD(each, lr=0.1, momentum=0.9, fused=True) for each in (some, plain))
    for number in range(3):
        step(ours, number)
        for one, other in zip(some, plain, strict=True):
            assert one.grad is not None
            other.grad = one.grad.to_local().clone()
        theirs.param_groups[0]["lr"] *= 0.9
        theirs.step()
    del owner
    assert steps[::2] == [True] * 3
    assert all(torch.equal(one.to_local(), x) for one, x in zip(some, plain, strict=True))


class Other(o.SGD):
    """An optimizer that may do anything."""


class Hook(dict[str, Any]):
    """A hook that has no hash."""

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        assert args == (optimizer,)


@pytest.mark.parametrize(
    "why",
    [
        *("kind", "closure", "hook", "hook of all"),
        *("gradient", "gradient's type", "others' parameter"),
    ],
)
def test_steps_stay_as_they_are(why: str, mesh: DeviceMesh, steps: list[bool]) -> None:
    some = parameters(mesh)[:1]
    owner = watched(some)
    more = parameters(mesh)[1:] if why == "others' parameter" else []
    update = (Other if why == "kind" else o.SGD)([*some, *more], lr=0.1, momentum=0.9)
    step(update, 0)
    assert steps == [why not in ("kind", "others' parameter")]
    handle = None
    if why == "hook":
        update.register_step_pre_hook(lambda *_: None)
    if why == "hook of all":
        handle = register_optimizer_step_pre_hook(Hook())
    if why == "gradient":
        whole = torch.ones(7, 2)
        some[0].grad = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
        with pytest.raises(BackendError, match=r"^\w+\(\) is not computed of a tensor that is cut"):
            update.step()
    elif why == "gradient's type":
        some[0].grad_dtype = None
        some[0].grad = distributed(torch.ones(3, 2).double(), mesh, 7, Shard(0))
        update.param_groups[0]["momentum"] = 0  # PyTorch wants one type for it
        update.step()
    elif why == "closure":
        assert update.step(lambda: 2.0) == 2.0
    else:
        step(update, 1)
    if handle is not None:
        handle.remove()
    del owner
    assert not any(steps[1:])


def test_the_guard_of_the_original_leaves_steps_as_they_are(
    mesh: DeviceMesh, steps: list[bool]
) -> None:
    some, original, module = parameters(mesh), nn.Linear(2, 2), nn.Linear(2, 2)
    owner, update = watched(some), o.AdamW(some)
    watch(module, object(), original, dict(original.named_parameters()), {"weight"})
    step(update, 0)
    del owner
    assert steps == [True]


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_behind_a_step_find_the_state_that_it_made(
    of_all: bool, mesh: DeviceMesh, steps: list[bool]
) -> None:
    """A rank may have one that others lack, as one that writes a log: steps are counted alike."""
    seen: list[tuple[bool, float]] = []

    def logs(optimizer: Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            momentum = state["momentum_buffer"]
            is_cut = isinstance(parameter, DTensor) and isinstance(momentum, DTensor)
            seen.append((is_cut, momentum.to_local().sum().item()))

    some = parameters(mesh)[:1]
    # those for all optimizers are called in the order in which they were registered
    handle = register_optimizer_step_post_hook(logs) if of_all else None
    owner, update = watched(some), o.SGD(some, lr=0.1, momentum=0.9)
    if handle is None:
        handle = update.register_step_post_hook(logs)
    counts = [some[0]._version]
    for number in range(2):
        step(update, number)
        counts.append(some[0]._version)
        (state,) = update.state.values()
        assert seen[-1] == (True, state["momentum_buffer"].to_local().sum().item())
    handle.remove()
    del owner
    assert len(seen) == 2
    assert counts == [counts[0], counts[0] + 1, counts[0] + 2]
    assert steps == [True, True]


def test_a_step_that_fails_leaves_the_optimizer(
    mesh: DeviceMesh, steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = parameters(mesh)
    owner, update = watched(some), o.AdamW(some)
    step(update, 0)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[o.Adam.__module__], "adam", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            step(update, 1)
    assert all(isinstance(one, DTensor) for one in update.state)
    for parameter in some:
        parameter.grad = None
    update.step(lambda: 0.0)  # over DTensors, after one over parts that failed
    assert {int(state["step"]) for state in update.state.values()} == {1}
    step(update, 2)
    del owner
    assert steps == [True, True, False, True]
    assert {int(state["step"]) for state in update.state.values()} == {2}
