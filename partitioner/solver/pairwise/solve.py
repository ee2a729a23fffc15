"""Solve the intra-operator problem: presolve, bound, search, exact program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.pairwise.bounding.dual import Dual
from partitioner.solver.pairwise.exact import columns, solve_exactly
from partitioner.solver.pairwise.model import Model, build, peaks, restrict
from partitioner.solver.pairwise.primal import Primal
from partitioner.solver.pairwise.problem import FORBIDDEN, Ints, Pairwise, evaluate
from partitioner.solver.pairwise.progress import PairwiseSolution, Progress
from partitioner.solver.pairwise.reducing.reduce import reduce
from partitioner.solver.pairwise.reducing.relax import Relaxation, relax
from partitioner.solver.problem import SolverError
from partitioner.solver.work import now_s

#: Methods that prove bounds, as certificates name them.
PRESOLVE, MESSAGES = "presolve", "message passing"
#: Source of a choice that the search began with, as certificates name it.
GIVEN = "plan so far"
#: Sweeps of a round, and those before the first.
SWEEPS = 100
WARM_UP = 60
#: The exact program is tried from this size (columns) down, and first after this many rounds.
MAX_COLUMNS = 120_000
FIRST_TRY = 20


def solve(
    problem: Pairwise,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    seed: int = 0,
    rounds: int | None = None,
    engine: Engine = HIGHS,
    patience: int | None = None,
    start: Sequence[int] | None = None,
) -> PairwiseSolution:
    """Find a choice of strategies of little cost, and bound how much less any other costs.

    Args:
        problem: The problem.
        time_limit_s: Seconds without those of compiling the solver, a guard: what is found before
            it depends on the input, the seed and the rounds only.
        gap: Relative gap, (cost - bound) / cost, at which to stop.
        seed: Of all random choices.
        rounds: Rounds of bound and search at most; None: until the gap is met or time is up.
        engine: Solves the exact program at the end.
        patience: Rounds in a row that lower the cost by less than the gap, at most; None: any
            number.
        start: A choice to do better than: where nothing does by more than the gap, the bound alone
            may end the search. One that is not feasible is of no account.

    Raises:
        SolverError: The gap or the time limit is out of range.
    """
    if not 0 <= gap < 1 or not time_limit_s > 0:
        raise SolverError(f"gap {gap} must be in [0, 1), time limit {time_limit_s} s above 0")
    now = now_s()
    progress = Progress(problem, gap, now, now + time_limit_s)
    if start is not None:
        progress.take(tuple(start), GIVEN)
    model = _presolved(progress)
    if model is not None:
        most = math.inf if rounds is None else rounds
        _search(progress, model, seed, most, engine, math.inf if patience is None else patience)
    return progress.solution()


def _presolved(progress: Progress) -> Model | None:
    """The reduced model, or None with the reason noted."""
    problem = progress.problem
    if not problem.nodes:
        progress.cost = progress.bound = 0
        return None
    reason = _shortage(problem)
    model = None if reason else reduce(build(problem))
    if model is None:
        reason = reason or "the forbidden pairs leave some node without a strategy"
    elif (model.rows.capacity < 0).any():
        reason = "what forbidden pairs leave uses more than the limit"
    if reason:
        progress.refute(reason, PRESOLVE)
    return None if reason else model


def _shortage(problem: Pairwise) -> str:
    """The reason why the strategies alone make all choices infeasible; empty if they do not."""
    first, allowed = problem.offsets[:-1], problem.costs < FORBIDDEN
    for node in np.flatnonzero(~np.logical_or.reduceat(allowed, first))[:1]:
        return f"every strategy of node {node} is forbidden"
    if problem.limit is None:
        return ""
    usable = np.where(allowed, problem.usages, np.iinfo(np.int64).max)
    least = np.minimum.reduceat(usable, first)
    same = np.flatnonzero(usable == np.repeat(least, problem.sizes))
    nodes = np.searchsorted(problem.offsets, same, side="right") - 1
    picks = same[np.searchsorted(nodes, np.arange(problem.nodes))] - first
    outcome = evaluate(problem, picks.tolist())
    if outcome.peak_usage <= problem.limit:
        return ""
    return (
        f"at time {outcome.peak_time} the least usage is {outcome.peak_usage}, above the limit "
        f"{problem.limit}"
    )


def _search(
    progress: Progress,
    model: Model,
    seed: int,
    rounds: float,
    engine: Engine,
    patience: float,
) -> None:
    primal, first = Primal(model, seed, progress.chosen), Dual(model)
    limited = len(model.rows.capacity) > 0
    if limited:  # which rows matter is seen from the whole model
        first.ascend(WARM_UP, progress.deadline)
        progress.prove(first.bound, MESSAGES)
    keep = first.met.copy()
    relaxation = relax(model, keep)
    if relaxation is None:
        progress.close(PRESOLVE)
        return
    dual, wait, done, idle = Dual(relaxation.model), FIRST_TRY, 0, 0
    dual.inherit(first)
    dual.ascend(WARM_UP if limited else 2 * WARM_UP, progress.deadline)
    with ThreadPoolExecutor(1) as pool:
        while done < rounds and idle < patience and not progress.over:
            # the search sees the bound as it was, so that threads change nothing
            view, before = dual.copy(), progress.cost
            ascent = pool.submit(dual.ascend, SWEEPS, progress.deadline)
            broken = primal.round(relaxation, view, progress)
            ascent.result()
            progress.prove(dual.bound, MESSAGES)
            done += 1
            gained = before == math.inf or before - progress.cost >= progress.gap * before
            idle = 0 if gained else idle + 1
            if done == wait and not progress.over:
                wait *= 2
                broken = np.union1d(broken, _finish(progress, dual, relaxation, engine))
            if not keep[broken].all():
                keep[broken] = True
                relaxation = relax(model, keep)
                if relaxation is None:
                    progress.close(PRESOLVE)
                    return
                former, dual = dual, Dual(relaxation.model)
                dual.inherit(former)


def _finish(progress: Progress, dual: Dual, relaxation: Relaxation, engine: Engine) -> Ints:
    """Drop strategies that no better choice takes, and solve exactly if little is left.

    Returns:
        Rows that the exact choice of the relaxation breaks.
    """
    none, small, whole = np.zeros(0, dtype=np.int64), relaxation.model, relaxation.whole
    model: Model | None = small
    if columns(small) > 10 * MAX_COLUMNS:
        return none
    if math.isfinite(progress.cost):
        keep = ~dual.dear(progress.cost - 1)
        progress.prove(dual.bound, MESSAGES)
        if not np.logical_or.reduceat(keep, small.graph.offsets[:-1]).all():
            progress.prove(progress.cost, MESSAGES)
            return none
        model = reduce(restrict(small, keep))
    if model is None:
        progress.close(MESSAGES)
        return none
    if columns(model) > MAX_COLUMNS:
        return none
    chosen, bound = solve_exactly(model, progress.left_s, progress.gap, engine)
    if bound == math.inf:
        progress.close(engine.integer_program)
        return none
    progress.prove(bound, engine.integer_program)
    if chosen is None:
        return none
    full = relaxation.lift(small.within(model.original(chosen)))
    progress.offer(whole, full, engine.integer_program)
    return peaks(whole.over(full))
