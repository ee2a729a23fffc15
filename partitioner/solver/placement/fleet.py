"""Devices that nodes are placed on, each a group by itself, with a knapsack of each.

The knapsack has a cut and leaves the other devices aside: a set S of nodes fits device d within T
seconds if

    work_d(S) + communication_d(S) <= T

where communication_d(S) is what d pays for values between S and any rest. It is only charged
where it is certain: the items that a pair of nodes pays on d whichever other group the outer
node is on, or, where all groups are interchangeable, the items for any one of them. So every
plan of no more than T puts a set that fits on every device.

The communication is a sum over stars: a node, its centre, and others, its leaves. The centre inside
and any leaf outside costs one sum, the centre outside and any leaf inside another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from partitioner.solver.problem import Edge, Problem, group_classes
from partitioner.solver.stages.cut_orders import frontier_order

#: Nodes that follow one another in an order, and the seconds that they take of a device.
Run = tuple[frozenset[int], float]

#: Pairs of groups times edges that are looked at for what is certain to be paid: 1 s.
MOST_PAIRS = 500_000


@dataclass(frozen=True)
class Star:
    """A value between a centre, the node that makes it or the one that reads it, and leaves."""

    centre: int
    leaves: tuple[int, ...]  #: Ascending.
    leave_s: float  #: Seconds of the device if the centre is inside and any leaf outside.
    come_s: float  #: Seconds of the device if the centre is outside and any leaf inside.

    def seconds(self, inside: Collection[int]) -> float:
        """Seconds of the device if it holds these nodes."""
        if self.centre in inside:
            return self.leave_s if any(leaf not in inside for leaf in self.leaves) else 0.0
        return self.come_s if any(leaf in inside for leaf in self.leaves) else 0.0


@dataclass(frozen=True)
class Knapsack:
    """Seconds that sets of nodes take of one device."""

    work_s: tuple[float, ...]  #: Seconds of each node.
    stars: tuple[Star, ...]  #: Values, each pair of centre and leaves once.

    def seconds(self, inside: Collection[int]) -> float:
        """Seconds that this set of nodes takes."""
        work = math.fsum(self.work_s[node] for node in inside)
        return work + math.fsum(star.seconds(inside) for star in self.stars)

    def merged(self, unit: Mapping[int, int]) -> Knapsack:
        """The same where some nodes are one with another one, by node."""
        work_s, stars = list(self.work_s), list[Star]()
        for node, of in unit.items():
            if node != of:
                work_s[of] += work_s[node]
                work_s[node] = 0.0
        for star in self.stars:
            centre = unit.get(star.centre, star.centre)
            leaves = {unit.get(leaf, leaf) for leaf in star.leaves} - {centre}
            if leaves:
                stars.append(Star(centre, tuple(sorted(leaves)), star.leave_s, star.come_s))
        return Knapsack(tuple(work_s), tuple(stars))


@dataclass(frozen=True)
class Fleet:
    """Groups of one device each; every node has one choice on each group."""

    problem: Problem
    device: Mapping[int, int]  #: The device of each group.
    choice: Mapping[int, tuple[int, ...]]  #: For each group the choice of each node on it.
    classes: tuple[tuple[int, ...], ...]  #: Interchangeable groups, together.

    def held(self, chosen: Sequence[int], group: int) -> frozenset[int]:
        """The nodes that a plan puts on a group."""
        picks = self.choice[group]
        return frozenset(node for node, pick in enumerate(chosen) if pick == picks[node])

    @cached_property
    def knapsacks(self) -> Mapping[int, Knapsack]:
        """Make for each group the knapsack of its device; groups of a class share one."""
        sacks: dict[int, Knapsack] = {}
        for members in self.classes:
            sacks |= dict.fromkeys(members, self._knapsack(members[0]))
        return sacks

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All nodes in an order in which few wait for others of their stars."""
        stars = [star for members in self.classes for star in self.knapsacks[members[0]].stars]
        pairs = ((star.centre, leaf) for star in stars for leaf in star.leaves)
        return frontier_order(len(self.problem.nodes), pairs)

    def _knapsack(self, group: int) -> Knapsack:
        arcs: dict[int, set[tuple[int, int]]] = {}  # of an item: (inside, outside)
        items, device = self.problem.items, self.device[group]
        for edge in self.problem.edges:
            for inside, outside in ((edge.u, edge.v), (edge.v, edge.u)):
                for item in self._certain_items(group, edge, inside):
                    if items[item].load_s[device]:
                        arcs.setdefault(item, set()).add((inside, outside))
        paid: dict[tuple[int, tuple[int, ...]], list[float]] = {}
        for item in sorted(arcs):
            # Of the centre of most arcs, if there are several. To charge the item for some of its
            # arcs only is less than it costs, so it is a bound too.
            ends = Counter((end, side) for arc in arcs[item] for side, end in enumerate(arc))
            centre, side = min(ends, key=lambda end: (-ends[end], end[1], end[0]))
            leaves = tuple(sorted(arc[1 - side] for arc in arcs[item] if arc[side] == centre))
            if len(leaves) == 1 and leaves[0] < centre:
                centre, leaves, side = leaves[0], (centre,), 1 - side
            costs = paid.setdefault((centre, leaves), [0.0, 0.0])
            costs[side] += items[item].load_s[device]
        work_s = tuple(
            choices[pick].load_s[device]
            for choices, pick in zip(self.problem.nodes, self.choice[group], strict=True)
        )
        return Knapsack(
            work_s, tuple(Star(*nodes, *costs) for nodes, costs in sorted(paid.items()))
        )

    def _certain_items(self, group: int, edge: Edge, inside: int) -> set[int]:
        """Items paid wherever the other end of the edge is, if `inside` is on the group."""
        others = [other for other in self.device if other != group]
        if len(self.classes) == 1:
            others = others[:1]
        by_other = []
        for other in others:
            u, v = (group, other) if inside == edge.u else (other, group)
            pair = edge.out_class[self.choice[u][edge.u]], edge.in_class[self.choice[v][edge.v]]
            if pair not in edge.forbidden:
                by_other.append(set(edge.items.get(pair, ())))
        return set.intersection(*by_other) if by_other else set()


