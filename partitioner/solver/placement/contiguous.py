"""Contiguous placement: an order is cut into intervals, one a device group, by an exact DP.

    best(used groups, j) = min over i and group g of
                           max(best(used groups less g, i - 1), load(g, [i, j]))

The loads are `intervals.interval_loads`: exact where groups are alike and no value is read in
two other intervals, a lower bound on contiguous plans in this order otherwise. The referee
prices what comes out. Long orders are cut only at the best of a bounded number of positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.solver.placement.intervals import (
    Blocks,
    Floats,
    Picks,
    group_devices,
    interval_loads,
)
from partitioner.solver.problem import Problem
from partitioner.solver.symmetry import symmetric_groups

Used = tuple[int, ...]  #: How many groups of each class of groups that are alike are in use.
Table = dict[Used, tuple[Floats, npt.NDArray[np.intp], npt.NDArray[np.intp]]]

#: No more combinations of used groups than this are told apart.
MAX_STATES = 4096
#: An order is cut at no more positions than this: the DP takes their square in time and memory.
MAX_CUTS = 1000


@dataclass(frozen=True)
class Split:
    """Intervals of the order, each on a group.

    Attributes:
        chosen: The plan.
        value: Its largest load as the DP counts it.
    """

    chosen: tuple[int, ...]
    value: float


def contiguous_plans(
    problem: Problem, picks: Picks, order: Sequence[int] | None = None
) -> list[Split]:
    """The best contiguous plan for each number of groups used, fewest first.

    Args:
        problem: The problem.
        picks: For each group that may be used, the choice of every node on it.
        order: The nodes in the order to cut; that of the problem if not given.
    """
    if len(picks) < 2:
        return []
    alike = _classes(problem, sorted(picks))
    if math.prod(len(members) + 1 for members in alike) > MAX_STATES:
        return []
    blocks = _blocks(problem, range(len(problem.nodes)) if order is None else order)
    devices = {group: group_devices(problem, group) for group in picks}
    cost = {
        own[0]: interval_loads(problem, own[0], picks, _others(own, alike), blocks) for own in alike
    }
    states = itertools.product(*(range(len(members) + 1) for members in alike))
    table = _fill(sorted(states, key=lambda used: (sum(used), used)), alike, devices, cost)
    by_count: dict[int, tuple[float, Used]] = {}
    for used, (best, _, _) in table.items():
        count = sum(used)
        if count and best[-1] < by_count.get(count, (math.inf, used))[0]:
            by_count[count] = (float(best[-1]), used)
    by_count = {count: entry for count, entry in by_count.items() if entry[0] < math.inf}
    return [
        Split(_trace(table, alike, used, picks, blocks), value)
        for _, (value, used) in sorted(by_count.items())
    ]


def _fill(
    states: Sequence[Used],
    alike: Sequence[tuple[int, ...]],
    devices: dict[int, frozenset[int]],
    cost: dict[int, Floats],
) -> Table:
    """`best[j]` is over plans of the first j nodes; `kind` and `start` are of the last interval."""
    size = len(next(iter(cost.values()))) + 1
    empty = np.full(size, math.inf)
    empty[0] = 0.0
    none = np.full(size, -1)
    table: Table = {(0,) * len(alike): (empty, none, none)}
    for used in states:
        if not any(used) or _overlap(used, alike, devices):
            continue
        best, kind, start = np.full(size, math.inf), none.copy(), none.copy()
        for index, members in enumerate(alike):
            before = (*used[:index], used[index] - 1, *used[index + 1 :])
            if before not in table:
                continue
            # value[i, j]: the last interval is nodes i to j, the rest is done before
            value = np.maximum(table[before][0][:-1, None], cost[members[0]])
            first = value.argmin(axis=0)
            least = np.concatenate(([math.inf], value[first, np.arange(size - 1)]))
            better = least < best
            best = np.where(better, least, best)
            kind = np.where(better, index, kind)
            start = np.where(better, np.concatenate(([0], first)), start)
        table[used] = (best, kind, start)
    return table


def _overlap(
    used: Used, alike: Sequence[tuple[int, ...]], devices: dict[int, frozenset[int]]
) -> bool:
    """Whether two of the used groups share a device."""
    groups = [g for count, members in zip(used, alike, strict=True) for g in members[:count]]
    return sum(len(devices[g]) for g in groups) > len(
        frozenset().union(*(devices[g] for g in groups))
    )


def _trace(
    table: Table, alike: Sequence[tuple[int, ...]], used: Used, picks: Picks, blocks: Blocks
) -> tuple[int, ...]:
    stop = len(blocks.ends)
    chosen = [0] * len(blocks.order)
    ends = (0, *blocks.ends)
    while stop:
        _, kind, start = table[used]
        index, first = int(kind[stop]), int(start[stop])
        group = alike[index][used[index] - 1]
        for node in blocks.order[ends[first] : ends[stop]]:
            chosen[node] = picks[group][node]
        used = (*used[:index], used[index] - 1, *used[index + 1 :])
        stop = first
    return tuple(chosen)


def _classes(problem: Problem, groups: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups that are alike together, any other by itself."""
    sets = [tuple(g for g in alike if g in groups) for alike in symmetric_groups(problem)]
    joined = {group for alike in sets for group in alike}
    return [alike for alike in sets if alike] + [(g,) for g in groups if g not in joined]


def _others(own: tuple[int, ...], alike: Sequence[tuple[int, ...]]) -> list[int]:
    """One group of each class that the rest may be on while `own[0]` runs an interval."""
    return [*own[1:2], *(members[0] for members in alike if members is not own)]


def _blocks(problem: Problem, order: Sequence[int]) -> Blocks:
    """Every node a block; in a long order, blocks end where the fewest edges cross nearby."""
    count = len(order)
    position = {node: place for place, node in enumerate(order)}
    opens = np.zeros(count + 1, dtype=int)
    for edge in problem.edges:
        first, last = sorted((position[edge.u], position[edge.v]))
        opens[first] += 1
        opens[last] -= 1
    crossing = opens.cumsum()
    window = -(-count // MAX_CUTS)
    ends = [
        start + int(crossing[start : start + window].argmin()) + 1
        for start in range(0, count, window)
    ]
    ends[-1] = count
    of = [0] * count
    for block, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        for node in order[start:end]:
            of[node] = block
    return Blocks(tuple(order), tuple(of), tuple(ends))
