"""The load of one device group for every interval of an order, all intervals at once.

The load of the interval of blocks i to j is a sum of terms that each hold on a rectangle of
(i, j): a node, a value that arrives, a value that leaves, a reshard inside. So all intervals are
priced by adding rectangles to a difference array and summing it twice.

A value that leaves is charged once, to the cheapest other group, and an arriving one as if from
the cheapest: exact where groups are interchangeable and no value is read in two other intervals,
a lower bound otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import Problem
from partitioner.solver.symmetry import group_devices

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

    Args:
        rectangles: As `Rectangle`; (charges, 5).
        parts: The vector that each adds; (charges, width).
        count: How many blocks there are.
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
    charges: Charges,
    problem: Problem,
    pick: Sequence[int],
    crossing: Arcs,
    block: Sequence[int],
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
