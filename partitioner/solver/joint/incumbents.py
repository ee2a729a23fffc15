"""Bounds and good plans without a MILP."""

from __future__ import annotations

import math

from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.local_search import loads, local_search, peaks
from partitioner.solver.joint.presolve import keep_choices
from partitioner.solver.joint.progress import ROUNDING, Hunt
from partitioner.solver.placement.contiguous import Split, contiguous_plans
from partitioner.solver.placement.intervals import Picks
from partitioner.solver.placement.orders import narrow_orders
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.symmetry import symmetric_groups

#: Moves that local search tries from each start.
EFFORT = 30_000
#: The same where devices are split in pairs afterwards: 0.2 s.
QUICK = 2_000
#: The same for each choice of a node: small problems are left to the MILP early.
EFFORT_PER_CHOICE = 40
#: Plans that local search starts from.
STARTS = 2
#: Positions of the order at which the bytes are minimised for a bound on the least peak.
POSITIONS = 4
#: Prices of a byte that are tried to make a plan fit.
SQUEEZES = 8


def relax(hunt: Hunt) -> None:
    """Bound the throughput by the least weighted sum of the loads, memory left aside.

    For weights that add up to 1 no plan's largest load is below it. Where all devices carry the
    same load in every plan this is the optimum itself.
    """
    for weights in _weights(hunt.problem):
        found = hunt.eliminator.min_sum(weights)
        if found is None:
            least = (
                min(sum(w * s for w, s in zip(weights, c.load_s, strict=True)) for c in choices)
                for choices in hunt.problem.nodes
            )
            hunt.prove(sum(least), "node loads")
            continue
        chosen, value = found
        hunt.prove(value, "elimination")
        if math.isfinite(value):
            hunt.offer(chosen, "elimination")


def _weights(problem: Problem) -> list[list[float]]:
    """Of the devices, adding up to 1: all alike, and by speed where they are not.

    A device's speed is the inverse of what all nodes together would load it with: slow devices
    then count for as little as they can do.
    """
    devices = problem.devices
    whole = [
        sum(max(choice.load_s[d] for choice in choices) for choices in problem.nodes)
        for d in range(devices)
    ]
    even = [1 / devices] * devices
    if not all(whole):
        return [even]
    speed = [1 / seconds for seconds in whole]
    fair = [own / sum(speed) for own in speed]
    alike = all(math.isclose(a, b) for a, b in zip(fair, even, strict=True))
    return [even] if alike else [even, fair]


def relax_memory(hunt: Hunt) -> None:
    """Bound the least peak by the least bytes at the positions where the best plan holds most."""
    for _ in range(POSITIONS):
        plan = hunt.best if hunt.best is not None else hunt.closest
        if hunt.done or not hunt.left_s or plan is None:
            return
        outcome = evaluate_choices(hunt.problem, plan)
        fullest = max(range(hunt.problem.devices), key=outcome.peak_bytes.__getitem__)
        before = hunt.cost
        found = hunt.eliminator.min_bytes(outcome.peak_position[fullest])
        if found is None:
            return
        hunt.prove(found[1], "elimination")
        if math.isfinite(found[1]):
            hunt.offer(found[0], "elimination")
        if hunt.cost >= before:
            return


def refute(hunt: Hunt) -> None:
    """Prove that nothing fits, if at one position all plans hold more than the limits together."""
    if hunt.closest is None:
        return
    outcome = evaluate_choices(hunt.problem, hunt.closest)
    limits = hunt.problem.limit_bytes
    over = [peak - limit for peak, limit in zip(outcome.peak_bytes, limits, strict=True)]
    found = hunt.eliminator.min_bytes(outcome.peak_position[over.index(max(over))])
    if found is not None and found[1] * len(limits) > sum(limits) * (1 + ROUNDING):
        hunt.prove(math.inf, "elimination")


