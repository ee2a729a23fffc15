"""Ranks that begin with other weights or data, or do not make the same calls: they all say so."""

import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DistributedSampler

import partitioner
import partitioner.api.compiler
from jobs.processes.torch_ranks import Job
from partitioner.api.compiled.plan_cache import FROM_CACHE
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing.agreement import Meeting
from partitioner.backends.torch.running.held_state import HeldState
from partitioner.ir.errors import PartitionerError
from partitioner.strategies.constraints import Constraints, Pin

SOON_S = 30  # without the group's timeout of 60 s, however slow the machine is


class Net(nn.Module):
    """Two layers and a table that is no parameter."""

    squashes = False

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("table", torch.randn(128), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        hidden = self.up(x).tanh() if self.squashes else self.up(x).relu()
        return (self.down(hidden) - y + self.table.sum()).square().mean()


class Squashed(Net):
    """Another graph of the same weights."""

    squashes = True


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


@cache
def program(
    ranks: int = 2, *, training: bool = True, kind: type[Net] = Net
) -> partitioner.ModuleProgram:
    """On 4 ranks the batch is cut along dp alone: two ranks each take the same part."""
    torch.manual_seed(0)
    pins = (Pin("up", tensor="up.weight", dim=0),)
    cut: dict[str, Any] = {"constraints": Constraints(pins), "gap": 0.5}
    if ranks == 4:
        cut = {"parallel": "dp+tp", "mesh": {"dp": 2, "tp": 2}}
    compiled = partitioner.compile(
        kind(),
        batch(0),
        devices=ranks,
        training=training,
        cluster="ideal",
        **cut,
    )
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def training_step(module: nn.Module, *inputs: Any) -> None:
    module(*inputs).backward()


def begins_with_other_weights(rank: int) -> None:
    for training in (True, False):
        compiled = program(training=training)
        assert isinstance(compiled.whole, Net)
        for name, tensor in (("bias", compiled.whole.down.bias), ("table", compiled.whole.table)):
            before = tensor.detach().clone()
            with torch.no_grad():
                tensor.add_(rank)
            match = (
                rf"^rank 1 has other contents of '.*{name}' than rank 0: begin with the same "
                r"weights and constants: call torch\.manual_seed .*, load the same file, or send "
                r"rank 0's with torch\.distributed\.broadcast before compile$"
            )
            with pytest.raises(BackendError, match=match):
                compiled.module()
            with torch.no_grad():
                tensor.copy_(before)
        compiled.module()


def loads_other_weights(rank: int) -> None:
    module = program().module()
    state = {name: tensor + rank for name, tensor in module.full_state_dict().items()}
    match = (
        r"^rank 1 has loaded other contents of 'up\.weight' and 3 more than rank 0: call "
        r"load_state_dict\(\) on every rank, with the same tensors$"
    )
    module.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(BackendError, match=match):
            module(*batch(0))
    module.load_state_dict(Net().state_dict())
    training_step(module, *batch(0))
    if rank == 0:
        module.load_state_dict({"up.bias": torch.ones(32)}, strict=False)
    module.eval()
    with pytest.raises(BackendError, match=r"^rank 1 has loaded other contents of 'up\.bias' than"):
        module(*batch(0))
    module.load_state_dict({"up.bias": torch.ones(32)}, strict=False)
    module(*batch(0))


def traces_another_graph(rank: int) -> None:
    match = "^rank 1 traced another graph than rank 0: compile the same model$"
    with pytest.raises(BackendError, match=match):
        program(kind=Squashed if rank else Net).module()


def begins_with_other_options(rank: int) -> None:
    match = r"do not do the same: rank 0: module\(.* seed=0, .*; rank 1: module\(.* seed=1, "
    with pytest.raises(BackendError, match=match):
        program().module(seed=rank)
    with pytest.raises(BackendError, match="check_inputs is -1, not a number of calls"):
        program().module(check_inputs=-1)


def is_called_with_other_data(rank: int) -> None:
    """The habit of DistributedSampler, under inputs="global"."""
    x, y = (torch.cat(tensors) for tensors in zip(batch(1), batch(2), strict=True))
    own = list(DistributedSampler(range(16), num_replicas=2, rank=rank, shuffle=False))
    match = r"^rank 1 has other data in input 'x' and 1 more than rank 0: with inputs='global' .*"
    for training in (True, False):
        module = program(training=training).module()
        with pytest.raises(BackendError, match=match + r"use module\(inputs='rows'\)"):
            module(x[own], y[own])
    with pytest.raises(BackendError, match=r"^rank 1 has other data in input 'y' than rank 0"):
        module(x[:8], y[own])
    module(x[:8], y[:8])  # they go on
    module(x[:8], y[own])  # the fourth call
    module = program().module(check_inputs=None)
    for step in range(4):
        training_step(module, *batch(step))
    with pytest.raises(BackendError, match=match):
        module(x[own], y[own])
    module.eval()
    with pytest.raises(BackendError, match=match):
        module(x[own], y[own])
    with pytest.raises(BackendError, match=r"^rank 1 has other data in input .* than rank 0"):
        module(x[own][:6], y[own][:6])  # a batch of another size
    module = program().module(check_inputs=0)
    module(x[own], y[own])


def is_called_with_other_parts(rank: int) -> None:
    """Ranks along tp are called with the same part."""
    module = program(4).module(inputs="local")
    dp = rank // 2
    x, y = (tensor[4 * dp : 4 * dp + 4] for tensor in batch(0))
    training_step(module, x, y)
    match = r"^rank 3 has another part of input 'y' than rank 2: the plan gives them the same part"
    with pytest.raises(BackendError, match=match):
        module(x, y + (rank == 3))
    training_step(module, x, y)  # they go on


def skips_backward(rank: int) -> None:
    module = program().module()
    update = torch.optim.SGD(module.parameters(), lr=0.1)
    training_step(module, *batch(0))
    start = time.monotonic()
    match = (
        r"^the ranks do not do the same: rank 0: backward\(\) of training step 1; "
        r"rank 1: training step 2 with seed 0 on "
    )

    def skips() -> None:
        for step in (1, 2):
            loss = module(*batch(step))
            if rank == 0:
                loss.backward()
            update.step()

    with pytest.raises(BackendError, match=match):
        skips()
    assert time.monotonic() - start < SOON_S


class Noting(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.events.append(str(func))
        return func(*args, **(kwargs or {}))


def computes_before_it_waits(_: int) -> None:
    """A backward pass waits for the other ranks where it first sends something."""
    module = program().module()
    training_step(module, *batch(0))
    loss = module(*batch(1))
    meet, events = Meeting.meet, list[str]()

    def meets(meeting: Meeting, *given: Any) -> Any:
        events.append("agreed")
        return meet(meeting, *given)

    with pytest.MonkeyPatch.context() as patch, Noting(events):
        patch.setattr(Meeting, "meet", meets)
        loss.backward()
    before = events[: events.index("agreed")]
    assert "aten.mul.Tensor" in before, events  # the slope of the square
    assert not any("c10d_functional" in event for event in before), events
    assert any("c10d_functional" in event for event in events), events


def does_something_else(rank: int) -> None:
    module = program().module()
    calls = [module.full_state_dict, lambda: module.clip_grad_norm_(1.0)]
    for call, name in zip(calls, (r"full_state_dict\(\)", r"clip_grad_norm_\(\)"), strict=True):
        loss = module(*batch(0))
        match = rf"rank 0: backward\(\) of training step \d; rank 1: {name}"
        with pytest.raises(BackendError, match=match):
            call() if rank else loss.backward()
    loss = module(*batch(0))
    loss.backward(retain_graph=True)
    with pytest.raises(BackendError, match=r"^rank 1: backward\(\) was called a second time"):
        loss.backward() if rank else module(*batch(1))
    training_step(module, *batch(1))  # they go on


def skips_a_step(rank: int) -> None:
    module = program().module()
    update = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        training_step(module, *batch(0))
        update.step()
    training_step(module, *batch(1))
    if rank == 0:
        update.step()
    match = r"^rank 1 has other writes to 'up\.weight' and 3 more than rank 0: call optimizer\.step"
    with pytest.raises(BackendError, match=match):
        module(*batch(2))
    if rank == 1:
        update.step()
    module.eval()
    module(*batch(2))  # they go on


def is_interrupted(rank: int) -> None:
    """Before it waits for the others, which do something else: it hears so in its next call."""
    module = program().module()
    training_step(module, *batch(0))

    def stop(_: HeldState) -> None:
        raise KeyboardInterrupt

    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HeldState, "shards_now", stop)
            with pytest.raises(KeyboardInterrupt):
                module(*batch(1))
    match = r"rank 0: training step 1 with .*; rank 1: full_state_dict\(\)"
    with pytest.raises(BackendError, match=match):
        module.full_state_dict()
    assert module.steps == 1
    training_step(module, *batch(1))  # they go on


def meets(_: nn.Module) -> None:
    dist.barrier()


def saves(module: nn.Module) -> None:
    dcp.save(module.state_dict(), checkpoint_id="checkpoint")


def gathers(module: nn.Module) -> None:
    parameter = next(module.parameters())
    assert isinstance(parameter, DTensor)
    parameter.full_tensor()


def copies(module: nn.Module) -> None:
    parameter = next(module.parameters())
    with torch.no_grad():
        torch.zeros(parameter.shape).copy_(parameter)


def waits_elsewhere(call: Callable[[nn.Module], object], name: str, rank: int) -> None:
    """Rank 1 makes a call that all must make, rank 0 does not: it says where rank 1 is."""
    module = program().module()
    training_step(module, *batch(0))
    if rank == 1:
        with pytest.raises(Exception, match=r"(?i)closed by peer|reset by peer|broken pipe"):
            call(module)
        return
    start = time.monotonic()
    match = (
        r"^the ranks do not do the same: rank 0: training step 1 with .*; "
        rf"rank 1: .*{name}\(.*\) \(.*agreement_jobs\.py:[0-9]+\)$"
    )
    with pytest.raises(BackendError, match=match):
        module(*batch(1))
    assert time.monotonic() - start < SOON_S


def comes_late(rank: int) -> None:
    """A rank may take its time, and others may have waited elsewhere before."""
    module = program().module()
    for late in (0, 1):
        if rank == late:
            time.sleep(5)
        dist.barrier()
        if rank == late:
            time.sleep(5)
        training_step(module, *batch(0))


def changes_on_one_rank(rank: int) -> None:
    compiled = program()
    assert isinstance(compiled.whole, Net)
    module, bias = compiled.module(), compiled.whole.up.bias
    if rank == 1:
        compiled.whole.up.bias = nn.Parameter(bias.detach().clone())
    match = r"^rank 1: up\.bias was replaced by another tensor since the module was traced"
    with pytest.raises(PartitionerError, match=match):
        compiled.module()
    module.eval()
    match = r"^rank 1: evaluation on .*: up\.bias was replaced by another tensor since"
    with pytest.raises(BackendError, match=match):
        module(*batch(0))
    compiled.whole.up.bias = bias
    module(*batch(0))
    compiled.module()

    def init(layer: nn.Module) -> None:
        if rank == 1 and isinstance(layer, nn.Linear):
            raise ValueError("no such file")
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            tensor.zero_()

    with pytest.raises(
        BackendError, match=r"^rank 1: initialising up \(Linear\) alone: no such file"
    ):
        compiled.module(init=init)


def compiles_together(rank: int) -> None:
    """Rank 0 searches, the others take its plan; whatever fails fails everywhere."""
    options: dict[str, Any] = {"training": True, "cluster": "ideal", "parallel": "dp"}
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(partitioner.api.compiler, "summarise", pytest.fail)
        compiled = partitioner.compile(Net(), batch(0), **options)
        assert isinstance(compiled, partitioner.ModuleProgram)
        assert len(compiled.cluster) == 2
        assert compiled.summary["cost"] == compiled.cost
        recomputing = partitioner.compile(Net(), batch(0), recompute=True, **options)
        assert any(name.endswith("/again") for name in recomputing.plan.nodes)
        with pytest.raises(partitioner.Infeasible) as refused:
            partitioner.compile(Net(), batch(0), **{**options, "memory": 1024})
    texts = [""] * 2
    dist.all_gather_object(texts, str(refused.value))
    assert texts[0] == texts[1]
    assert texts[0]
    match = r"^rank 1 traced another graph than rank 0: compile the same model$"
    with pytest.raises(BackendError, match=match):
        partitioner.compile((Squashed if rank else Net)(), batch(0), **options)
    with pytest.raises(PartitionerError, match=r"^rank 1: training needs a module that returns"):
        partitioner.compile(
            nn.Linear(16, 4) if rank else Net(), (batch(0)[0],) if rank else batch(0), **options
        )
    match = r"do not do the same: rank 0: compile\(.*gap=0.5.*; rank 1: compile\(.*gap=0.25"
    with pytest.raises(BackendError, match=match):
        partitioner.compile(Net(), batch(0), **options, gap=0.25 if rank else 0.5)
    torch.manual_seed(0)
    training_step(partitioner.compile(Net(), batch(0), **options).module(), *batch(0))  # they go on


def compiles_from_the_cache(rank: int) -> None:
    """Started again, ranks take the plan that rank 0 kept, and no rank searches."""
    options: dict[str, Any] = {"training": True, "cluster": "ideal", "parallel": "dp"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARTITIONER_CACHE", "plans" if rank == 0 else "others")
        first = partitioner.compile(Net(), batch(0), **options)
        patch.setattr(partitioner.api.compiler, "summarise", pytest.fail)
        again = partitioner.compile(Net(), batch(0), **options)
    assert again.plan == first.plan
    assert FROM_CACHE in again.summary["notes"]
    assert not Path("others").exists()
    torch.manual_seed(0)
    training_step(again.module(), *batch(0))


JOBS = {
    "other weights": Job(2, begins_with_other_weights, [program, lambda: program(training=False)]),
    "other loads": Job(2, loads_other_weights, [program]),
    "other graph": Job(
        2, traces_another_graph, [lambda: program(kind=Net), lambda: program(kind=Squashed)]
    ),
    "other options": Job(2, begins_with_other_options, [program]),
    "other data": Job(2, is_called_with_other_data, [program, lambda: program(training=False)]),
    "other parts": Job(4, is_called_with_other_parts, [lambda: program(4)]),
    "skips backward": Job(2, skips_backward, [program]),
    "computes before it waits": Job(2, computes_before_it_waits, [program]),
    "something else": Job(2, does_something_else, [program]),
    "skips a step": Job(2, skips_a_step, [program]),
    "is interrupted": Job(2, is_interrupted, [program]),
    "waits in a barrier": Job(2, partial(waits_elsewhere, meets, r"dist\.barrier"), [program]),
    "waits in a save": Job(2, partial(waits_elsewhere, saves, r"dcp\.save"), [program], slow=True),
    "waits in a gather": Job(
        2, partial(waits_elsewhere, gathers, "full_tensor"), [program], slow=True
    ),
    "waits in a copy": Job(2, partial(waits_elsewhere, copies, r"\.copy_"), [program], slow=True),
    "comes late": Job(2, comes_late, [program], slow=True),
    "changes on one": Job(2, changes_on_one_rank, [program]),
    "compiles together": Job(2, compiles_together),
    "compiles from the cache": Job(2, compiles_from_the_cache),
}
