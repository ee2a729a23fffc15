"""Solve the intra-operator problem: presolve, bound, search, exact program."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.pairwise.dual import Dual
from partitioner.solver.pairwise.exact import columns, solve_exactly
from partitioner.solver.pairwise.model import Model, build, restrict
from partitioner.solver.pairwise.primal import Primal
from partitioner.solver.pairwise.problem import FORBIDDEN, Ints, Pairwise, evaluate
from partitioner.solver.pairwise.progress import PairwiseHunt, PairwiseSolution
from partitioner.solver.pairwise.reduce import reduce
from partitioner.solver.pairwise.relax import Relaxation, relax
from partitioner.solver.pairwise.rows import peaks
from partitioner.solver.problem import SolverError

#: What proves bounds, as certificates name it.
PRESOLVE, MESSAGES = "presolve", "message passing"
#: What found a choice that the search began with.
GIVEN = "plan so far"
#: Sweeps of a round, before the search looks at what they chose.
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
        time_limit_s: Wall-clock seconds, a guard: what is found before it depends on the input,
            the seed and the rounds only.
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
    now = time.monotonic()
    hunt = PairwiseHunt(problem, gap, now, now + time_limit_s)
    if start is not None:
        hunt.take(tuple(start), GIVEN)
    model = _presolved(hunt)
    if model is not None:
        most = math.inf if rounds is None else rounds
        _search(hunt, model, seed, most, engine, math.inf if patience is None else patience)
    return hunt.solution()


def _presolved(hunt: PairwiseHunt) -> Model | None:
    """The reduced model, or None with the reason noted."""
    problem = hunt.problem
    allowed = np.add.reduceat(problem.costs < FORBIDDEN, problem.offsets[:-1], dtype=np.int64)
    for node in np.flatnonzero(allowed == 0)[:1] if problem.nodes else ():
        hunt.refute(f"every strategy of node {node} is forbidden", PRESOLVE)
        return None
    if reason := _shortage(problem):
        hunt.refute(reason, PRESOLVE)
        return None
    model = reduce(build(problem)) if problem.nodes else None
    if model is None:
        if problem.nodes:
            hunt.refute("the forbidden pairs leave some node without a strategy", PRESOLVE)
        else:
            hunt.cost = hunt.bound = 0
        return None
    if (model.rows.capacity < 0).any():
        hunt.refute("what forbidden pairs leave uses more than the limit", PRESOLVE)
        return None
    return model


def _shortage(problem: Pairwise) -> str:
    """Why even the least usage of every node is too much; empty if it is not."""
    if not problem.nodes or problem.limit is None:
        return ""
    usable = np.where(problem.costs < FORBIDDEN, problem.usages, np.iinfo(np.int64).max)
    first = problem.offsets[:-1]
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
    hunt: PairwiseHunt,
    model: Model,
    seed: int,
    rounds: float,
    engine: Engine,
    patience: float,
) -> None:
    primal, first = Primal(model, seed, hunt.chosen), Dual(model)
    limited = len(model.rows.capacity) > 0
    if limited:  # which rows matter is seen from the whole model
        first.ascend(WARM_UP, hunt.deadline)
        hunt.prove(first.bound, MESSAGES)
    keep = first.met.copy()
    relaxation = relax(model, keep)
    if relaxation is None:
        _close(hunt, PRESOLVE)
        return
    dual, wait, done, idle = Dual(relaxation.model), FIRST_TRY, 0, 0
    dual.inherit(first)
    dual.ascend(WARM_UP if limited else 2 * WARM_UP, hunt.deadline)
    with ThreadPoolExecutor(1) as pool:
        while done < rounds and idle < patience and not hunt.over:
            # the search sees the bound as it was, so that threads change nothing
            view, before = dual.copy(), hunt.cost
            ascent = pool.submit(dual.ascend, SWEEPS, hunt.deadline)
            broken = primal.round(relaxation, view, hunt)
            ascent.result()
            hunt.prove(dual.bound, MESSAGES)
            done += 1
            gained = before == math.inf or before - hunt.cost >= hunt.gap * before
            idle = 0 if gained else idle + 1
            if done == wait and not hunt.over:
                wait *= 2
                broken = np.union1d(broken, _finish(hunt, dual, relaxation, engine))
            if not keep[broken].all():
                keep[broken] = True
                relaxation = relax(model, keep)
                if relaxation is None:
                    _close(hunt, PRESOLVE)
                    return
                former, dual = dual, Dual(relaxation.model)
                dual.inherit(former)


def _finish(hunt: PairwiseHunt, dual: Dual, relaxation: Relaxation, engine: Engine) -> Ints:
    """Drop strategies that no better choice takes, and solve exactly if little is left.

    Returns:
        Rows that the exact choice of the relaxation breaks.
    """
    none, small, whole = np.zeros(0, dtype=np.int64), relaxation.model, relaxation.whole
    model: Model | None = small
    if columns(small) > 10 * MAX_COLUMNS:
        return none
    if math.isfinite(hunt.cost):
        keep = ~dual.dear(hunt.cost - 1)
        hunt.prove(dual.bound, MESSAGES)
        if not np.logical_or.reduceat(keep, small.graph.offsets[:-1]).all():
            hunt.prove(hunt.cost, MESSAGES)
            return none
        model = reduce(restrict(small, keep))
    if model is None:
        _close(hunt, MESSAGES)
        return none
    if columns(model) > MAX_COLUMNS:
        return none
    chosen, bound = solve_exactly(model, hunt.left_s, hunt.gap, engine)
    if math.isinf(bound):
        _close(hunt, engine.label)
        return none
    hunt.prove(bound, engine.label)
    if chosen is None:
        return none
    full = relaxation.lift(small.within(model.original(chosen)))
    hunt.offer(whole, full, engine.label)
    used = whole.rows.load(whole.usage[whole.graph.offsets[:-1] + full])
    return peaks(used - whole.rows.capacity)


def _close(hunt: PairwiseHunt, source: str) -> None:
    """No choice is better than the best known; without one, none is feasible."""
    if math.isfinite(hunt.cost):
        hunt.prove(hunt.cost, source)
    else:
        hunt.refute("no allowed choice keeps within the limit", source)
