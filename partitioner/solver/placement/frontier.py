"""An order of the nodes in which few of them wait for one another, and what it is made from.

Tables over the nodes that wait (`sweep`) are as large as two to the power of their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partitioner.solver.placement.capacity import Devices, Knapsack, Star, devices, knapsack
from partitioner.solver.problem import Problem

#: Orders that are grown, and the nodes of all of them together: 0.1 s.
STARTS = 16
MOST_GROWN = 8000
#: Pairs of groups times edges that are looked at for what is certain to be paid: 1 s.
MOST_PAIRS = 500_000


@dataclass(frozen=True)
class Fleet:
    """Devices that nodes are placed on, each by itself.

    Attributes:
        found: The devices and their classes.
        sacks: What nodes take of a device, for each class.
        order: All nodes, so that few wait for one another.
    """

    found: Devices
    sacks: tuple[Knapsack, ...]
    order: tuple[int, ...]


def fleet(problem: Problem) -> Fleet | None:
    """The devices, if every group is one; None if not, or if there are too many."""
    found = devices(problem)
    if found is None:
        return None
    if len(found.classes) * len(found.device) * len(problem.edges) > MOST_PAIRS:
        return None
    sacks = tuple(knapsack(problem, found, own[0]) for own in found.classes)
    order = narrow(len(problem.nodes), [star for sack in sacks for star in sack.stars])
    return Fleet(found, sacks, order)


def narrow(count: int, stars: Iterable[Star]) -> tuple[int, ...]:
    """An order in which few nodes wait for one another, the best of those grown from some starts.

    The next node is the one that leaves the fewest waiting, of equals the one nearest to the
    node that came last.
    """
    near: list[set[int]] = [set() for _ in range(count)]
    for star in stars:
        for leaf in star.leaves:
            near[star.centre].add(leaf)
            near[leaf].add(star.centre)
    starts = max(1, min(STARTS, MOST_GROWN // count))
    step = max(1, count // starts)
    grown = (_grow(near, start) for start in range(0, count, step))
    return min(grown, key=lambda found: found[1])[0]


def _grow(near: Sequence[set[int]], first: int) -> tuple[tuple[int, ...], int]:
    """The order, and the entries of its tables."""
    place: dict[int, int] = {}
    left = [len(own) for own in near]
    waiting: set[int] = set()
    cells, node = 0, first
    while True:
        place[node] = len(place)
        waiting.add(node)
        cells += 1 << len(waiting)
        for other in near[node]:
            left[other] -= 1
        waiting = {n for n in waiting if left[n]}
        if len(place) == len(near):
            return tuple(place), cells
        ahead = {n for w in waiting for n in near[w] if n not in place}
        node = min(
            ahead or (n for n in range(len(near)) if n not in place),
            key=lambda n: (_waiting(near, left, waiting, n), -_latest(near, place, n), n),
        )


def _waiting(near: Sequence[set[int]], left: Sequence[int], waiting: set[int], node: int) -> int:
    """How many wait once this node has come."""
    closed = sum(other in waiting and left[other] == 1 for other in near[node])
    return len(waiting) + (left[node] > 0) - closed


def _latest(near: Sequence[set[int]], place: dict[int, int], node: int) -> int:
    return max((place[n] for n in near[node] if n in place), default=-1)
