"""The MILP of a joint problem: relaxed and rounded, or solved from the best plan so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.incumbents import Search, offer_all, squeezed
from partitioner.solver.joint.local_search import local_search
from partitioner.solver.milp.engines import node_steps_of, solve_milp
from partitioner.solver.milp.formulation import Formulation, Goal, formulate
from partitioner.solver.milp.program import MilpResult
from partitioner.solver.presolve.simplify import keep_choices
from partitioner.solver.problem import canonical
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work

#: Rows of the MILP hold within this of their scale: a plan may look as if it fitted by so much.
ROW_TOLERANCE = 2e-6
#: Min-max programs with more binaries are only relaxed. Of ResNet-50 on 4 devices (704 binaries)
#: HiGHS solves the root in 0.3 s and 6 nodes in the next 25 s, without moving either bound by 1 %;
#: random placements of 80 binaries are proven to 1 % in 7 s, of 120 not in 10 s.
EXACT_BINARIES = 100
#: A plan is sought among the choices that the relaxation takes at least so much of, in relation to
#: the one of the same node that it takes most of.
SHARE = 1e-3
#: The relaxation may take one of so many shares of the steps if no plan fits yet; one of so many
#: before local search of one that does.
SHARES, FIRST_SHARES = 2, 8
#: Moves that local search tries from the plan of a relaxation: bytes over the limits, above all.
POLISH = 2_000


def round_relaxation(search: Search, shares: float | None = None) -> bool:
    """Bound the throughput of one group by the relaxed MILP, and offer a plan of what it chooses.

    The relaxation is nearly tight: few nodes are shared among several choices. Elimination finds
    the best plan of those, as it does of a graph that is not wide. It leaves memory aside: where
    its plan does not fit, bytes have a price. Of the training steps and models of
    `tests/benchmarks/accuracy.py` such plans are within 0.5 % of the bound, after seconds, where
    the MILP takes minutes for some.

    It may take one of `shares` of the steps that are left, and it is returned whether it may, or
    the clock has stopped it; by default all, or one of `SHARES` where no plan fits yet.
    """
    form = _formulated(search, "throughput")
    if form is None:
        return search.work.late
    if shares is None:
        shares = SHARES if search.best is None and search.closest is not None else 0
    if shares and node_steps_of(form.milp) > search.work.left / shares:
        return False
    values = _relaxed(search, form)
    if values:
        ranked = offer_all(search, _rounded(search, form, values), search.engine.relaxation)
        if ranked:  # a few moves more, also where the relaxation has taken the steps that were left
            nearest = min(ranked, key=ranked.__getitem__)
            work = Work(search.work.deadline, parent=search.work)
            better = local_search(
                search.problem, nearest, effort=POLISH, work=work, seed=search.seed
            )
            search.offer(better, search.engine.relaxation)
    return True


def _rounded(
    search: Search, form: Formulation, values: Sequence[float]
) -> Iterator[tuple[int, ...]]:
    """Plans near the values of a relaxed MILP of one group."""
    yield form.decode(values)
    kept = []
    for row in form.select:
        least = SHARE * max(values[column] for column in row)
        kept.append([choice for choice, column in enumerate(row) if values[column] > least])
    few = keep_choices(search.problem, kept)
    # few eliminations, which are tried also where the relaxation has taken the steps that were left
    eliminator = Eliminator(few, Work(search.work.deadline, parent=search.work))
    answer = eliminator.min_sum([1 / few.devices] * few.devices)
    if answer is None or math.isinf(answer[1]):
        return
    plans = [answer[0]]
    if evaluate_choices(few, answer[0]).excess_bytes > 0:
        plans += squeezed(eliminator, answer[0])
    for plan in plans:
        yield tuple(choices[pick] for choices, pick in zip(kept, plan, strict=True))


def run_milp(search: Search, goal: Goal) -> None:
    """Let the MILP close the gap, from the best plan so far.

    Where work is placed on groups and a plan is known, a large program is only relaxed: branching
    adds little to its bound (see `EXACT_BINARIES`).
    """
    form = _formulated(search, goal)
    if form is None:
        return
    several = form.min_max and len(search.problem.groups) > 1
    if several and search.best is not None and sum(form.milp.integer) > EXACT_BINARIES:
        values = _relaxed(search, form)
        if values:
            search.offer(form.decode(values), search.engine.relaxation)
        return
    start, source = None, search.engine.integer_program
    if search.best is not None:
        start = form.start(canonical(search.problem, search.best))
    result = solve_milp(form.milp, search.work, search.gap / 2, start, engine=search.engine)
    if not _prove(search, form, result, source):
        return
    outcome = search.offer(form.decode(result.values), source)
    if outcome is not None and outcome.excess_bytes > 0:
        _repair(search, goal)


def _formulated(search: Search, goal: Goal) -> Formulation | None:
    """The MILP of a search; the clock ends its writing where a plan is known."""
    if search.best is None:
        return formulate(search.problem, goal)
    return formulate(search.problem, goal, search.cost, search.work)


def _relaxed(search: Search, form: Formulation) -> tuple[float, ...]:
    """The values of a relaxed MILP of the throughput, or none; its bound is proven."""
    result = solve_milp(form.milp.relaxed(), search.work, search.gap / 2, engine=search.engine)
    return result.values if _prove(search, form, result, search.engine.relaxation) else ()


def _prove(search: Search, form: Formulation, result: MilpResult, source: str) -> bool:
    """Prove what a program's result does; return whether it has values."""
    if result.status == "infeasible" and search.best is None:
        search.prove(math.inf, source)
        return False
    if math.isfinite(result.bound):
        search.prove(form.bound(result.bound), source)
    return bool(result.values)


def _repair(search: Search, goal: Goal) -> None:
    """Solve again with a little less memory: the plan fits only within the solver's tolerance."""
    limits = tuple(limit * (1 - ROW_TOLERANCE) for limit in search.problem.limit_bytes)
    form = formulate(replace(search.problem, limit_bytes=limits), goal)
    if form is None:
        return
    result = solve_milp(form.milp, search.work, search.gap / 2, engine=search.engine)
    if result.values:
        search.offer(form.decode(result.values), search.engine.integer_program)
