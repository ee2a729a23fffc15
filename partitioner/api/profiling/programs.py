"""A program of one device in phases, as borders between sessions are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partitioner.ir.program import Compute, Programs


def in_phases(programs: Programs, bounds: Sequence[int]) -> Programs:
    """The one rank's program in phases; in ONNX Runtime each is a session of its own.

    Args:
        programs: Of one rank without communications.
        bounds: Positions of the steps with which the phases but the first begin.
    """
    (program,) = programs.ranks
    steps = [
        replace(step, phase=sum(index >= bound for bound in bounds))
        for index, step in enumerate(program.steps)
        if isinstance(step, Compute)
    ]
    return replace(programs, ranks=(replace(program, steps=tuple(steps)),))
