"""Modules on plans in stages, trained by ranks of a gloo group: jobs of test_rank_passes.py."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import partitioner
from helpers.modules.staged_models import (
    Added,
    Faint,
    Halved,
    Model,
    Plain,
    Tied,
    Towers,
    UNet,
    seeded,
)
from helpers.plans.cost_cases import far_apart
from helpers.plans.staged import Stages, accumulated, loss_apart, staged, tensors
from jobs.modules import checkpoints
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError, CommunicationError
from partitioner.backends.torch.running.rank_module import RankModule
from partitioner.cost_model.cluster.topology import Cluster

STEPS = 10
SOON_S = 10


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def same(module: RankModule, plain: nn.Module) -> None:
    """Weights and buffers as of one process."""
    state = module.full_state_dict()
    expected = plain.state_dict()
    assert sorted(state) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-7, atol=1e-7, msg=name)


#: Devices of each stage.
TWO, THERE_AND_BACK = ((0,), (1,)), ((0,), (1,), (0,))
FOUR = tuple((rank,) for rank in range(4))


def planned(
    kind: Model,
    devices: tuple[tuple[int, ...], ...] = TWO,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    size: int = 8,
    parallel: str = "",
    stages: Stages | None = None,
    cluster: Cluster | None = None,
) -> ModuleProgram:
    """A program, which jobs make before the ranks are forked: once for all of them."""
    return _planned(kind, devices, schedule, micro_batches, size, parallel, stages, cluster)


@cache
def _planned(
    kind: Model, devices: Any, schedule: str, micro_batches: int, size: int, *how: Any
) -> ModuleProgram:
    parallel, stages, cluster = how
    program = staged(
        *(seeded(kind), kind.batch(0, size), devices, schedule, micro_batches),
        stages=stages,
        parallel=parallel,
        cluster=cluster,
    )
    assert program.programs
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    return program


def trains(program: Callable[[], ModuleProgram], kind: Model, micro_batches: int, _: int) -> None:
    """Ten steps of AdamW, as of one process with the same micro-batches."""
    module, plain = program().module(), seeded(kind)
    updates = adamw(module), adamw(plain)
    for step in range(STEPS):
        for update in updates:
            update.zero_grad()
        result = module(*kind.batch(step))
        tensors_of = tensors(result)
        (result[0] if isinstance(result, tuple) else result).backward()
        expected = accumulated(plain, kind.batch(step), micro_batches)
        torch.testing.assert_close(tensors_of, expected)
        for update in updates:
            update.step()
    same(module, plain)


def loss_of(result: Any) -> torch.Tensor:
    loss = result[0] if isinstance(result, tuple) else result
    assert isinstance(loss, torch.Tensor)
    return loss


def clips_accumulates_and_scales(_: int) -> None:
    module, plain = planned(Towers).module(), seeded(Towers)
    updates = adamw(module), adamw(plain)
    for step in range(0, 8, 2):
        for half in range(2):
            batch = Towers.batch(step + half)
            (loss_of(module(*batch)) / 2).backward()
            accumulated(plain, batch, 4, scale=0.5)
        norms = module.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(*norms, check_dtype=False)
        for update in updates:
            update.step()
            update.zero_grad(set_to_none=step == 4)
    same(module, plain)


def trains_on_one_gradient_of_several(_: int) -> None:
    """Gradients that are one value are added to, scaled and clipped each by itself."""
    programs = (planned(Added), 4), *((cut(parallel), 1) for parallel in CUTS)
    for program, micro_batches in programs:
        module, plain = program.module(), seeded(Added)
        for step in range(3):
            batch = Added.batch(step)
            (loss_of(module(*batch)) / 4).backward()
            accumulated(plain, batch, micro_batches, scale=0.25)
        norms = module.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(*norms, check_dtype=False)
        for one in (module, plain):
            adamw(one).step()
        same(module, plain)


CUTS = ("dp", "zero3")


@cache
def cut(parallel: str) -> ModuleProgram:
    """A program without stages."""
    program = partitioner.compile(
        *(seeded(Added), Added.batch(0)),
        devices=2,
        training=True,
        parallel=parallel,
        cluster="ideal",
    )
    assert program.programs
    return program


def skips_backward(rank: int) -> None:
    """A rank goes on to its optimizer's step; who skips `backward` is named in the next call."""
    module = planned(Plain).module()
    update = adamw(module)
    loss = loss_of(module(*Plain.batch(0)))
    if rank == 1:
        dist.barrier()  # rank 0 comes here behind its step
    loss.backward()
    update.step()
    if rank == 0:
        dist.barrier()

    def skips() -> None:
        for step in (1, 2):
            loss = loss_of(module(*Plain.batch(step)))
            if rank == 0:
                loss.backward()
            update.step()

    said = (
        r"^the ranks do not do the same: rank 0: backward\(\) of training step .*; rank 1: training"
    )
    with pytest.raises(BackendError, match=said):
        skips()
    loss = loss_of(module(*Plain.batch(3)))
    said = r"^the ranks do not do the same: rank 0: .* by 2; rank 1: backward\(\) of training step"

    def scales() -> None:
        (loss * (2 - rank)).backward()  # rank 0 raises here, rank 1 in its next call
        module(*Plain.batch(4))

    with pytest.raises(BackendError, match=said):
        scales()


