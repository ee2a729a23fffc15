"""Bounds and good plans without a MILP."""

from __future__ import annotations

import math

from partitioner.solver.elimination import min_sum
from partitioner.solver.hunt import Hunt
from partitioner.solver.presolve import keep_choices
from partitioner.solver.problem import Problem
from partitioner.solver.search import local_search

#: Moves that local search tries from each start.
EFFORT = 30_000
#: The same for each choice of a node: small problems are left to the MILP early.
EFFORT_PER_CHOICE = 60


def relax(hunt: Hunt) -> None:
    """Bound the throughput by the least weighted sum of the loads, memory left aside.

    For weights that add up to 1 no plan's largest load is below it. Where all devices carry the
    same load in every plan this is the optimum itself.
    """
    devices = hunt.problem.devices
    found = min_sum(hunt.problem, [1 / devices] * devices)
    if found is None:
        return
    chosen, value = found
    hunt.prove(value, "elimination")
    if math.isfinite(value):
        hunt.offer(chosen, "elimination")


def seek(hunt: Hunt) -> None:
    """Offer plans: the best of each device group alone, and what local search makes of the best."""
    effort = min(EFFORT, EFFORT_PER_CHOICE * sum(map(len, hunt.problem.nodes)))
    starts = _alone(hunt.problem)
    for chosen in starts:
        hunt.offer(chosen, "elimination")
    for chosen in starts:
        if hunt.done or not hunt.left_s:
            return
        peak = hunt.objective == "memory"
        better = local_search(
            hunt.problem, chosen, peak=peak, effort=effort, deadline=hunt.deadline, seed=hunt.seed
        )
        hunt.offer(better, "local search")


def _alone(problem: Problem) -> list[tuple[int, ...]]:
    """The best plan of each group that can run every node; of all choices if there is none."""
    groups = sorted({choice.group for choices in problem.nodes for choice in choices})
    twins = {group for alike in problem.interchangeable for group in alike[1:]}
    plans = []
    for group in [None, *(g for g in groups if g not in twins)]:
        kept = tuple(
            tuple(p for p, c in enumerate(choices) if group in (None, c.group))
            for choices in problem.nodes
        )
        if not all(kept):
            continue
        found = min_sum(keep_choices(problem, kept), [1.0] * problem.devices)
        if found is not None and math.isfinite(found[1]):
            plans.append(tuple(own[p] for own, p in zip(kept, found[0], strict=True)))
    return list(dict.fromkeys(plans))
