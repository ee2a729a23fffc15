"""What one device can do within a time: a knapsack with a cut, without the other devices.

A set S of nodes fits device d within T seconds if

    work_d(S) + communication_d(S) <= T

where communication_d(S) is what d pays for values between S and any rest. It is only charged
where it is certain: the items that a pair of nodes pays on d whichever other group the outer
node is on, or, where all groups are interchangeable, the items for any one of them. So every
plan of no more than T puts a set that fits on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.solver.engines import HIGHS, Engine
from partitioner.solver.formulation import formulate
from partitioner.solver.milp import solve_milp
from partitioner.solver.presolve import presolve
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.symmetry import symmetric_groups

#: Branch-and-bound nodes of one pricing, the seconds that guard it, and its relative gap.
BRANCHES = 3000
GUARD_S = 4.0
GAP = 1e-4


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
    alike = symmetric_groups(problem)
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
class Priced:
    """The most valuable set that fits.

    Attributes:
        bound: No set that fits is worth more.
        inside: The nodes of the best one found; None if none was.
        seconds: What it takes of the device.
    """

    bound: float
    inside: frozenset[int] | None = None
    seconds: float = 0.0


def price(
    knapsack: Problem,
    values: Sequence[float],
    limit_s: float,
    left_s: float,
    engine: Engine = HIGHS,
) -> Priced:
    """The set of most value that fits into `limit_s`.

    Args:
        knapsack: Of `knapsack`.
        values: What each node is worth, at least 0.
        limit_s: Seconds of the device.
        left_s: Wall-clock limit.
        engine: Solves the MILP.
    """
    asked = replace(
        knapsack,
        limit_bytes=(limit_s,),
        nodes=tuple((Choice((0.0,), 0, "in"), Choice((v,), 0, "out")) for v in values),
    )
    whole = math.fsum(values)
    reduced = presolve(asked)
    form = formulate(reduced.problem, "throughput")
    result = solve_milp(form.milp, min(left_s, GUARD_S), GAP, branches=BRANCHES, engine=engine)
    if result.status == "infeasible" or not math.isfinite(result.bound):
        return Priced(whole)
    bound = whole - form.bound(result.bound)
    if not result.values:
        return Priced(bound)
    chosen = reduced.restore(form.decode(result.values))
    inside = frozenset(node for node, pick in enumerate(chosen) if pick == 0)
    return Priced(bound, inside, evaluate_choices(asked, chosen).peak_bytes[0])


def knapsack(problem: Problem, found: Devices, group: int) -> Problem:
    """Which nodes are on the group's device (choice 0) or not (1), without values and limit.

    There is one device; its bytes are the seconds that the group's device spends.
    """
    seconds = work(problem, found, group)
    last = len(problem.nodes) - 1
    items: list[Item] = []
    number: dict[int, int] = {}
    holds = []
    for node, own in enumerate(seconds):
        if own > 0:
            items.append(Item((0.0,), (own,), 0, last))
            holds.append(Hold(node, ((len(items) - 1,), ())))
    edges = []
    device = found.device[group]
    for edge in problem.edges:
        paid: dict[tuple[int, int], tuple[int, ...]] = {}
        for pair in ((0, 1), (1, 0)):
            certain = _certain(found, group, edge, pair)
            costs = [(i, problem.items[i].load_s[device]) for i in sorted(certain)]
            for index, cost in costs:
                if cost and index not in number:
                    number[index] = len(items)
                    items.append(Item((0.0,), (cost,), 0, last))
            paid[pair] = tuple(number[index] for index, cost in costs if cost)
        if any(paid.values()):
            edges.append(Edge(edge.u, edge.v, (0, 1), (0, 1), paid))
    return Problem(
        devices=1,
        limit_bytes=(math.inf,),
        nodes=((Choice((0.0,), 0, "in"), Choice((0.0,), 0, "out")),) * len(seconds),
        names=problem.names,
        edges=tuple(edges),
        holds=tuple(holds),
        items=tuple(items),
    )


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
