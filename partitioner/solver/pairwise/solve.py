"""Solve the intra-operator problem: presolve, bound, search, exact program.

The search for good choices reads one off the bound, makes it fit, and crosses it with the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np

from partitioner.solver.milp.engines import HIGHS, Engine, solve_milp
from partitioner.solver.milp.program import Milp, MilpBuilder
from partitioner.solver.outcome import Bounds, Status, relative_gap
from partitioner.solver.pairwise.dual import Dual, dive
from partitioner.solver.pairwise.model import Model, build, peaks, restrict
from partitioner.solver.pairwise.moves import Mover
from partitioner.solver.pairwise.problem import FORBIDDEN, Floats, Ints, Pairwise, evaluate
from partitioner.solver.pairwise.relax import Relaxation, reduce, relax
from partitioner.solver.problem import SolverError
from partitioner.solver.work import Work, now_s

#: Bounds are sums of floats: this is taken off before they are rounded up to a whole number.
RELATIVE, ABSOLUTE = 1e-9, 1e-6


@dataclass(frozen=True)
class PairwiseSolution:
    """A choice of strategies and its certificate."""

    chosen: tuple[int, ...]  #: One strategy index a node; empty if none was found.
    cost: int | None  #: Its exact cost; None if none was found.
    bound: float  #: No feasible choice costs less; infinite if none is feasible.
    #: `optimal` within the gap, `feasible` (stopped by the round limit), `time_limit` (with a
    #: choice or without), or `infeasible`.
    status: Status
    reason: str  #: Why nothing is feasible; empty otherwise.
    solver: str  #: Methods that found the choice / proved the bound.
    seconds: float  #: Time spent, without that of compiling the solver.
    #: (seconds, cost, bound) at every improvement; the cost is infinite before the first choice.
    trace: tuple[tuple[float, float, float], ...]

    @property
    def gap(self) -> float:
        """The relative gap between cost and bound; infinite without a cost."""
        return math.inf if self.cost is None else relative_gap(self.cost, self.bound)


@dataclass
class Progress:
    """The best choice and bound of a search so far; see `PairwiseSolution`."""

    problem: Pairwise
    gap: float
    started: float  #: Second of `now_s` at the start, as `deadline` is of the end.
    deadline: float
    chosen: tuple[int, ...] = ()
    cost: float = math.inf  #: Of the best feasible choice; infinite if there is none.
    bound: float = 0.0
    reason: str = ""
    found_by: str = "none"  #: Method that found the choice.
    proved_by: str = "none"  #: Method that proved the bound.
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    _bounds: Bounds = field(default_factory=Bounds)

    def offer(self, model: Model, chosen: Ints, source: str) -> None:
        """Keep a choice of a model's strategies if it is feasible and better, by the referee."""
        self.take(model.original(chosen), source)

    def take(self, chosen: tuple[int, ...], source: str) -> None:
        """Keep a choice of the problem's strategies if it is feasible and better."""
        outcome = evaluate(self.problem, chosen)
        if not outcome.fault and outcome.cost < self.cost:
            self.chosen, self.cost, self.found_by = chosen, outcome.cost, source
            if self.bound > self.cost:
                self.bound, self.proved_by = self._bounds.without_those_above(self.cost)
            self._note()

    def prove(self, bound: float, source: str) -> None:
        """Keep a bound if it is higher; costs are whole, so it is rounded up."""
        if math.isfinite(bound):
            bound = math.ceil(bound - RELATIVE * abs(bound) - ABSOLUTE)
        bound = min(bound, self.cost)
        self._bounds.add(bound, source)
        if bound > self.bound:
            self.bound, self.proved_by = bound, source
            self._note()

    def refute(self, reason: str, source: str) -> None:
        """Note that nothing is feasible."""
        self.reason, self.bound, self.proved_by = reason, math.inf, source

    def close(self, source: str) -> None:
        """Note that nothing is better than the best choice; without one, that none is feasible."""
        if math.isfinite(self.cost):
            self.prove(self.cost, source)
        else:
            self.refute("no allowed choice keeps within the limit", source)

    def _note(self) -> None:
        self.trace.append((now_s() - self.started, self.cost, self.bound))

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.deadline - now_s())

    @property
    def met(self) -> bool:
        """Tell whether the gap is reached, or nothing is feasible.

        A gap as small as the share that `prove` takes off for rounding can never be proven: above
        costs of 5e8 that is whole units. So smaller gaps count as that share.
        """
        gap = max(self.gap, 2 * RELATIVE)
        return bool(self.reason) or self.cost - self.bound <= gap * self.cost < math.inf

    @property
    def over(self) -> bool:
        """Tell whether to stop."""
        return self.met or not self.left_s

    def solution(self) -> PairwiseSolution:
        """The best choice and its certificate."""
        known = bool(self.chosen) or (not self.problem.nodes and math.isfinite(self.cost))
        status: Status = "feasible" if known and self.left_s else "time_limit"
        if self.met:
            status = "infeasible" if self.reason else "optimal"
        return PairwiseSolution(
            self.chosen,
            int(self.cost) if known else None,
            self.bound,
            status,
            self.reason,
            f"{self.found_by} / {self.proved_by}",
            now_s() - self.started,
            tuple(self.trace),
        )


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
        time_limit_s: Seconds without those of compiling the solver, a guard: what is found before
            it depends on the input, the seed and the rounds only.
        gap: Relative gap, (cost - bound) / cost, at which to stop.
        rounds: Rounds of bound and search at most; None: until the gap is met or time is up.
        patience: Rounds in a row that lower the cost by less than the gap, at most; None: any
            number.
        start: A choice to do better than: where nothing does by more than the gap, the bound alone
            may end the search. One that is not feasible is of no account.
    """
    if not 0 <= gap < 1 or not time_limit_s > 0:
        raise SolverError(f"gap {gap} must be in [0, 1), time limit {time_limit_s} s above 0")
    now = now_s()
    progress = Progress(problem, gap, now, now + time_limit_s)
    if start is not None:
        progress.take(tuple(start), GIVEN)
    if not problem.nodes:
        progress.cost = progress.bound = 0
        return progress.solution()
    reason = _shortage(problem)
    model = None if reason else reduce(build(problem))
    if model is None:
        reason = reason or "the forbidden pairs leave some node without a strategy"
    elif (model.rows.capacity < 0).any():
        reason = "what forbidden pairs leave uses more than the limit"
    else:
        most = math.inf if rounds is None else rounds
        _search(progress, model, seed, most, engine, math.inf if patience is None else patience)
    if reason:
        progress.refute(reason, PRESOLVE)
    return progress.solution()


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
    progress: Progress, model: Model, seed: int, rounds: float, engine: Engine, patience: float
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


#: Nodes drawn for each node that stays, in moves of nearly all nodes, one move each.
TOURNAMENTS = (1, 2, 4, 8)
#: The price of memory rises by this factor where it is shortest, this often, to make a choice fit.
RAISE, RAISES = 1.5, 12
#: Least price of a row that is short: this share of the cost for all its capacity.
LEAST = 0.001
#: Multiples of the price of memory at which the best choice is improved.
PRICES = (1.0, 0.5, 0.0)


class Primal:
    """A fresh choice every round, and the best so far to cross it with."""

    def __init__(self, model: Model, seed: int, known: tuple[int, ...] = ()) -> None:
        """Start from a feasible choice of the problem's strategies, if one is known."""
        within = model.within(known) if known else np.full(model.graph.nodes, -1)
        start = np.maximum(within, 0)
        self._model = model
        self._fresh, self._best = Mover(model, start, 2 * seed), Mover(model, start, 2 * seed + 1)
        self._rounds = 0
        # presolve may have dropped a strategy of the choice
        self._any = bool((within >= 0).all()) and self._best.feasible
        self._draw = np.random.default_rng(seed)

    def round(self, relaxation: Relaxation, dual: Dual, progress: Progress) -> Ints:
        """Improve the best choice with parts of one that is read off the bound.

        Returns:
            The rows that the fresh choice broke before it was made to fit, the worst of each run.
        """
        model, fresh, best = self._model, self._fresh, self._best
        plain = model.graph.unary
        fresh.restart(self._choice(relaxation, dual, progress))
        if fresh.feasible:
            progress.offer(model, fresh.chosen, "decimation")
        price = relaxation.price(dual.price)
        broken = peaks(model.over(fresh.chosen))
        self._fit(fresh, price, progress)
        self._improve(fresh, plain, progress)
        good = fresh.feasible
        if good:
            progress.offer(model, fresh.chosen, "decimation")
        if not self._any or (good and fresh.cost() < best.cost()):
            former = best.chosen
            best.restart(fresh.chosen)
            if self._any:
                best.cross(former, plain)
            self._any = self._any or good
        else:
            best.cross(fresh.chosen, plain)
        for factor in PRICES if self._any else ():
            self._improve(best, model.priced(price * factor), progress)
        if best.feasible:
            self._any = True
            progress.offer(model, best.chosen, "local search")
        return broken

    def _choice(self, relaxation: Relaxation, dual: Dual, progress: Progress) -> Ints:
        """A choice of the whole model: by a dive and at once, in turns."""
        self._rounds += 1
        if self._rounds % 2 == 0:
            return relaxation.lift(dual.decide())
        nodes = dual.model.graph.nodes
        noise = np.zeros(nodes) if self._rounds == 1 else self._draw.random(nodes)
        chosen = dive(dual, noise, progress.deadline)
        return self._best.chosen if chosen is None else relaxation.lift(chosen)

    def _fit(self, fresh: Mover, price: Floats, progress: Progress) -> None:
        """Raise the price of memory where it is shortest, until it is not."""
        least = LEAST * fresh.cost() / np.maximum(self._model.rows.capacity, 1.0)
        for _ in range(RAISES):
            if fresh.excess <= 0 or not progress.left_s:
                return
            worst = peaks(self._model.over(fresh.chosen))
            price = price.copy()
            price[worst] = np.maximum(RAISE * price[worst], least[worst])
            self._improve(fresh, self._model.priced(price), progress, free=True)

    def _improve(
        self, mover: Mover, priced: Floats, progress: Progress, *, free: bool = False
    ) -> None:
        for tournament in TOURNAMENTS[-1:] if free else TOURNAMENTS:
            if progress.left_s:
                mover.widen(priced, tournament, free=free)


