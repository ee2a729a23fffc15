"""The edges and holds that trigger each item: a view of a problem that many methods share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from partitioner.solver.problem import Pair, Problem

T = TypeVar("T")


class Site(NamedTuple):
    """An edge or hold that can trigger an item."""

    edge: int | None = None  #: Index of the edge, or None for a hold.
    hold: int | None = None  #: Index of the hold, or None for an edge.
    pairs: tuple[Pair, ...] = ()  #: The pairs of classes of the edge that trigger it.
    choices: tuple[int, ...] = ()  #: The choices of the hold's node that trigger it.


def item_sites(
    problem: Problem, among: Collection[int] | None = None
) -> tuple[tuple[Site, ...], ...]:
    """List for each item, or for those `among` some, its sites: edges first, then holds."""
    sites: list[list[Site]] = [[] for _ in problem.items]
    for index, edge in enumerate(problem.edges):
        for item, pairs in _triggers(edge.items.items(), among):
            sites[item].append(Site(edge=index, pairs=tuple(sorted(pairs))))
    for index, hold in enumerate(problem.holds):
        for item, choices in _triggers(enumerate(hold.items), among):
            sites[item].append(Site(hold=index, choices=tuple(choices)))
    return tuple(map(tuple, sites))


def _triggers(
    entries: Iterable[tuple[T, Sequence[int]]], among: Collection[int] | None
) -> Iterable[tuple[int, list[T]]]:
    """Each item with its triggers."""
    by_item: dict[int, list[T]] = {}
    for trigger, items in entries:
        for item in dict.fromkeys(items):
            if among is None or item in among:
                by_item.setdefault(item, []).append(trigger)
    return by_item.items()


def clique_positions(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Positions whose live sets are maximal: an interval ends there, one began since the last.

    >>> clique_positions([(0, 2), (1, 1), (2, 3)])
    [1, 2]
    """
    starts, ends = set(), set()
    for first, last in spans:
        starts.add(first)
        ends.add(last)
    positions = []
    opened = False
    for position in sorted(starts | ends):
        opened = opened or position in starts
        if opened and position in ends:
            positions.append(position)
            opened = False
    return positions
