"""Contiguous placement: an order is cut into intervals, one a device group, by an exact DP.

The states of the DP (`stages.least_cuts`) are the numbers of groups of each class in use. The loads
are `interval_loads`, of all intervals at once: the load of the interval of blocks i to j is a sum
of terms that each hold on a rectangle of (i, j): a node, a value that arrives, a value that leaves,
a reshard inside. So rectangles are added to a difference array, which is summed twice.

A value that leaves is charged once, to the cheapest other group, and an arriving one as if from
the cheapest: exact where groups are interchangeable and no value is read in two other intervals,
a lower bound on contiguous plans in this order otherwise. The referee prices the plans. Long orders
are cut only at the best of a bounded number of positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import Problem, group_classes, group_devices
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.stages.cut import State, least_cuts

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
    # positions at which intervals are held against the limits
    held_at = {len(problem.nodes) - 1}
    for chosen in picks.values():
        outcome = evaluate_choices(problem, chosen)
        fullest = max(range(problem.devices), key=outcome.peak_bytes.__getitem__)
        held_at.add(outcome.peak_position[fullest])
    positions = tuple(sorted(held_at))
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
    splits, ends = [], (0, *blocks.ends)
    for _, (value, used) in sorted(by_count.items()):
        # of each class the last groups in use run the last intervals
        plan, left = [0] * len(blocks.order), list(used)
        for start, stop, index in reversed(cuts.stages(used)):
            left[index] -= 1
            group = classes[index][left[index]]
            for node in blocks.order[ends[start] : ends[stop]]:
                plan[node] = picks[group][node]
        splits.append(Split(tuple(plan), value))
    return splits


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


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Picks = dict[int, tuple[int, ...]]  #: For each group the choice that each node takes on it.
#: (sign, first start, after the last start, first stop, after the last stop) of some intervals.
Rectangle = tuple[int, int, int, int, int]

#: Relative error that summing bytes in another order may make.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Blocks:
    """An order of the nodes, cut into blocks that stay whole."""

    order: tuple[int, ...]  #: The nodes in the order.
    of: tuple[int, ...]  #: Block of each node.
    ends: tuple[int, ...]  #: Where in `order` each block ends, exclusive.


def interval_loads(
    problem: Problem,
    group: int,
    picks: Picks,
    others: Sequence[int],
    blocks: Blocks,
    positions: Sequence[int],
) -> Floats:
    """[i, j]: the largest load of the group's devices that run blocks i to j, infinite if i > j.

    Intervals whose bytes at one of the positions are over a limit are infinite too. The rest of the
    nodes may be on `others`, one group of each interchangeable set.
    """
    devices = sorted(group_devices(problem, group)) or [0]
    count = len(blocks.ends)
    # seconds of each device, then its bytes at each position
    charges = Charges(count, (1 + len(positions)) * len(devices))
    for node, choices in enumerate(problem.nodes):
        load_s = choices[picks[group][node]].load_s
        where = charges.some_in([blocks.of[node]])
        nothing = [0.0] * (len(positions) * len(devices))
        charges.add([*(load_s[d] for d in devices), *nothing], where)
    crossing = _crossing(problem, picks, group, others, devices)
    for index, where in _item_rectangles(charges, problem, picks[group], crossing, blocks.of):
        item = problem.items[index]
        held = [
            item.bytes[d] if item.first <= position <= item.last else 0.0
            for position in positions
            for d in devices
        ]
        charges.add([*(item.load_s[d] for d in devices), *held], where)
    totals = summed(*charges.arrays(), count)
    loads: Floats = totals[: len(devices)].max(axis=0)
    of_each = [device for _ in positions for device in devices]
    for device, bytes_held in zip(of_each, totals[len(devices) :], strict=True):
        loads[bytes_held > problem.limit_bytes[device] * (1 + ROUNDING)] = math.inf
    loads[np.tril_indices(count, -1)] = math.inf
    return loads


class Charges:
    """Vectors that are added up over the intervals of an order of `count` blocks."""

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.width = width
        self.rectangles: list[Rectangle] = []
        self.parts: list[Sequence[float]] = []

    def add(self, part: Sequence[float], where: Iterable[Rectangle]) -> None:
        """Add a vector of `width` entries to the intervals of some rectangles."""
        if any(part):
            for rectangle in where:
                self.rectangles.append(rectangle)
                self.parts.append(part)

    def some_in(self, blocks: Iterable[int]) -> Iterator[Rectangle]:
        """Any of the blocks is in the interval."""
        for before, block in pairwise((-1, *sorted(set(blocks)))):
            yield 1, before + 1, block + 1, block, self.count

    def both_in(self, center: int, leaves: Iterable[int]) -> Iterator[Rectangle]:
        """The centre and any of the leaves are in the interval."""
        right = min((leaf for leaf in leaves if leaf >= center), default=None)
        left = max((leaf for leaf in leaves if leaf < center), default=None)
        if right is not None:
            yield 1, 0, center + 1, right, self.count
        if left is not None:
            yield 1, 0, left + 1, center, self.count
        if right is not None and left is not None:
            yield -1, 0, left + 1, right, self.count

    def leaf_out(self, center: int, leaves: Iterable[int]) -> Iterator[Rectangle]:
        """The centre is in the interval and any of the leaves is not."""
        yield 1, 0, center + 1, center, self.count
        yield -1, 0, min(center, *leaves) + 1, max(center, *leaves), self.count

    def leaf_in(self, center: int, leaves: Iterable[int]) -> Iterator[Rectangle]:
        """The centre is not in the interval and any of the leaves is."""
        for before, leaf in pairwise((center, *sorted({b for b in leaves if b > center}))):
            yield 1, before + 1, leaf + 1, leaf, self.count
        left = sorted({b for b in leaves if b < center}, reverse=True)
        for after, leaf in pairwise((center, *left)):
            yield 1, 0, leaf + 1, leaf, after

    def arrays(self) -> tuple[Ints, Floats]:
        """All rectangles and the vector that each adds; (charges, 5) and (charges, width)."""
        rectangles = np.array(self.rectangles, dtype=np.intp).reshape(-1, 5)
        return rectangles, np.array(self.parts, dtype=np.float64).reshape(-1, self.width)


def summed(rectangles: Ints, parts: Floats, count: int) -> Floats:
    """[entry, i, j]: the sum of the parts whose rectangle has (i, j); (width, count, count).

    Rectangles are (charges, 5), the vectors that they add (charges, width).
    """
    sign, start, start_end, stop, stop_end = rectangles.T
    change = np.zeros((parts.shape[1], count + 1, count + 1))
    for row, values in zip(change, (parts * sign[:, None]).T, strict=True):
        for first, last, share in (
            (start, stop, values),
            (start_end, stop, -values),
            (start, stop_end, -values),
            (start_end, stop_end, values),
        ):
            np.add.at(row, (first, last), share)
    np.cumsum(change, axis=1, out=change)
    np.cumsum(change, axis=2, out=change)
    return change[:, :count, :count]


Arcs = dict[int, list[tuple[int, int]]]  #: By item: (node in the interval, node out of it).


def _item_rectangles(
    charges: Charges, problem: Problem, pick: Sequence[int], crossing: Arcs, block: Sequence[int]
) -> Iterator[tuple[int, Iterator[Rectangle]]]:
    """Each item with the intervals in which the group pays it: holds, edges inside, then others."""
    holders: dict[int, list[int]] = {}
    for hold in problem.holds:
        for item in hold.items[pick[hold.node]]:
            holders.setdefault(item, []).append(block[hold.node])
    for item, blocks in holders.items():
        yield item, charges.some_in(blocks)
    for item, arcs in _within(problem, pick).items():
        for center, leaves in _fans([(block[u], block[v]) for u, v in arcs])[0]:
            yield item, charges.both_in(center, leaves)
    for item, arcs in crossing.items():
        from_inside, from_outside = _fans([(block[u], block[v]) for u, v in arcs])
        for center, leaves in from_inside:
            yield item, charges.leaf_out(center, leaves)
        for center, leaves in from_outside:
            yield item, charges.leaf_in(center, leaves)


def _within(problem: Problem, pick: Sequence[int]) -> Arcs:
    """Items that are paid where both ends of an edge are on the group."""
    arcs: Arcs = {}
    for edge in problem.edges:
        for item in edge.items.get(edge.pair(pick), ()):
            arcs.setdefault(item, []).append((edge.u, edge.v))
    return arcs


def _crossing(
    problem: Problem, picks: Picks, group: int, others: Sequence[int], devices: Sequence[int]
) -> Arcs:
    """Items that are paid where one end is on the group, the other on the cheapest other one."""
    arcs: Arcs = {}
    for edge in problem.edges:
        for inside, outside in ((edge.u, edge.v), (edge.v, edge.u)):
            best: tuple[int, ...] = ()
            least = math.inf
            for other in others:
                source, target = (group, other) if inside == edge.u else (other, group)
                pair = edge.out_class[picks[source][edge.u]], edge.in_class[picks[target][edge.v]]
                if pair in edge.forbidden:
                    continue
                items = edge.items.get(pair, ())
                cost = sum(problem.items[i].load_s[d] for i in items for d in devices)
                if cost < least:
                    best, least = items, cost
            for item in best:
                arcs.setdefault(item, []).append((inside, outside))
    return arcs


Fan = tuple[int, list[int]]  #: A block, and those that it shares an item with.


def _fans(arcs: Sequence[tuple[int, int]]) -> tuple[list[Fan], list[Fan]]:
    """The arcs of one item by their common inner or outer end; each by itself if there is none."""
    inside, outside = [u for u, _ in arcs], [v for _, v in arcs]
    if len(set(inside)) == 1:
        return [(inside[0], outside)], []
    if len(set(outside)) == 1:
        return [], [(outside[0], inside)]
    return [(u, [v]) for u, v in arcs], []