def columns(model: Model) -> int:
    """Columns of the program."""
    return len(model.usage) + int(np.isfinite(model.graph.entries).sum()) // 2


def solve_exactly(
    model: Model, time_limit_s: float, gap: float, engine: Engine = HIGHS
) -> tuple[Ints | None, float]:
    """Solve the program with one thread, to a relative gap.

    Returns:
        The best strategies known to the solver, if any, and a lower bound: infinite if there are
        none, minus infinity if the solver was stopped before it had one.
    """
    pairs = np.where(np.isfinite(model.graph.entries), model.graph.entries, 0.0)
    scale = max(1.0, max(model.graph.unary.max(initial=0.0), pairs.max(initial=0.0)) / 1e6)
    result = solve_milp(_program(model, scale), Work.within(time_limit_s), gap, engine=engine)
    if not result.values:
        return None, result.bound * scale
    values = np.array(result.values)
    chosen = [int(values[a:b].argmax()) for a, b in pairwise(model.graph.offsets)]
    return np.array(chosen, dtype=np.int64), result.bound * scale


def _program(model: Model, scale: float) -> Milp:
    """The integer program over the local polytope, costs in so many units.

        min   sum_v cost_v . x_v  +  sum_uv cost_uv . e_uv
        (1)   sum_p x_v[p] = 1                                  every node
        (2)   sum_q e_uv[p, q] = x_u[p],  sum_p e_uv[p, q] = x_v[q]   every edge
        (3)   sum over live v of usage_v . x_v <= capacity      every memory row

    x is binary, e continuous and not negative; forbidden pairs have no column, memory rows are in
    shares of their capacity. (2) as equalities over continuous e is the tightest form of this size
    (Wainwright and Jordan, "Graphical models, exponential families, and variational inference",
    2008).
    """
    g, sizes, first = model.graph, model.graph.sizes, model.graph.offsets.tolist()
    build = MilpBuilder()
    for cost in (g.unary / scale).tolist():
        build.column(cost=cost, upper=1.0, integer=True)
    for start, stop in pairwise(first):
        build.row(((x, 1.0) for x in range(start, stop)), 0, 1.0)
    ends = list(zip(g.tails.tolist(), g.heads.tolist(), strict=True))
    tables: list[Ints] = [np.zeros((0, 0), dtype=np.int64)] * len(ends)  # columns of pairs, or -1
    for arc, (u, v) in enumerate(ends):
        if u < v:
            costs = g.entries[g.tables[arc] : g.tables[arc] + sizes[u] * sizes[v]] / scale
            pairs = [
                build.column(cost=cost, upper=1.0) if math.isfinite(cost) else -1
                for cost in costs.tolist()
            ]
            tables[arc] = np.array(pairs, dtype=np.int64).reshape(sizes[u], sizes[v])
            tables[g.back[arc]] = tables[arc].T
    for (u, _), table in zip(ends, tables, strict=True):
        for x, row in enumerate(table.tolist(), start=first[u]):
            build.row([(x, -1.0), *((e, 1.0) for e in row if e >= 0)], 0, 0.0)
    capacity = np.maximum(model.rows.capacity, 1.0).tolist()
    held: list[list[tuple[int, float]]] = [[] for _ in capacity]
    live = zip(model.rows.first.tolist(), model.rows.last.tolist(), strict=True)
    for v, (begin, end) in enumerate(live):
        for x, at in product(range(first[v], first[v + 1]), range(begin, end)):
            held[at].append((x, float(model.usage[x]) / capacity[at]))
    for terms, most, unit in zip(held, model.rows.capacity.tolist(), capacity, strict=True):
        build.row(terms, -1, most / unit)
    return build.build()
