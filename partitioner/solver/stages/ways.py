"""From intervals on groups of options back to stages: which option, in which way."""

from __future__ import annotations

import math

import numpy as np

from partitioner.solver.stages.model import Stage, StageProblem, flights
from partitioner.solver.stages.paths import Picks
from partitioner.solver.stages.runs import Space


def with_ways(problem: StageProblem, space: Space, picks: Picks) -> tuple[Stage, ...]:
    """The stages of a path, each on the option of its group and in the way of the least load."""
    degrees = [int(space.groups.degree[group]) for _, group, _ in picks]
    flying = flights(degrees, in_flight=problem.in_flight)
    return tuple(
        _stage(problem, space, cell, group, many)
        for (cell, group, _), many in zip(picks, flying, strict=True)
    )


def _stage(problem: StageProblem, space: Space, cell: int, group: int, many: int) -> Stage:
    i, j = int(space.start[cell]), int(space.stop[cell])
    best = Stage(i, j, -1, -1)
    least = math.inf
    for index, own in enumerate(space.groups.of):
        if own != group:
            continue
        option = problem.options[index]
        held = option.resident_bytes[:, i, j] + option.flying_bytes[:, i, j] * many
        fits = held <= problem.pools[option.pool].limit_bytes
        loads = np.where(fits, option.load_s[:, i, j], np.inf)
        way = int(loads.argmin())
        if loads[way] < least:
            least, best = float(loads[way]), Stage(i, j, index, way)
    return best
