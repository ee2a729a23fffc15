"""Steps whose ranks run their phases of micro-batches in another order, and steps as ordered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from helpers.plans.mutated_programs import Mutant
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.running.all_ranks import AllRanks, run_lockstep
from partitioner.backends.torch.running.step_values import StepPlan, StepValues
from partitioner.ir.pipeline.actions import Action
from partitioner.ir.program import Programs

Run = tuple[int, int]


def run_mutants(programs: Programs) -> Iterator[Mutant]:
    """Each run of a lane exchanged with the next, left out, doubled, and of another micro-batch."""
    order = programs.order
    if order.is_whole or order.table.micro_batches == 1:
        return
    table, count = order.table, order.table.micro_batches
    for lane, actions in enumerate(table.lanes):
        for place, action in enumerate(actions):
            other = action._replace(micro_batch=(action.micro_batch + 1) % count)
            before, behind = actions[:place], actions[place + 1 :]
            ways: Mapping[str, tuple[Action, ...]] = {
                "run exchanged": (*before, *behind[:1], action, *behind[1:]),
                "run left out": (*before, *behind),
                "run doubled": (*before, action, action, *behind),
                "other micro-batch": (*before, other, *behind),
                "micro-batches exchanged": tuple(
                    action if one == other else other if one == action else one for one in actions
                ),
            }
            for kind, changed in ways.items():
                lanes = (*table.lanes[:lane], changed, *table.lanes[lane + 1 :])
                spoilt = replace(order, table=replace(table, lanes=lanes))
                what = f"{action} of lane {lane}"
                yield Mutant(kind, what, partial(replace, programs, order=spoilt))


def step_as_ordered(
    all_ranks: AllRanks, inputs: Mapping[str, Tensor], stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Local results of a step by name, in which each rank runs its phases in its own order.

    Raises:
        BackendError: The ranks wait for each other.
    """
    starts = all_ranks.start(inputs, stored)
    values = [
        StepValues(StepPlan(phases, all_ranks.runs(rank), start.written, phases[0].delivered),
                   start.values)
        for rank, (phases, start) in enumerate(zip(all_ranks.phases, starts, strict=True))
    ]  # fmt: skip
    left = [list(of.plan.runs) for of in values]
    arrived: set[tuple[int, str, int]] = set()
    while any(left):
        due = {
            rank: runs[0]
            for rank, runs in enumerate(left)
            if runs
            and all((rank, m.name, runs[0].micro_batch) in arrived for m in runs[0].receives)
        }
        ready = _that_meet(
            all_ranks.programs, {r: (x.phase, x.micro_batch) for r, x in due.items()}
        )
        if not ready:
            raise BackendError("the ranks wait for each other")
        modules = {r: all_ranks.phases[r][due[r].micro_batch].graphs[due[r].phase].module
                   for r in ready}  # fmt: skip
        arguments = {rank: values[rank].arguments(due[rank]) for rank in ready}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            results = run_lockstep(modules, arguments)
        for rank in ready:
            run = left[rank].pop(0)
            for message, tensor in values[rank].finish(run, results[rank]):
                values[message.target].receive(message, run.micro_batch, tensor)
                arrived.add((message.target, message.name, run.micro_batch))
    return dict(_results(all_ranks, values))


def _that_meet(programs: Programs, due: Mapping[int, Run]) -> set[int]:
    """The ranks whose partners in the next phase are at the same run."""
    ready = set(due)
    groups = [
        (comm.phase, comm.ranks)
        for program in programs.ranks
        for comm in program.comms
        if comm.phase == comm.target_phase
    ]
    while True:
        waiting = {
            rank
            for phase, ranks in groups
            for rank in ready.intersection(ranks)
            if due[rank][0] == phase
            and any(other not in ready or due[other] != due[rank] for other in ranks)
        }
        if not waiting:
            return ready
        ready -= waiting


def _results(all_ranks: AllRanks, values: list[StepValues]) -> Iterator[tuple[str, Tensor]]:
    """What each rank delivers: of each micro-batch, or the total of a gradient."""
    backward = {v for n in all_ranks.graph.nodes if n.name in all_ranks.graph.backward
                for v in n.writes}  # fmt: skip
    totals = {all_ranks.graph.output_names.get(value, value) for value in backward}
    for rank, program in enumerate(all_ranks.programs.ranks):
        for out in program.outputs:
            if out.whole in totals:
                yield f"{out.value} on {rank}", values[rank].total(out.value)
                continue
            for index in range(all_ranks.micro.count):
                yield f"{out.value} of {index} on {rank}", values[rank].result(out.value, index)
