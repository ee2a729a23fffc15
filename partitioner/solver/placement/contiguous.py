"""Contiguous placement: an order is cut into intervals, one a device group, by an exact DP.

The states of the DP (`stages.least_cuts`) are the numbers of groups of each class in use. The loads
are `intervals.interval_loads`: exact where groups are interchangeable and no value is read in two
other intervals, a lower bound on contiguous plans in this order otherwise. The referee prices the
plans. Long orders are cut only at the best of a bounded number of positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.solver.placement.intervals import Blocks, Picks, interval_loads
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.stages.least_cuts import LeastCuts, State, least_cuts
from partitioner.solver.symmetry import group_classes, group_devices

Classes = tuple[tuple[int, ...], ...]  #: Interchangeable groups together, any other by itself.

#: No more combinations of used groups than this are told apart.
MAX_STATES = 4096
#: An order is cut at no more positions than this: the DP takes their square in time and memory.
MAX_CUTS = 1000


@dataclass(frozen=True)
class Split:
    """Intervals of the order, each on a group."""

    chosen: tuple[int, ...]  #: The plan.
    value: float  #: Its largest load as the DP counts it.


def contiguous_plans(
    problem: Problem, picks: Picks, parts: Sequence[Sequence[int]] | None = None
) -> list[Split]:
    """The best contiguous plan for each number of groups used, fewest first.

    Only groups with picks are used. Parts are nodes that stay together, in the order that is cut;
    without them the order of the problem is cut at any node.
    """
    if len(picks) < 2:
        return []
    classes = group_classes(problem, picks)
    if math.prod(len(members) + 1 for members in classes) > MAX_STATES:
        return []
    blocks = _blocks(problem, [(n,) for n in range(len(problem.nodes))] if parts is None else parts)
    positions = _fullest(problem, picks)
    loads = []
    for members in classes:
        # one group of each class that the rest may be on while the first one runs an interval
        others = [*members[1:2], *(rest[0] for rest in classes if rest is not members)]
        of_blocks = interval_loads(problem, members[0], picks, others, blocks, positions)
        loads.append(np.pad(of_blocks, ((0, 1), (1, 0)), constant_values=math.inf))
    cuts = least_cuts(loads, _steps(problem, classes))
    by_count: dict[int, tuple[float, State]] = {}
    for used, best in cuts.load_s.items():
        count = sum(used)
        if count and best[-1] < by_count.get(count, (math.inf, used))[0]:
            by_count[count] = (float(best[-1]), used)
    return [
        Split(_chosen(cuts, classes, used, picks, blocks), value)
        for _, (value, used) in sorted(by_count.items())
    ]


def _fullest(problem: Problem, picks: Picks) -> tuple[int, ...]:
    """Positions at which intervals are held against the limits.

    These are the last one and that at which the groups hold most, if each runs all nodes.
    """
    positions = {len(problem.nodes) - 1}
    for chosen in picks.values():
        outcome = evaluate_choices(problem, chosen)
        fullest = max(range(problem.devices), key=outcome.peak_bytes.__getitem__)
        positions.add(outcome.peak_position[fullest])
    return tuple(sorted(positions))


def _steps(problem: Problem, classes: Classes) -> dict[State, list[tuple[State, int]]]:
    """The numbers of groups of each class that may be in use, none sharing a device."""
    devices = {g: group_devices(problem, g) for members in classes for g in members}
    states = itertools.product(*(range(len(members) + 1) for members in classes))
    steps: dict[State, list[tuple[State, int]]] = {}
    for used in sorted(states, key=lambda used: (sum(used), used)):
        groups = [g for n, members in zip(used, classes, strict=True) for g in members[:n]]
        union = frozenset().union(*(devices[g] for g in groups))
        if sum(len(devices[g]) for g in groups) <= len(union):
            steps[used] = [
                ((*used[:index], used[index] - 1, *used[index + 1 :]), index)
                for index in range(len(classes))
            ]
    return steps


def _chosen(
    cuts: LeastCuts, classes: Classes, used: State, picks: Picks, blocks: Blocks
) -> tuple[int, ...]:
    """The plan of a cut: of each class the last groups in use run the last intervals."""
    chosen, left, ends = [0] * len(blocks.order), list(used), (0, *blocks.ends)
    for start, stop, index in reversed(cuts.stages(used)):
        left[index] -= 1
        group = classes[index][left[index]]
        for node in blocks.order[ends[start] : ends[stop]]:
            chosen[node] = picks[group][node]
    return tuple(chosen)


def _blocks(problem: Problem, parts: Sequence[Sequence[int]]) -> Blocks:
    """Every part a block; of many, blocks end where the fewest edges cross nearby."""
    order = tuple(itertools.chain(*parts))
    count = len(parts)
    part_of = {node: place for place, part in enumerate(parts) for node in part}
    opens = np.zeros(count + 1, dtype=int)
    for edge in problem.edges:
        first, last = sorted((part_of[edge.u], part_of[edge.v]))
        opens[first] += 1
        opens[last] -= 1
    crossing = opens.cumsum()
    window = -(-count // MAX_CUTS)
    last_parts = [
        start + int(crossing[start : start + window].argmin()) for start in range(0, count, window)
    ]
    last_parts[-1] = count - 1
    upto = list(itertools.accumulate(map(len, parts)))
    ends = [upto[part] for part in last_parts]
    of = [0] * len(order)
    for block, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        for node in order[start:end]:
            of[node] = block
    return Blocks(order, tuple(of), tuple(ends))
