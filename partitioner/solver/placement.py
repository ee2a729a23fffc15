"""Contiguous placement: the order is cut into intervals, one a device group, by an exact DP.

The load of an interval [i, j] on a group is a sum of terms that each hold on a rectangle of
(i, j): a node, a value that arrives, a value that leaves, a reshard inside. So all intervals of a
group are priced at once by adding rectangles to a difference array and summing it twice.

    best(used groups, j) = min over i and group g of
                           max(best(used groups less g, i - 1), load(g, [i, j]))

A value that leaves is charged once, to the cheapest other group, and an arriving one as if from
the cheapest: exact where groups are alike and no value is read in two later intervals, a lower
bound on contiguous plans otherwise. The referee prices what comes out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import Edge, Problem
from partitioner.solver.symmetry import symmetric_groups

Floats = npt.NDArray[np.float64]
Picks = dict[int, tuple[int, ...]]  #: For each group the choice that each node takes on it.
Used = tuple[int, ...]  #: How many groups of each class of groups that are alike are in use.
Table = dict[Used, tuple[Floats, npt.NDArray[np.intp], npt.NDArray[np.intp]]]

#: No more combinations of used groups than this are told apart.
MAX_STATES = 4096
#: Relative error that summing bytes in another order may make.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Split:
    """Intervals of the order, each on a group.

    Attributes:
        chosen: The plan.
        value: Its largest load as the DP counts it.
    """

    chosen: tuple[int, ...]
    value: float


def contiguous_plans(problem: Problem, picks: Picks) -> list[Split]:
    """The best contiguous plan for each number of groups used, fewest first.

    Args:
        problem: The problem.
        picks: For each group that may be used, the choice of every node on it.
    """
    if len(picks) < 2:
        return []
    alike = _classes(problem, sorted(picks))
    devices = {group: _devices(problem, group) for group in picks}
    cost = {members[0]: _interval_loads(problem, members[0], picks) for members in alike}
    states = itertools.product(*(range(len(members) + 1) for members in alike))
    if math.prod(len(members) + 1 for members in alike) > MAX_STATES:
        return []
    table = _fill(sorted(states, key=lambda used: (sum(used), used)), alike, devices, cost)
    by_count: dict[int, tuple[float, Used]] = {}
    for used, (best, _, _) in table.items():
        count = sum(used)
        if count and best[-1] < by_count.get(count, (math.inf, used))[0]:
            by_count[count] = (float(best[-1]), used)
    by_count = {count: entry for count, entry in by_count.items() if entry[0] < math.inf}
    return [
        Split(_trace(table, alike, used, picks), value)
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
    table: Table, alike: Sequence[tuple[int, ...]], used: Used, picks: Picks
) -> tuple[int, ...]:
    stop = len(table[used][0]) - 1
    chosen = [0] * stop
    while stop:
        _, kind, start = table[used]
        index, first = int(kind[stop]), int(start[stop])
        group = alike[index][used[index] - 1]
        chosen[first:stop] = picks[group][first:stop]
        used = (*used[:index], used[index] - 1, *used[index + 1 :])
        stop = first
    return tuple(chosen)


def _classes(problem: Problem, groups: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups that are alike together, any other by itself."""
    sets = [tuple(g for g in alike if g in groups) for alike in symmetric_groups(problem)]
    joined = {group for alike in sets for group in alike}
    return [alike for alike in sets if alike] + [(g,) for g in groups if g not in joined]


def _devices(problem: Problem, group: int) -> frozenset[int]:
    loads = (c.load_s for choices in problem.nodes for c in choices if c.group == group)
    return frozenset(d for load in loads for d, seconds in enumerate(load) if seconds > 0)


