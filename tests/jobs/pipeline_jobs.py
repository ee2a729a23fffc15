"""Modules on plans in stages, trained by ranks of a gloo group: jobs of test_phase_passes.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from staged import accumulated, staged, tensors
from staged_models import Model, Plain, Tied, Towers, UNet, seeded
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_ranks import Job, main

import partitioner
from partitioner.backends.errors import BackendError, CommunicationError
from partitioner.backends.torch.rank_module import RankModule
from partitioner.compiled.module import ModuleProgram

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


def trains(
    _: int,
    kind: Model,
    devices: Sequence[tuple[int, ...]],
    schedule: str,
    micro_batches: int = 4,
    **options: Any,
) -> None:
    """Ten steps of AdamW, as of one process with the same micro-batches."""
    program = staged(seeded(kind), kind.batch(0), devices, schedule, micro_batches, **options)
    check_steps(program.module(), kind, micro_batches)


def check_steps(module: RankModule, kind: Model, micro_batches: int) -> None:
    plain = seeded(kind)
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


def on_two(kind: Model, schedule: str = "1f1b", **options: Any) -> ModuleProgram:
    micro_batches = options.pop("micro_batches", 4)
    return staged(seeded(kind), kind.batch(0), [(0,), (1,)], schedule, micro_batches, **options)


def clips_accumulates_and_scales(_: int) -> None:
    module, plain = on_two(Towers).module(), seeded(Towers)
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


def calls_twice_before_backward(_: int) -> None:
    module, plain = on_two(Plain, "zb1").module(), seeded(Plain)
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
    module, plain = on_two(UNet).module(), seeded(UNet)
    ran: list[int] = []
    passes = module._passes[""]
    runs = dict(passes._runs)

    def noted(phase: Any) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        def run(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            ran.append(phase)
            return runs[phase](arguments)

        return run

    passes._runs.update({phase: noted(phase) for phase in runs})
    with torch.no_grad():
        found = tensors(module(*UNet.batch(3)))
        expected = accumulated(plain, UNet.batch(3), 4)
    torch.testing.assert_close(found, expected)
    assert ran
    assert all(passes.graphs.is_forward(phase) for phase in ran)
    same(module, plain)


def has_a_smaller_last_micro_batch(_: int) -> None:
    program = staged(seeded(UNet), UNet.batch(0, 10), [(0,), (1,)], "zb1", 4)
    module, plain = program.module(), seeded(UNet)
    updates = adamw(module), adamw(plain)
    for step in range(3):
        batch = UNet.batch(step, 10)
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
    module, plain = on_two(UNet, "1f1b").module(), seeded(UNet)
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
            for rows in (size, 3):
                batch = UNet.batch(step + 20, rows)
                torch.testing.assert_close(tensors(module(*batch)), tensors(plain(*batch)))
        for one in (module, plain):
            one.train()
    same(module, plain)


def evaluates_where_a_device_is_visited_twice(_: int) -> None:
    program = staged(seeded(Tied), Tied.batch(0), [(0,), (1,), (0,)], "1f1b", 4)
    module, plain = program.module(), seeded(Tied)
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


def own_parts(rank: int) -> None:
    """Under inputs='local' each rank brings its part of every micro-batch."""
    program = staged(seeded(Plain), Plain.batch(0), [(0, 1)], "gpipe", 2, parallel="dp")
    module, plain = program.module(inputs="local"), seeded(Plain)
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
    same(module, plain)
    with pytest.raises(BackendError, match=r"rank \d: one of 2 micro-batches of its part of input"):
        module(*Plain.batch(0, 6))


def a_rank_is_killed_in_a_step(rank: int) -> None:
    """Every other rank ends within `SOON_S`, and names it."""
    devices = [(0,), (1,), (2,), (3,)]
    module = staged(seeded(Tied), Tied.batch(0), devices, "1f1b", 4).module()
    passes = module._passes[""]
    if rank == 1:
        backward = next(p for p in passes._runs if not passes.graphs.is_forward(p))

        def dies(_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            os.kill(os.getpid(), signal.SIGKILL)
            return ()

        passes._runs[backward] = dies
    start = time.monotonic()
    match = rf"^rank {rank}: .*: ranks? ([0-9], )*[0-9] ha(s|ve) ended, by an error of its own"
    with pytest.raises(CommunicationError, match=match) as caught:
        module(*Tied.batch(0))
    assert time.monotonic() - start < SOON_S
    assert "1" in str(caught.value).partition("ended")[0].rpartition(": rank")[2]


def goes_on_from_a_checkpoint(_: int) -> None:
    """Two ranks in stages save; one process without stages goes on."""
    ranks = dist.get_world_size()
    plain = seeded(Plain)
    program = on_two(Plain) if ranks == 2 else None
    if program is None:
        compiled = partitioner.compile(seeded(Plain), Plain.batch(0), devices=1, training=True)
        assert isinstance(compiled, ModuleProgram)
        program = compiled
    module = program.module()
    updates = adamw(module), adamw(plain)
    steps(plain, updates[1], 0, 1)
    is_first = not os.path.isdir("checkpoint")  # noqa: PTH112
    dist.barrier()
    if is_first:
        steps(module, updates[0], 0, 1)
        same(module, plain)
        model, moments = get_state_dict(module, updates[0])
        dcp.save({"model": model, "optimizer": moments}, checkpoint_id="checkpoint")
        return
    model, moments = get_state_dict(module, updates[0])
    state = {"model": model, "optimizer": moments}
    dcp.load(state, checkpoint_id="checkpoint")
    set_state_dict(
        module,
        updates[0],
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    losses = [steps(one, u, 2, 3) for one, u in zip((module, plain), updates, strict=True)]
    torch.testing.assert_close(*map(torch.tensor, losses))
    same(module, plain)


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
    """The state of a plain module, and back."""
    module, plain = on_two(Tied).module(), seeded(Tied)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    module.load_state_dict(plain.state_dict())
    same(module, plain)
    other = seeded(Tied)
    other.load_state_dict(module.full_state_dict())
    same(module, other)


JOBS = {
    "killed": Job(4, a_rank_is_killed_in_a_step),
    "checkpoint": Job(
        2,
        goes_on_from_a_checkpoint,
        then=Job(1, goes_on_from_a_checkpoint),
    ),
    "whole_state": Job(2, loads_a_whole_state),
    "smaller_last": Job(2, has_a_smaller_last_micro_batch),
    "other_sizes": Job(2, other_sizes_and_evaluation),
    "evaluation_twice": Job(2, evaluates_where_a_device_is_visited_twice),
    "inference": Job(2, infers),
    "own_parts": Job(2, own_parts),
    **{
        f"{kind.__name__.lower()}_{schedule}": Job(
            2, partial(trains, kind=kind, devices=devices, schedule=schedule)
        )
        for kind, schedule, devices in (
            (Tied, "gpipe", [(0,), (1,)]),
            (UNet, "1f1b", [(0,), (1,)]),
            (Tied, "zb1", [(0,), (1,)]),
            (UNet, "interleaved", [(0,), (1,)] * 2),
            (Tied, "zbv", [(0,), (1,), (1,), (0,)]),
            (UNet, "dualpipev", [(0,), (1,), (1,), (0,)]),
        )
    },
    "back_and_forth": Job(
        2, partial(trains, kind=Tied, devices=[(0,), (1,), (0,)], schedule="1f1b")
    ),
    "towers_on_4": Job(
        4, partial(trains, kind=Towers, devices=[(0,), (1,), (2,), (3,)], schedule="1f1b")
    ),
    **{
        f"hybrid_{parallel}": Job(
            4,
            partial(
                trains,
                kind=UNet,
                devices=[(0, 1), (2, 3)],
                schedule="zb1",
                micro_batches=2,
                parallel=parallel,
            ),
        )
        for parallel in ("dp", "tp", "zero3")
    },
    "clipping": Job(2, clips_accumulates_and_scales),
    "calls": Job(2, calls_twice_before_backward),
    "no_grad": Job(2, without_gradients_only_forward_phases_run),
}

if __name__ == "__main__":
    main(JOBS)
