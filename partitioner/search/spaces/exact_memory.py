"""A second look at spaces where no plan fits by the safe memory formula: by exact liveness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from partitioner.cost_model.executors import executor_of
from partitioner.foundations import units
from partitioner.search.outcome import Candidate, Refused, in_executor
from partitioner.search.request import Budget
from partitioner.search.spaces.explicit import JointSearch
from partitioner.solver.joint.solve import least_shortage, solve
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.problem import Problem, SolverError
from partitioner.solver.referee import Objective, evaluate_choices
from partitioner.strategies.spaces import Family

#: Memory limits to search under, over the least peak by the safe formula. The first plan that
#: fits exactly is taken, so the loosest limit comes first.
SLACKS = (1.5, 1.2, 1.1)
#: Each search of a second look has one of so many shares of the steps left.
SHARES = 3


def second_look(
    refused: Sequence[Refused], budget: Budget, search: JointSearch, *, complete: bool
) -> Candidate:
    """The best plan that fits by exact liveness, in the graph's order of nodes.

    It is `complete` if all spaces of the request were searched.

    Raises:
        Infeasible: There is none; the error is that of the space nearest to fitting.
    """
    nearest = sorted(
        refused, key=lambda s: math.inf if s.error.closest is None else s.error.bytes_short
    )
    best, best_s = None, math.inf
    for index, space in enumerate(nearest):
        share = replace(budget.share(len(nearest) - index + 1), best_s=best_s)
        fitting = exact_plan(space, share, search)
        if fitting is not None:
            best, best_s = fitting, min(best_s, fitting.solution.cost)
    if best is not None:
        return best
    first = nearest[0]
    if budget.work.late:  # to refine the refusal takes long
        raise _verdict(first.space, first.error, "", certain=False, alone=len(nearest) == 1)
    try:
        solution = least_shortage(
            first.built.problem, first.goal, first.error, budget.work, budget.seed, budget.engine
        )
    except Infeasible as error:
        certain = complete and error.proven and all(s.error.proven for s in nearest[1:])
        parts = ""
        if error.closest is not None and error.device is not None:
            closest = Solution(error.closest, math.inf, 0.0, "feasible", None, "")
            nearest_plan = search.candidate(first.space, first.built, closest)
            parts = f"; there it holds {search.holdings(nearest_plan, error.device)}"
            if (in_kernels := _in_kernels(nearest_plan, error)) is not None:
                error, more = in_kernels
                parts += more
        alone = len(nearest) == 1
        raise _verdict(first.space, error, parts, certain=certain, alone=alone) from None
    return search.candidate(first.space, first.built, solution)


def _in_kernels(nearest: Candidate, error: Infeasible) -> tuple[Infeasible, str] | None:
    """The refusal with the bytes that kernels are short of, and these in words.

    None if they are short of no more than tensors are. It names no plan that is close: another one
    may be chosen if so many bytes are there, and be short again.
    """
    over = in_executor(nearest.evaluation)
    if over is None or error.device is None:
        return None
    device, short = over
    limits, peak = nearest.evaluation.limit_bytes, nearest.evaluation.executor_peak[device]
    bytes_short = float(short + limits[device] - limits[error.device])
    if bytes_short <= error.bytes_short:
        return None
    name = executor_of(nearest.graph).holder
    text = f", and {units.size(peak.bytes)} on device {device} at {peak.at!r} in {name}"
    return Infeasible(
        str(error), **{**vars(error), "bytes_short": bytes_short, "closest": None}
    ), text


def _may_fit(space: Refused) -> bool:
    """Tell whether the nearest plan's weights alone fit: liveness cannot make them smaller."""
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


def exact_plan(space: Refused, budget: Budget, search: JointSearch) -> Candidate | None:
    """A plan that fits by exact liveness: the cheapest within `SLACKS`, else the smallest.

    None if none was found that costs less than `budget.best_s`, or the budget is spent.
    """
    if budget.work.over or not _may_fit(space):
        return None

    def within(limit_bytes: float, objective: Objective) -> Candidate:
        limits = (limit_bytes,) * space.built.problem.devices
        limited = replace(space.built.problem, limit_bytes=limits)
        return search.candidate(space.space, space.built, _solved(limited, objective, budget))

    best = within(math.inf, space.goal)
    bound = best.solution.bound
    if space.goal == "memory":
        limits = (math.inf,) * space.built.problem.devices
        resident = replace(_resident(space.built.problem), limit_bytes=limits)
        bound = _solved(resident, "memory", budget).bound
    if bound >= (1 - budget.gap) * budget.best_s:
        return None
    if not best.evaluation.fits_exactly and space.goal != "memory":
        best = _smaller(space.goal, budget, within)
    cost = best.cost(space.goal)
    if not best.evaluation.fits_exactly or cost >= budget.best_s:
        return None
    solution = replace(best.solution, cost=cost, bound=min(bound, cost), status="feasible")
    return replace(best, solution=solution)


def _solved(problem: Problem, objective: Objective, budget: Budget) -> Solution:
    """The best plan of a problem, searched with a share of the work."""
    return solve(
        problem,
        objective,
        budget.work.share(SHARES),
        gap=budget.gap,
        seed=budget.seed,
        engine=budget.engine,
        reason_s=0.0,
    )


def _smaller(
    goal: Objective, budget: Budget, within: Callable[[float, Objective], Candidate]
) -> Candidate:
    """The first plan within `SLACKS` that fits exactly; the smallest plan if none does.

    The smallest by the safe formula need not be the smallest by exact liveness.
    """
    smallest = within(math.inf, "memory")
    for slack in SLACKS:
        if budget.work.over:
            break
        try:
            plan = within(slack * smallest.solution.cost, goal)
        except Infeasible:
            break
        if plan.evaluation.fits_exactly:
            return plan
    return smallest


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
