"""A second look at spaces where no plan fits by the safe memory formula: by exact liveness."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from partitioner.problem.build import Built
from partitioner.search.outcome import Candidate, Refused
from partitioner.search.request import Request
from partitioner.solver import (
    Infeasible,
    Objective,
    Problem,
    Solution,
    SolverError,
    evaluate_choices,
    least_shortage,
    solve,
)
from partitioner.strategies.spaces import Family

#: Seconds beyond the time limit for the second look, and for the reason of a refusal.
SECOND_LOOK_S = 2.0
#: Memory limits to search under, over the least peak by the safe formula. The first plan that
#: fits exactly is taken, so the loosest limit comes first.
SLACKS = (math.inf, 1.5, 1.2, 1.1)

#: Turns a solution of a space's problem into a plan with its evaluation.
Evaluate = Callable[[Family, Built, Solution], Candidate]


def second_look(
    refused: Sequence[Refused],
    request: Request,
    time_limit_s: float,
    evaluated: Evaluate,
    holdings: Callable[[Candidate, int], str],
    *,
    complete: bool,
) -> Candidate:
    """A plan that fits by exact liveness, in the graph's order of nodes.

    Args:
        refused: All spaces that were searched.
        request: The request.
        time_limit_s: Wall-clock limit in seconds.
        evaluated: Evaluates a solution.
        holdings: In words, the bytes that a device holds under a plan.
        complete: Whether these are all spaces of the request.

    Raises:
        Infeasible: There is none; the error is that of the space nearest to fitting.
    """
    deadline = time.monotonic() + time_limit_s
    solve_within = partial(solve, gap=request.gap, seed=request.seed, engine=request.engine)
    nearest = sorted(refused, key=lambda space: _distance(space.error))
    for index, space in enumerate(nearest):
        left_s = (deadline - time.monotonic()) / (len(nearest) - index + 1)
        if left_s > 0 and _may_fit(space):
            fitting = _exactly(space, request.objective, left_s, evaluated, solve_within)
            if fitting is not None:
                return fitting
    first = nearest[0]
    left_s = max(SECOND_LOOK_S / 2, deadline - time.monotonic())
    try:
        solution = least_shortage(
            first.built.problem,
            request.objective,
            first.error,
            left_s,
            request.seed,
            request.engine,
        )
    except Infeasible as error:
        certain = complete and error.proven and all(s.error.proven for s in nearest[1:])
        parts = ""
        if error.closest is not None and error.device is not None:
            closest = Solution(error.closest, math.inf, 0.0, "feasible", None, "")
            nearest_plan = evaluated(first.space, first.built, closest)
            parts = f"; there it holds {holdings(nearest_plan, error.device)}"
        alone = len(nearest) == 1
        raise _verdict(first.space, error, parts, certain=certain, alone=alone) from None
    return evaluated(first.space, first.built, solution)


def _distance(error: Infeasible) -> float:
    return math.inf if error.closest is None else error.bytes_short


def _may_fit(space: Refused) -> bool:
    """Whether the nearest plan's weights alone fit: liveness cannot make them smaller."""
    closest, problem = space.error.closest, space.built.problem
    if closest is None:
        return True
    try:
        return evaluate_choices(_resident(problem), closest).excess_bytes <= 0
    except SolverError:
        return True


def _resident(problem: Problem) -> Problem:
    """The problem with only those bytes that are held throughout, such as weights."""
    last = len(problem.nodes) - 1
    nothing = (0.0,) * problem.devices
    items = (
        item if (item.first, item.last) == (0, last) else replace(item, bytes=nothing)
        for item in problem.items
    )
    return replace(problem, items=tuple(items))


def _exactly(
    space: Refused,
    objective: Objective,
    time_limit_s: float,
    evaluated: Evaluate,
    solve_within: Callable[..., Solution],
) -> Candidate | None:
    """A plan that fits by exact liveness: the cheapest within `SLACKS`, else the smallest."""
    deadline = time.monotonic() + time_limit_s
    problem = space.built.problem

    def within(limit: float, goal: Objective, seconds: float) -> Candidate:
        limited = replace(problem, limit_bytes=(limit,) * problem.devices)
        solution = solve_within(limited, goal, time_limit_s=seconds, reason_s=0.0)
        return evaluated(space.space, space.built, solution)

    best = within(math.inf, "memory", time_limit_s / 2)
    if not best.evaluation.fits_exactly:
        return None
    bound, least_peak = 0.0, best.solution.cost
    for slack in SLACKS if objective != "memory" else ():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            plan = within(slack * least_peak, objective, left_s)
        except Infeasible:
            break
        bound = bound or plan.solution.bound  # of the first search, which has no limits
        if plan.evaluation.fits_exactly:
            best = plan
            break
    if objective == "memory":
        unlimited = replace(_resident(problem), limit_bytes=(math.inf,) * problem.devices)
        bound = solve_within(unlimited, "memory", time_limit_s=time_limit_s / 2).bound
    bound = min(bound, best.cost(objective))
    return replace(best, solution=replace(best.solution, bound=bound, status="feasible"))


def _verdict(
    family: Family, error: Infeasible, parts: str, *, certain: bool, alone: bool
) -> Infeasible:
    verdict, _, shortage = str(error).partition(": ")
    if error.proven and not certain:
        verdict = "no plan was found that fits"
    nearest = "" if alone else ", the nearest to fitting of the spaces searched"
    where = f"this is {family}{nearest}, with the nodes in the model's order"
    return Infeasible(
        f"{verdict}: {shortage}{parts}; {where}", **{**vars(error), "proven": certain}
    )
