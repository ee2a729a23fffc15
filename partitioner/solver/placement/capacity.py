"""What one device can do within a time: a knapsack with a cut, without the other devices.

A set S of nodes fits device d within T seconds if

    work_d(S) + communication_d(S) <= T

where communication_d(S) is what d pays for values between S and any rest. It is only charged
where it is certain: the items that a pair of nodes pays on d whichever other group the outer
node is on, or, where all groups are interchangeable, the items for any one of them. So every
plan of no more than T puts a set that fits on every device.

What is charged is a sum over stars: a node, its centre, and others, its leaves. The centre inside
and any leaf outside costs one sum, the centre outside and any leaf inside another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from partitioner.solver.problem import Edge, Problem
from partitioner.solver.symmetry import symmetric_groups


@dataclass(frozen=True)
class Devices:
    """Groups of one device each; every node has one choice on each.

    Attributes:
        device: Of each group.
        choice: For each group the choice of each node on it.
        classes: Groups that are alike, together.
    """

    device: Mapping[int, int]
    choice: Mapping[int, tuple[int, ...]]
    classes: tuple[tuple[int, ...], ...]


def devices(problem: Problem) -> Devices | None:
    """The groups, if each is one device and the bound applies; None otherwise."""
    groups = sorted({choice.group for choices in problem.nodes for choice in choices})
    device: dict[int, int] = {}
    choice: dict[int, list[int | None]] = {group: [None] * len(problem.nodes) for group in groups}
    for node, choices in enumerate(problem.nodes):
        for pick, option in enumerate(choices):
            loaded = [d for d, seconds in enumerate(option.load_s) if seconds > 0]
            if choice[option.group][node] is not None or len(loaded) > 1:
                return None
            choice[option.group][node] = pick
            if loaded and device.setdefault(option.group, loaded[0]) != loaded[0]:
                return None
    if any(pick is None for own in choice.values() for pick in own):
        return None
    if len(groups) < 2 or len(device) != len(groups) or len(set(device.values())) != len(device):
        return None
    used = (tuple(g for g in own if g in device) for own in symmetric_groups(problem))
    alike = tuple(own for own in used if own)
    joined = {group for own in alike for group in own}
    classes = (*alike, *((group,) for group in groups if group not in joined))
    picks = {g: tuple(p for p in own if p is not None) for g, own in choice.items()}
    return Devices(device, picks, classes)


def work(problem: Problem, found: Devices, group: int) -> list[float]:
    """Seconds of each node on the group's device."""
    return [
        choices[pick].load_s[found.device[group]]
        for choices, pick in zip(problem.nodes, found.choice[group], strict=True)
    ]


@dataclass(frozen=True)
class Star:
    """A value between nodes.

    Attributes:
        centre: Who makes it, or the one node that reads it.
        leaves: The other nodes, ascending.
        leave_s: What the device pays if the centre is inside and any leaf outside.
        come_s: What it pays if the centre is outside and any leaf inside.
    """

    centre: int
    leaves: tuple[int, ...]
    leave_s: float
    come_s: float

    def seconds(self, inside: Collection[int]) -> float:
        """What the device pays if it has these nodes."""
        if self.centre in inside:
            return self.leave_s if any(leaf not in inside for leaf in self.leaves) else 0.0
        return self.come_s if any(leaf in inside for leaf in self.leaves) else 0.0


@dataclass(frozen=True)
class Knapsack:
    """What a set of nodes takes of one device.

    Attributes:
        work_s: Seconds of each node.
        stars: What is paid where a value is cut, each pair of centre and leaves once.
    """

    work_s: tuple[float, ...]
    stars: tuple[Star, ...]

    def seconds(self, inside: Collection[int]) -> float:
        """What this set of nodes takes."""
        work = math.fsum(self.work_s[node] for node in inside)
        return work + math.fsum(star.seconds(inside) for star in self.stars)


