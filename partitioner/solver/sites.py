"""Where each item is triggered: the view of a problem that all the search methods share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partitioner.solver.problem import Pair, Problem


@dataclass(frozen=True)
class Site:
    """One edge or hold that can trigger an item.

    Attributes:
        edge: Index of the edge, or None for a hold.
        hold: Index of the hold, or None for an edge.
        pairs: The pairs of classes of the edge that trigger it.
        choices: The choices of the hold's node that trigger it.
    """

    edge: int | None = None
    hold: int | None = None
    pairs: tuple[Pair, ...] = ()
    choices: tuple[int, ...] = ()


def item_sites(problem: Problem) -> tuple[tuple[Site, ...], ...]:
    """For each item all its sites, in the order of edges, then holds."""
    sites: list[list[Site]] = [[] for _ in problem.items]
    for index, edge in enumerate(problem.edges):
        pairs_of: dict[int, list[Pair]] = {}
        for pair, items in edge.items.items():
            for item in dict.fromkeys(items):
                pairs_of.setdefault(item, []).append(pair)
        for item, pairs in pairs_of.items():
            sites[item].append(Site(edge=index, pairs=tuple(sorted(pairs))))
    for index, hold in enumerate(problem.holds):
        choices_of: dict[int, list[int]] = {}
        for choice, items in enumerate(hold.items):
            for item in dict.fromkeys(items):
                choices_of.setdefault(item, []).append(choice)
        for item, choices in choices_of.items():
            sites[item].append(Site(hold=index, choices=tuple(choices)))
    return tuple(map(tuple, sites))


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