def calls_twice_before_backward(_: int) -> None:
    module, plain = planned(Plain, schedule="zb1").module(), seeded(Plain)
    updates = adamw(module), adamw(plain)
    for step in range(3):
        one, other = Plain.batch(step), Plain.batch(step + 9)
        (loss_of(module(*one)) + 3 * loss_of(module(*other))).backward()
        accumulated(plain, one, 4)
        accumulated(plain, other, 4, scale=3.0)
        for update in updates:
            update.step()
            update.zero_grad()
    same(module, plain)
    loss = loss_of(module(*Plain.batch(0)))
    loss.backward()
    with pytest.raises(BackendError, match=r"backward\(\) was called a second time on one step"):
        loss.backward()


def without_gradients_only_forward_phases_run(_: int) -> None:
    module, plain = planned(UNet).module(), seeded(UNet)
    ran: list[int] = []
    passes = module._passes[""]
    runs = dict(passes._runs[0])

    def noted(phase: Any) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            ran.append(phase)
            return runs[phase](arguments)

        return run

    passes._runs[0].update({phase: noted(phase) for phase in runs})
    with torch.no_grad():
        found = tensors(module(*UNet.batch(3)))
        expected = accumulated(plain, UNet.batch(3), 4)
    torch.testing.assert_close(found, expected)
    assert ran
    assert all(passes.graphs.is_forward(phase) for phase in ran)
    same(module, plain)


def has_a_smaller_last_micro_batch(_: int, kind: Model = UNet) -> None:
    module, plain = planned(kind, schedule="zb1", size=10).module(), seeded(kind)
    updates = adamw(module), adamw(plain)
    for step in range(3):
        batch = kind.batch(step, 10)
        result = module(*batch)
        loss_of(result).backward()
        expected = accumulated(plain, batch, 4)
        torch.testing.assert_close(tensors(result), expected)
        for update in updates:
            update.step()
            update.zero_grad()
    same(module, plain)


def other_sizes_and_evaluation(_: int) -> None:
    """Other batches are cut into as many micro-batches; evaluation is of the whole batch."""
    module, plain = planned(UNet).module(), seeded(UNet)
    updates = adamw(module), adamw(plain)
    for step, size in enumerate((8, 6, 16, 5, 8)):
        batch = UNet.batch(step, size)
        result = module(*batch)
        loss_of(result).backward()
        torch.testing.assert_close(tensors(result), accumulated(plain, batch, 4))
        for update in updates:
            update.step()
            update.zero_grad()
        for one in (module, plain):
            one.eval()
        with torch.no_grad():
            for rows in {8: (8, 3), 5: (5,)}.get(size, ()):
                batch = UNet.batch(step + 20, rows)
                torch.testing.assert_close(tensors(module(*batch)), tensors(plain(*batch)))
        for one in (module, plain):
            one.train()
    same(module, plain)


def evaluates_where_a_device_is_visited_twice(_: int) -> None:
    module, plain = planned(Tied, THERE_AND_BACK).module(), seeded(Tied)
    for one in (module, plain):
        one.eval()
    torch.testing.assert_close(module(*Tied.batch(1)), plain(*Tied.batch(1)))


def infers(_: int) -> None:
    """Inference in micro-batches, also of other batches."""
    program = staged(
        seeded(Plain).eval(), Plain.batch(0), [(0,), (1,)], "forward", 4, training=False
    )
    module, plain = program.module(), seeded(Plain).eval()
    for size in (8, 6, 12):
        batch = Plain.batch(1, size)
        torch.testing.assert_close(tensors(module(*batch)), tensors(plain(*batch)))


PARTS = ((0, 1),), "gpipe", 2