@dataclass(frozen=True)
class Run:
    """Nodes that follow one another in an order, and what they take of a device."""

    inside: frozenset[int]
    seconds: float


def knapsack(problem: Problem, found: Devices, group: int) -> Knapsack:
    """What sets of nodes take of the group's device."""
    arcs: dict[int, set[tuple[int, int]]] = {}  # of an item: (inside, outside)
    device = found.device[group]
    for edge in problem.edges:
        for pair, arc in (((0, 1), (edge.u, edge.v)), ((1, 0), (edge.v, edge.u))):
            for item in _certain(found, group, edge, pair):
                if problem.items[item].load_s[device]:
                    arcs.setdefault(item, set()).add(arc)
    paid: dict[tuple[int, tuple[int, ...]], list[float]] = {}
    for item in sorted(arcs):
        centre, leaves, inside = _star(arcs[item])
        costs = paid.setdefault((centre, leaves), [0.0, 0.0])
        costs[0 if inside else 1] += problem.items[item].load_s[device]
    stars = tuple(Star(centre, leaves, *costs) for (centre, leaves), costs in sorted(paid.items()))
    return Knapsack(tuple(work(problem, found, group)), stars)


def _star(arcs: Collection[tuple[int, int]]) -> tuple[int, tuple[int, ...], bool]:
    """Centre, leaves, whether the centre is inside: those of most arcs, if there are several.

    To charge the item for some of its arcs only is less than it costs, so it is a bound too.
    """
    ends = Counter((end, side) for arc in arcs for side, end in enumerate(arc))
    centre, side = min(ends, key=lambda end: (-ends[end], end[1], end[0]))
    leaves = tuple(sorted(arc[1 - side] for arc in arcs if arc[side] == centre))
    if len(leaves) == 1 and leaves[0] < centre:
        return leaves[0], (centre,), side == 1
    return centre, leaves, side == 0


def _certain(found: Devices, group: int, edge: Edge, pair: tuple[int, int]) -> set[int]:
    """Items that are paid where the ends of the edge are in (0) or out (1) of the group."""
    others = [other for other in found.device if other != group]
    if len(found.classes) == 1:
        others = others[:1]
    kinds = []
    for other in others:
        u = found.choice[group if pair[0] == 0 else other][edge.u]
        v = found.choice[group if pair[1] == 0 else other][edge.v]
        ends = edge.out_class[u], edge.in_class[v]
        if ends not in edge.forbidden:
            kinds.append(set(edge.items.get(ends, ())))
    return set.intersection(*kinds) if kinds else set()


def longest_runs(knapsack: Knapsack, order: Sequence[int], limit_s: float) -> list[Run]:
    """From each node the longest run of the order that takes at most `limit_s`, if there is one.

    Runs that end where another one that begins earlier ends are left out: they hold less.
    """
    of: list[list[Star]] = [[] for _ in knapsack.work_s]
    for star in knapsack.stars:
        for node in (star.centre, *star.leaves):
            of[node].append(star)
    runs: list[Run] = []
    reached = 0
    for start in range(len(order)):
        found = _longest(knapsack, of, order[start:], limit_s)
        if found is not None and start + len(found.inside) > reached:
            runs.append(found)
            reached = start + len(found.inside)
    return runs


def _longest(
    knapsack: Knapsack, of: Sequence[Sequence[Star]], order: Sequence[int], limit_s: float
) -> Run | None:
    inside: set[int] = set()
    best, work, cut = None, 0.0, 0.0
    for length, node in enumerate(order, start=1):
        cut -= sum(star.seconds(inside) for star in of[node])
        inside.add(node)
        cut += sum(star.seconds(inside) for star in of[node])
        work += knapsack.work_s[node]
        if work > limit_s:
            break
        if work + cut <= limit_s:
            best = length, work + cut
    return None if best is None else Run(frozenset(order[: best[0]]), best[1])