def squeeze(hunt: Hunt, least: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Plans of little load at several prices of a byte: the lowest at which they fit is sought."""
    problem = hunt.problem
    limits = [limit for limit in problem.limit_bytes if math.isfinite(limit)]
    plans: list[tuple[int, ...]] = []
    if not limits:
        return plans
    unit = sum(evaluate_choices(problem, least).load_s) / max(sum(limits), 1.0)
    low, high = -3.0, 3.0  # powers of ten of the price, in `unit`
    for step in range(SQUEEZES):
        power = high if not step else (low + high) / 2
        found = hunt.eliminator.min_sum([1.0] * problem.devices, unit * 10**power)
        if found is None or not hunt.left_s:
            return plans
        plans.append(found[0])
        fits = evaluate_choices(problem, found[0]).excess_bytes <= 0
        if not step and not fits:
            return plans
        low, high = (low, power) if fits else (power, high)
    return plans


def starts(hunt: Hunt) -> list[tuple[int, ...]]:
    """Each device group alone, contiguous splits over groups, the least total load."""
    picks = alone(hunt.problem, hunt.eliminator)
    plans = [*picks.values(), *(split.chosen for split in splits(hunt, picks))]
    least = _cheapest(hunt.eliminator)
    if least is None:
        return plans or [_cheapest_alone(hunt.problem)]
    return [*plans, least, *squeeze(hunt, least)]


def splits(hunt: Hunt, picks: Picks) -> list[Split]:
    """Contiguous plans of several orders, until the deadline."""
    found: list[Split] = []
    several = len(picks) > 1 and hunt.effort > 1
    given = [tuple(range(len(hunt.problem.nodes)))]
    for order in narrow_orders(hunt.problem) if several else given:
        if found and not hunt.left_s:
            break
        found += contiguous_plans(hunt.problem, picks, order)
    return found


def seek(hunt: Hunt) -> None:
    """Offer good starts, and what local search makes of the most promising."""
    # peaks make a move three times as dear, and the bound is near without many of them
    most = EFFORT // 3 if hunt.objective == "memory" else EFFORT
    if hunt.effort > 1 and hunt.fleet is not None:
        most = QUICK
    effort = min(most, EFFORT_PER_CHOICE * sum(map(len, hunt.problem.nodes)))
    ranked: dict[tuple[int, ...], tuple[float, float]] = {}
    for chosen in starts(hunt):
        outcome = hunt.offer(chosen, "DP")
        if outcome is not None:
            ranked[chosen] = outcome.excess_bytes, outcome.value(hunt.objective)
    if hunt.best is None:
        refute(hunt)
    if math.isinf(hunt.bound):
        return
    if hunt.objective == "memory":
        relax_memory(hunt)
    if hunt.best is not None:
        ranked.setdefault(hunt.best, (0.0, hunt.cost))
    for chosen in sorted(ranked, key=ranked.__getitem__)[:STARTS]:
        if hunt.done or not hunt.left_s:
            return
        goal = peaks if hunt.objective == "memory" else loads
        better = local_search(
            hunt.problem, chosen, goal=goal, effort=effort, deadline=hunt.deadline, seed=hunt.seed
        )
        hunt.offer(better, "local search")


def _cheapest(eliminator: Eliminator) -> tuple[int, ...] | None:
    """The plan of least total load, if elimination can tell and one is allowed."""
    found = eliminator.min_sum([1.0] * eliminator.problem.devices)
    return found[0] if found is not None and math.isfinite(found[1]) else None


def _cheapest_alone(problem: Problem) -> tuple[int, ...]:
    """Every node's choice of least work, whatever its neighbours choose."""
    return tuple(
        min(range(len(choices)), key=lambda pick: sum(choices[pick].load_s))
        for choices in problem.nodes
    )


def alone(problem: Problem, eliminator: Eliminator) -> Picks:
    """For each group that can run every node its best plan without the others."""
    groups = sorted({choice.group for choices in problem.nodes for choice in choices})
    twin = {group: alike[0] for alike in symmetric_groups(problem) for group in alike}
    plans: Picks = {}
    within: Picks = {}  # by place in the group: twins take the same
    for group in groups:
        kept = tuple(
            tuple(p for p, choice in enumerate(choices) if choice.group == group)
            for choices in problem.nodes
        )
        if not all(kept):
            continue
        first = twin.get(group, group)
        own = within.get(first)
        if own is None:
            whole = len(groups) == 1
            own = _cheapest(eliminator if whole else Eliminator(keep_choices(problem, kept)))
        if own is not None:
            within[group] = own
            plans[group] = tuple(options[p] for options, p in zip(kept, own, strict=True))
    return plans