def own_parts(rank: int) -> None:
    """Under inputs='local' each rank brings its part of every micro-batch."""
    module, plain = planned(Plain, *PARTS, parallel="dp").module(inputs="local"), seeded(Plain)
    updates = adamw(module), adamw(plain)
    for step in range(3):
        x, y = Plain.batch(step)
        part = slice(4 * rank, 4 * rank + 4)
        loss = loss_of(module(x[part], y[part]))
        loss.backward()
        expected = plain(x, y)[0]
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for update in updates:
            update.step()
            update.zero_grad()
        in_turn = torch.arange(8).reshape(2, 2, 2).transpose(0, 1).flatten()
        evaluates_own_parts(module, plain, part, in_turn)  # of each micro-batch all ranks' parts
    same(module, plain)
    with pytest.raises(BackendError, match=r"rank \d: one of 2 micro-batches of its part of input"):
        module(*Plain.batch(0, 6))


def evaluates_own_parts(
    module: RankModule, plain: nn.Module, part: slice, order: torch.Tensor
) -> None:
    """Results are those of the whole batch, whose rows have this order."""
    for one in (module, plain):
        one.eval()
    x, y = Plain.batch(9, len(order))
    with torch.no_grad():
        own = tensors(module(x[part], y[part]))
        torch.testing.assert_close(own, tensors(plain(x[order], y[order])))
    for one in (module, plain):
        one.train()


def own_parts_of_stages(_: int) -> None:
    """Ranks of the same stage bring their parts, ranks of other stages too."""
    for size in (8, 7):  # the last micro-batch is smaller
        program = planned(Plain, micro_batches=2, size=size)
        module, plain = program.module(inputs="local"), seeded(Plain)
        loss = module.train_step(*Plain.batch(0, size))
        torch.testing.assert_close(loss, accumulated(plain, Plain.batch(0, size), 2)[0])
        evaluates_own_parts(module, seeded(Plain), slice(None), torch.arange(size))


def a_rank_is_killed_in_a_step(rank: int) -> None:
    """Every other rank ends within `SOON_S`, and names it."""
    module = planned(Tied, FOUR).module()
    rank_1_is_killed(module, rank, Tied.batch(0))


def rank_1_is_killed(module: RankModule, rank: int, batch: Sequence[torch.Tensor]) -> None:
    """Rank 1 is killed in a backward phase of a step; the others raise errors that name it."""
    passes = module._passes[""]
    if rank == 1:
        backward = next(p for p in passes._runs[0] if not passes.graphs.is_forward(p))

        def dies(_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            os.kill(os.getpid(), signal.SIGKILL)
            return ()

        passes._runs[0][backward] = dies
    start = time.monotonic()
    match = rf"^rank {rank}: .*: ranks? ([0-9], )*[0-9] ha(s|ve) ended, by an error of its own"
    with pytest.raises(CommunicationError, match=match) as caught:
        module(*batch)
    assert time.monotonic() - start < SOON_S
    assert "1" in str(caught.value).partition("ended")[0].rpartition(": rank")[2]


def saves(_: int, stages: Stages | None = None) -> RankModule:
    """Two ranks in stages save after two steps."""
    module, plain = planned(Plain, stages=stages).module(), seeded(Plain)
    updates = adamw(module), adamw(plain)
    for one, update in zip((module, plain), updates, strict=True):
        steps(one, update, 0, 1)
    same(module, plain)
    checkpoints.save(module, updates[0], "checkpoint", flat=True)
    return module


def saves_and_is_killed(rank: int) -> None:
    """A rank is killed in the step after the one that was saved."""
    module = saves(rank)
    rank_1_is_killed(module, rank, Plain.batch(2))


def goes_on(_: int, stages: Stages | None = None) -> None:
    """Two ranks in stages, or one process without, go on as one that did not stop."""
    plain = seeded(Plain)
    if dist.get_world_size() == 2:
        module = planned(Plain, stages=stages).module()
    else:
        program = partitioner.compile(seeded(Plain), Plain.batch(0), devices=1, training=True)
        assert isinstance(program, ModuleProgram)
        module = program.module()
    updates = torch.optim.AdamW(module.parameters(), lr=0.5), adamw(plain)
    steps(plain, updates[1], 0, 1)
    checkpoints.restore(module, updates[0], "checkpoint", flat=True)
    losses = [steps(one, u, 2, 3) for one, u in zip((module, plain), updates, strict=True)]
    torch.testing.assert_close(*map(torch.tensor, losses))
    same(module, plain)


def needs_flat_checkpoints(_: int) -> None:
    """Without the option, PyTorch keeps the options of one rank's parameters only."""
    module = planned(Plain).module()
    update = adamw(module)
    steps(module, update, 0)
    checkpoints.save(module, update, "checkpoint")
    checkpoints.restore(module, update, "checkpoint")
    loss_of(module(*Plain.batch(1))).backward()
    refused = ""
    try:
        update.step()
    except BackendError as error:
        refused = str(error)
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, refused)
    assert sorted(map(bool, told)) == [False, True]
    assert re.match(r"AdamW has no 'betas', 'eps', 'lr', 'weight_decay' for para", max(told)), told