def _interval_loads(problem: Problem, group: int, picks: Picks) -> Floats:
    """[i, j]: the largest load of the group's devices that run nodes i to j, infinite if i > j."""
    count = len(problem.nodes)
    devices = sorted(_devices(problem, group)) or [0]
    change = np.zeros((2 * len(devices), count + 1, count + 1))  # seconds, then lasting bytes
    nothing = np.zeros(problem.devices)

    def add(
        load: Floats, starts: tuple[int, int], stops: tuple[int, int], held: Floats = nothing
    ) -> None:
        """Charge intervals with i and j in these half-open ranges."""
        part = np.concatenate((load[devices], held[devices]))
        change[:, starts[0], stops[0]] += part
        change[:, starts[1], stops[0]] -= part
        change[:, starts[0], stops[1]] -= part
        change[:, starts[1], stops[1]] += part

    for node, choices in enumerate(problem.nodes):
        add(np.array(choices[picks[group][node]].load_s), (0, node + 1), (node, count))
    for hold in problem.holds:
        for index in hold.items[picks[group][hold.node]]:
            item = problem.items[index]
            lasting = item.first == 0 and item.last == count - 1
            held = np.array(item.bytes) if lasting else nothing
            add(np.array(item.load_s), (0, hold.node + 1), (hold.node, count), held)
    for source, node, readers in _values(problem, picks, group, group):
        add(source, (0, node + 1), (readers[0], count))
    others = [other for other in picks if other != group]
    for load, node, readers in _crossing(problem, picks, group, others, arriving=False):
        add(load, (0, node + 1), (node, readers[-1]))
    for load, node, readers in _crossing(problem, picks, group, others, arriving=True):
        for before, reader in itertools.pairwise((node, *readers)):
            add(load, (before + 1, reader + 1), (reader, count))
    total = change.cumsum(axis=1).cumsum(axis=2)[:, :count, :count]
    loads: Floats = total[: len(devices)].max(axis=0)
    limits = np.array(problem.limit_bytes)[devices] * (1 + ROUNDING)
    loads[(total[len(devices) :] > limits[:, None, None]).any(axis=0)] = math.inf
    loads[np.tril_indices(count, -1)] = math.inf
    return loads


Value = tuple[Floats, int, list[int]]  #: Load, producer, readers in order.


def _crossing(
    problem: Problem, picks: Picks, group: int, others: Sequence[int], *, arriving: bool
) -> Iterator[Value]:
    """Values between the group and the other group that is cheapest for it."""
    devices = sorted(_devices(problem, group))
    cheapest: dict[int, tuple[float, tuple[int, ...]]] = {}
    for index, edge in enumerate(problem.edges):
        for other in others:
            ends = (other, group) if arriving else (group, other)
            items = _items(edge, picks, *ends)
            if items is None:
                continue
            cost = sum(float(np.array(problem.items[i].load_s)[devices].sum()) for i in items)
            if cost < cheapest.get(index, (math.inf, ()))[0]:
                cheapest[index] = (cost, items)
    yield from _grouped(problem, {index: items for index, (_, items) in cheapest.items()})


def _values(problem: Problem, picks: Picks, source: int, target: int) -> Iterator[Value]:
    found = {index: _items(e, picks, source, target) for index, e in enumerate(problem.edges)}
    yield from _grouped(problem, {index: items for index, items in found.items() if items})


def _grouped(problem: Problem, found: dict[int, tuple[int, ...]]) -> Iterator[Value]:
    """Each item once, with all the readers that share it."""
    readers: dict[int, tuple[int, list[int]]] = {}
    for index, items in found.items():
        edge = problem.edges[index]
        for item in items:
            readers.setdefault(item, (edge.u, []))[1].append(edge.v)
    for item, (node, nodes) in readers.items():
        yield np.array(problem.items[item].load_s), node, sorted(nodes)


def _items(edge: Edge, picks: Picks, source: int, target: int) -> tuple[int, ...] | None:
    """What the edge costs from one group to another; None if that is forbidden."""
    pair = edge.out_class[picks[source][edge.u]], edge.in_class[picks[target][edge.v]]
    return None if pair in edge.forbidden else edge.items.get(pair, ())
