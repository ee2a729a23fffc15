"""What every interval of an order costs on one device group, all intervals at once.

The load of the interval of blocks i to j is a sum of terms that each hold on a rectangle of
(i, j): a node, a value that arrives, a value that leaves, a reshard inside. So all intervals are
priced by adding rectangles to a difference array and summing it twice.

A value that leaves is charged once, to the cheapest other group, and an arriving one as if from
the cheapest: exact where groups are alike and no value is read in two other intervals, a lower
bound otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import Edge, Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Picks = dict[int, tuple[int, ...]]  #: For each group the choice that each node takes on it.
#: (sign, first start, after the last start, first stop, after the last stop) of some intervals.
Rectangle = tuple[int, int, int, int, int]

#: Relative error that summing bytes in another order may make.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Blocks:
    """An order of the nodes, cut into blocks that stay whole.

    Attributes:
        order: Nodes in the order.
        of: Block of each node.
        ends: Where in `order` each block ends, exclusive.
    """

    order: tuple[int, ...]
    of: tuple[int, ...]
    ends: tuple[int, ...]


def interval_loads(
    problem: Problem, group: int, picks: Picks, others: Sequence[int], blocks: Blocks
) -> Floats:
    """[i, j]: the largest load of the group's devices that run blocks i to j, infinite if i > j.

    Intervals whose lasting bytes are over a limit are infinite too.

    Args:
        problem: The problem.
        group: The group.
        picks: The choice of every node on each group.
        others: Groups that the rest may be on, one of each set that is alike.
        blocks: The order.
    """
    devices = sorted(group_devices(problem, group)) or [0]
    charges = _Charges(problem, devices, len(blocks.ends))
    block, pick = blocks.of, picks[group]
    for node, choices in enumerate(problem.nodes):
        charges.load(choices[pick[node]].load_s, charges.some_in([block[node]]))
    holders: dict[int, list[int]] = {}
    for hold in problem.holds:
        for item in hold.items[pick[hold.node]]:
            holders.setdefault(item, []).append(block[hold.node])
    for item, own in holders.items():
        charges.item(item, charges.some_in(own))
    for item, arcs in _within(problem, pick).items():
        for center, leaves in _stars([(block[u], block[v]) for u, v in arcs])[0]:
            charges.item(item, charges.both_in(center, leaves))
    for item, arcs in _crossing(problem, picks, group, others, devices).items():
        from_inside, from_outside = _stars([(block[u], block[v]) for u, v in arcs])
        for center, leaves in from_inside:
            charges.item(item, charges.leaf_out(center, leaves))
        for center, leaves in from_outside:
            charges.item(item, charges.leaf_in(center, leaves))
    return charges.total()


def group_devices(problem: Problem, group: int) -> frozenset[int]:
    """The devices that a group's choices load."""
    loads = (c.load_s for choices in problem.nodes for c in choices if c.group == group)
    return frozenset(d for load in loads for d, seconds in enumerate(load) if seconds > 0)


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
        """All rectangles and what each adds; (charges, 5) and (charges, width)."""
        rectangles = np.array(self.rectangles, dtype=np.intp).reshape(-1, 5)
        return rectangles, np.array(self.parts, dtype=np.float64).reshape(-1, self.width)

    def totals(self) -> Floats:
        """[entry, i, j]: the sum over the interval of blocks i to j; (width, count, count)."""
        return summed(*self.arrays(), self.count)


def summed(rectangles: Ints, parts: Floats, count: int) -> Floats:
    """[entry, i, j]: the sum of the parts whose rectangle has (i, j); (width, count, count).

    Args:
        rectangles: Of some intervals, as `Rectangle`; (charges, 5).
        parts: What each adds; (charges, width).
        count: Blocks.
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


class _Charges(Charges):
    """Seconds, then lasting bytes, of each device of a group."""

    def __init__(self, problem: Problem, devices: list[int], count: int) -> None:
        super().__init__(count, 2 * len(devices))
        self.problem = problem
        self.devices = devices

    def load(self, load_s: Sequence[float], where: Iterable[Rectangle]) -> None:
        self.add([*(load_s[d] for d in self.devices), *(0.0 for _ in self.devices)], where)

    def item(self, index: int, where: Iterable[Rectangle]) -> None:
        item = self.problem.items[index]
        lasting = item.first == 0 and item.last == len(self.problem.nodes) - 1
        held = [item.bytes[d] if lasting else 0.0 for d in self.devices]
        self.add([*(item.load_s[d] for d in self.devices), *held], where)

    def total(self) -> Floats:
        many = len(self.devices)
        total = self.totals()
        loads: Floats = total[:many].max(axis=0)
        for device, held in zip(self.devices, total[many:], strict=True):
            loads[held > self.problem.limit_bytes[device] * (1 + ROUNDING)] = math.inf
        loads[np.tril_indices(self.count, -1)] = math.inf
        return loads


Arcs = dict[int, list[tuple[int, int]]]  #: By item: (node in the interval, node out of it).


def _within(problem: Problem, pick: Sequence[int]) -> Arcs:
    """Items that are paid where both ends of an edge are on the group."""
    found: Arcs = {}
    for edge in problem.edges:
        pair = edge.out_class[pick[edge.u]], edge.in_class[pick[edge.v]]
        for item in edge.items.get(pair, ()):
            found.setdefault(item, []).append((edge.u, edge.v))
    return found


def _crossing(
    problem: Problem, picks: Picks, group: int, others: Sequence[int], devices: Sequence[int]
) -> Arcs:
    """Items that are paid where one end is on the group, the other on the cheapest other one."""
    found: Arcs = {}
    for edge in problem.edges:
        for inside, outside in ((edge.u, edge.v), (edge.v, edge.u)):
            best: tuple[int, ...] = ()
            least = math.inf
            for other in others:
                ends = (group, other) if inside == edge.u else (other, group)
                items = _items(edge, picks, *ends)
                if items is None:
                    continue
                cost = sum(problem.items[i].load_s[d] for i in items for d in devices)
                if cost < least:
                    best, least = items, cost
            for item in best:
                found.setdefault(item, []).append((inside, outside))
    return found


def _items(edge: Edge, picks: Picks, source: int, target: int) -> tuple[int, ...] | None:
    """What the edge costs from one group to another; None if that is forbidden."""
    pair = edge.out_class[picks[source][edge.u]], edge.in_class[picks[target][edge.v]]
    return None if pair in edge.forbidden else edge.items.get(pair, ())


Star = tuple[int, list[int]]


def _stars(arcs: Sequence[tuple[int, int]]) -> tuple[list[Star], list[Star]]:
    """The arcs of one item by their common inner or outer end; each its own star if neither."""
    inside, outside = [u for u, _ in arcs], [v for _, v in arcs]
    if len(set(inside)) == 1:
        return [(inside[0], outside)], []
    if len(set(outside)) == 1:
        return [], [(outside[0], inside)]
    return [(u, [v]) for u, v in arcs], []