def lists_a_parameter_of_another_rank(rank: int) -> None:
    """A rank without parameters lists one that it neither holds nor trains."""
    module = planned(Plain, stages=loss_apart).module()
    plain = seeded(Plain)
    names = [name for name, _ in module.named_parameters()]
    assert names == ([name for name, _ in plain.named_parameters()] if rank == 0 else names[:1])
    if rank == 1:
        (parameter,) = module.parameters()
        assert parameter.shape == plain.get_parameter(names[0]).shape
        assert isinstance(parameter, DTensor)
        assert not parameter.to_local().numel()
        assert parameter.requires_grad
        assert not list(module.get_submodule("last").parameters())
        with pytest.raises(
            AttributeError, match=r"rank 1 holds no part of last\.weight, rank 0 does"
        ):
            module.get_parameter("last.weight")
    for one in (module, plain):
        update = torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        steps(one, update, 0, 1)
        if one is module and rank == 1:
            assert not update.state
        loss_of(one(*Plain.batch(2))).backward()
        if one is module:
            norm = module.clip_grad_norm_(0.01)
        else:
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
            torch.testing.assert_close(norm, expected)
        update.step()
    same(module, plain)
    module.load_state_dict(seeded(Plain).state_dict())
    module.load_state_dict(module.state_dict())
    same(copy.deepcopy(module), seeded(Plain))


def skips_the_same_steps(_: int) -> None:
    """Gradients of one stage alone overflow; the scaler of each rank leaves out the step."""
    x, y = Plain.batch(0)
    x = x.float() * 100  # the gradient of the first layer's weight is larger than the others
    plain = seeded(Plain, torch.float32)
    for layer in [*plain.layers[1:], plain.last]:  # type: ignore[index, misc]
        nn.init.constant_(layer.bias, 1.0)
    module = staged(copy.deepcopy(plain), (x, y), [(0,), (1,)], "1f1b", 4).module()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**127) for _ in range(2)]
    updates = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (module, plain)]
    for _ in range(8):
        scalers[0].scale(loss_of(module(x, y))).backward()
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            scalers[1].scale(loss_of(plain(a, b)) / 4).backward()
        for scaler, update in zip(scalers, updates, strict=True):
            scaler.step(update)
            scaler.update()
            update.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert 0 < scalers[0].get_scale() < 2.0**127
    state = module.full_state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, msg=name)


def scales_in_float16(_: int) -> None:
    """Gradients that are 0 in float16 without a scale are not, once the scale is known."""

    def small(kind: Model = Plain) -> nn.Module:
        return seeded(kind, torch.float32)

    x, y = (tensor.float() if tensor.is_floating_point() else tensor for tensor in Plain.batch(0))
    with torch.autocast("cpu", torch.float16):
        module = staged(Faint(small()), (x, y), [(0,), (1,)], "1f1b", 4).module()
        plain = Faint(small())
        updates = [torch.optim.SGD(one.parameters(), lr=3e4) for one in (module, plain)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20) for _ in range(2)]
        for step in range(4):
            scalers[0].scale(loss_of(module(x, y))).backward()
            for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
                scalers[1].scale(loss_of(plain(a, b)) / 4).backward()
            for scaler, update in zip(scalers, updates, strict=True):
                if step:  # in the first one, the module does not know the scale
                    scaler.step(update)
                    scaler.update()
                update.zero_grad()
    state = module.full_state_dict()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-2, atol=5e-4)
    start = Faint(small()).state_dict()
    first = "module.layers.0.weight"
    assert (state[first] - start[first]).abs().max() > 1e-3