def fleet(problem: Problem) -> Fleet | None:
    """The devices, if every group is one; None if not, or if there are too many."""
    groups = problem.groups
    device: dict[int, int] = {}
    choice: dict[int, list[int]] = {group: [] for group in groups}
    for choices in problem.nodes:
        if sorted(option.group for option in choices) != list(groups):
            return None
        for pick, option in enumerate(choices):
            choice[option.group].append(pick)
            for loaded, seconds in enumerate(option.load_s):
                if seconds > 0 and device.setdefault(option.group, loaded) != loaded:
                    return None
    if len(groups) < 2 or len(device) != len(groups) or len(set(device.values())) != len(device):
        return None
    classes = group_classes(problem, groups)
    if len(classes) * len(groups) * len(problem.edges) > MOST_PAIRS:
        return None
    return Fleet(problem, device, {g: tuple(picks) for g, picks in choice.items()}, classes)


def longest_runs(knapsack: Knapsack, order: Sequence[int], limit_s: float) -> list[Run]:
    """Find from each node the longest run of the order that takes at most `limit_s`, if any.

    Runs that end where another one that begins earlier ends are left out: they hold less.
    """
    stars_of: list[list[Star]] = [[] for _ in knapsack.work_s]
    for star in knapsack.stars:
        for node in (star.centre, *star.leaves):
            stars_of[node].append(star)
    runs: list[Run] = []
    reached = 0
    for start in range(len(order)):
        inside: set[int] = set()
        stop, seconds, work, cut = start, 0.0, 0.0, 0.0
        for place, node in enumerate(order[start:], start + 1):
            cut -= sum(star.seconds(inside) for star in stars_of[node])
            inside.add(node)
            cut += sum(star.seconds(inside) for star in stars_of[node])
            work += knapsack.work_s[node]
            if work > limit_s:
                break
            if work + cut <= limit_s:
                stop, seconds = place, work + cut
        if stop > max(start, reached):
            runs.append((frozenset(order[start:stop]), seconds))
            reached = stop
    return runs
