"""The steps of a rank's program by phase, and the values that pass between phases.

A message between phases is a step of both: one reads it on its source, one writes it on its target.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from partitioner.ir.ops.aten.state import KEEP, STATE, UPDATE
from partitioner.ir.phases import Part, Phases, RunOrder
from partitioner.ir.program import Comm, Compute, RankProgram

#: Nodes that take a value to where it is stored.
UPDATES = UPDATE, KEEP

Steps = Sequence[Compute | Comm]


@dataclass(frozen=True)
class PhaseSteps:
    """The steps that a rank runs in a phase."""

    program: RankProgram
    phase: int
    steps: Steps

    def touched(self, step: Compute | Comm) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that a step reads and makes in this phase, without those written over."""
        if isinstance(step, Comm):
            reads, writes = step.touched(self.program.rank)
            if step.phase != step.target_phase:
                return (reads, ()) if step.phase == self.phase else ((), writes)
            return reads, writes
        reads, writes = step.touched
        return step.node.inputs[:1] if step.node.op in UPDATES else reads, writes

    @property
    def written(self) -> set[str]:
        """Local values that the steps make."""
        return {name for step in self.steps for name in self.touched(step)[1]}

    @property
    def outside(self) -> set[str]:
        """Values that the steps read and do not make."""
        made: set[str] = set()
        outside: set[str] = set()
        for step in self.steps:
            reads, writes = self.touched(step)
            outside.update(set(reads) - made)
            made.update(writes)
        return outside


def steps_by_phase(program: RankProgram, phases: Phases) -> Mapping[int, PhaseSteps]:
    """The steps of each phase, without those that give stored values."""
    pieces: dict[int, list[Compute | Comm]] = {}
    for step in program.steps:
        if isinstance(step, Compute) and not step.node.inputs and step.node.op == STATE:
            continue
        if isinstance(step, Compute) or step.phase == step.target_phase:
            on = [step.phase]
        else:
            ends = (step.phase, step.sources()), (step.target_phase, step.targets())
            on = [phase for phase, ranks in ends if program.rank in ranks]
        for phase in on:
            pieces.setdefault(phase, []).append(step)
    by_phase = dict(sorted(pieces.items())) or {phases.number(Part.FORWARD): []}
    return {phase: PhaseSteps(program, phase, steps) for phase, steps in by_phase.items()}


def made_by_phase(
    pieces: Mapping[int, PhaseSteps], backward: Collection[str]
) -> Mapping[int, set[str]]:
    """Local values that each phase makes; a constant that is delivered is of the first or last.

    `backward` are the outputs of the backward pass, which the last one delivers.
    """
    made = {phase: piece.written for phase, piece in pieces.items()}
    program = next(iter(pieces.values())).program
    for output in program.outputs:
        if output.value in program.constants or output.value in program.literals:
            made[(max if output.whole in backward else min)(pieces)].add(output.value)
    return made


def added_up(
    order: RunOrder, pieces: Mapping[int, PhaseSteps], backward: Collection[str]
) -> frozenset[str]:
    """Local values whose sum over the micro-batches of a step is what is read of them.

    Args:
        order: The order of the phases.
        pieces: The steps of a rank by phase.
        backward: Outputs of the backward pass.
    """
    if order.table.micro_batches == 1:
        return frozenset()
    program, phases = next(iter(pieces.values())).program, order.phases
    read = {output.value for output in program.outputs if output.whole in backward}
    reduce = pieces.get(phases.number(Part.REDUCE))
    read |= set() if reduce is None else reduce.outside
    made = made_by_phase(pieces, backward).items()
    often = (values for phase, values in made if not phases.is_once(phase))
    return frozenset(read.intersection(itertools.chain.from_iterable(often)))