def steps(module: nn.Module, update: torch.optim.Optimizer, *numbers: int) -> list[float]:
    losses = []
    for number in numbers:
        update.zero_grad()
        loss = loss_of(module(*Plain.batch(number)))
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def loads_a_whole_state(_: int) -> None:
    """The state of a plain module, and back; each rank plans by itself."""
    module, plain = staged(seeded(Tied), Tied.batch(0), TWO).module(), seeded(Tied)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    module.load_state_dict(plain.state_dict())
    same(module, plain)
    other = seeded(Tied)
    other.load_state_dict(module.full_state_dict())
    same(module, other)


def made(*args: Any, **options: Any) -> Sequence[Callable[[], ModuleProgram]]:
    """What makes a program (see `planned`) before ranks take it."""
    return [partial(planned, *args, **options)]


def steps_of(
    kind: Model,
    devices: tuple[tuple[int, ...], ...],
    schedule: str,
    micro_batches: int = 4,
    *,
    slow: bool = False,
    **options: Any,
) -> Job:
    program = partial(planned, kind, devices, schedule, micro_batches, **options)
    ranks = len({rank for stage in devices for rank in stage})
    return Job(ranks, partial(trains, program, kind, micro_batches), [program], slow=slow)


PLAIN, APART = made(Plain), made(Plain, stages=loss_apart)

JOBS = {
    "killed": Job(4, a_rank_is_killed_in_a_step, made(Tied, FOUR)),
    "restart": Job(2, saves_and_is_killed, PLAIN, then=Job(2, goes_on, PLAIN)),
    "checkpoint": Job(2, saves, PLAIN, then=Job(2, goes_on, PLAIN, then=Job(1, goes_on))),
    "checkpoint_of_one_holder": Job(
        2,
        partial(saves, stages=loss_apart),
        APART,
        then=Job(2, partial(goes_on, stages=loss_apart), APART, then=Job(2, goes_on, PLAIN)),
    ),
    "overflow": Job(2, skips_the_same_steps),
    "float16": Job(2, scales_in_float16),
    "flat_checkpoint": Job(2, needs_flat_checkpoints, PLAIN),
    "no_parameters": Job(2, lists_a_parameter_of_another_rank, APART),
    "whole_state": Job(2, loads_a_whole_state),
    "smaller_last": Job(2, has_a_smaller_last_micro_batch, made(UNet, schedule="zb1", size=10)),
    "smaller_last_zeros": Job(
        2,
        partial(has_a_smaller_last_micro_batch, kind=Halved),
        made(Halved, schedule="zb1", size=10),
    ),
    "other_sizes": Job(2, other_sizes_and_evaluation, made(UNet)),
    "evaluation_twice": Job(
        2, evaluates_where_a_device_is_visited_twice, made(Tied, THERE_AND_BACK)
    ),
    "inference": Job(2, infers),
    "own_parts": Job(2, own_parts, made(Plain, *PARTS, parallel="dp")),
    "own_parts_of_stages": Job(
        2,
        own_parts_of_stages,
        [partial(planned, Plain, micro_batches=2, size=size) for size in (8, 7)],
    ),
    **{
        f"{kind.__name__.lower()}_{schedule}": steps_of(kind, devices, schedule)
        for kind, schedule, devices in (
            (Tied, "gpipe", TWO),
            (UNet, "1f1b", TWO),
            (Tied, "zb1", TWO),
            (UNet, "interleaved", TWO + TWO),
            (Tied, "zbv", ((0,), (1,), (1,), (0,))),
            (UNet, "dualpipev", ((0,), (1,), (1,), (0,))),
        )
    },
    "back_and_forth": steps_of(Tied, THERE_AND_BACK, "1f1b"),
    "towers_on_4": steps_of(Towers, FOUR, "1f1b"),
    **{
        f"hybrid_{parallel}": steps_of(
            UNet, ((0, 1), (2, 3)), "zb1", 2, parallel=parallel, slow=parallel != "dp"
        )
        for parallel in ("dp", "tp", "zero3")
    },
    "shared_sends": steps_of(
        Tied, ((0, 1), (2, 3), (0, 1)), "1f1b", cluster=far_apart(nodes=2, devices=2)
    ),
    "clipping": Job(2, clips_accumulates_and_scales, made(Towers)),
    "one_gradient": Job(
        2,
        trains_on_one_gradient_of_several,
        [*made(Added), *(partial(cut, parallel) for parallel in CUTS)],
    ),
    "skips_backward": Job(2, skips_backward, made(Plain)),
    "calls": Job(2, calls_twice_before_backward, made(Plain, schedule="zb1")),
    "no_grad": Job(2, without_gradients_only_forward_phases_run, made(UNet)),
}

if __name__ == "__main__":
    main(JOBS)
