"""Solve a problem: presolve, relaxations, incumbents, then the MILP for the gap that is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.incumbents import (
    Search,
    critical_path_s,
    lighten,
    offer_all,
    propose,
    refute,
    relax,
    relax_memory,
    seek,
    squeezed,
    starts,
)
from partitioner.solver.joint.local_search import EFFORT, local_search, peaks
from partitioner.solver.milp.engines import HIGHS, Engine, node_steps_of, solve_milp
from partitioner.solver.milp.formulation import Formulation, Goal, formulate
from partitioner.solver.milp.program import MilpResult
from partitioner.solver.outcome import Infeasible, Solution, short_of_memory
from partitioner.solver.placement.configuration import configure
from partitioner.solver.placement.exchange import exchange
from partitioner.solver.presolve.simplify import Reduced, keep_choices, presolve
from partitioner.solver.problem import Problem, SolverError, canonical
from partitioner.solver.progress import Progress, device_most_over
from partitioner.solver.referee import OBJECTIVES, PEAK_TOLERANCE, Objective, evaluate_choices
from partitioner.solver.work import Work

#: Kicks of pair splits, each time before the bound is raised: most plans need few.
KICKS = (10, 20, 40, 1000)
#: The effort from which on methods are repeated although they gained nothing.
THOROUGH = 3
#: Seconds of a search that is given no other limit.
TIME_LIMIT_S = 30.0
#: A smaller gap cannot be proven: the tie-break in the objective and rounding take as much.
LEAST_GAP = 1e-4


def solve(
    problem: Problem,
    objective: Objective = "throughput",
    work: Work | None = None,
    gap: float = 0.01,
    seed: int = 0,
    cutoff: float = math.inf,
    reason_s: float = 2.0,
    effort: int = 1,
    engine: Engine = HIGHS,
    known: Solution | None = None,
) -> Solution:
    """The best plan found within the limits, with a bound that no plan is below.

    Deterministic for equal arguments unless the clock stops something, which `work.stopped` tells;
    the status is `time_limit` then, or `optimal` where the gap is met all the same.

    Args:
        objective: "throughput" (least load of the busiest device), "memory" (least peak of the
            fullest device, then throughput at that peak) or "latency" (one request).
        work: Steps that the search may do, and the clock that stops it; None for 30 s.
        gap: Relative gap at which to stop; less than 1e-4 counts as 1e-4.
        seed: Of all random choices.
        cutoff: Stop, with the best plan so far, once it is proven that none is below this.
        reason_s: Seconds beyond the time limit that the reason of a refusal may take; without
            any, the refusal tells of the nearest plan seen (`least_shortage` can refine it).
        effort: 1 for an answer in seconds, 0 for one without a large MILP where no plan is found to
            fit; from 2 on placements on devices are also split anew in pairs, at several times the
            cost; with 3 as long as there is work left, whether or not it gains anything.
        engine: Solves the MILPs.
        known: The answer to an earlier search of the problem: this one goes on from there, with
            the methods that it left out or that ran out of steps.

    Raises:
        SolverError: The objective is unknown.
        Infeasible: No plan fits.
    """
    if objective not in OBJECTIVES:
        raise SolverError(f"objective {objective!r}: one of {', '.join(OBJECTIVES)} is known")
    work = Work.within(TIME_LIMIT_S) if work is None else work
    if not problem.nodes:
        return Solution((), 0.0, 0.0, "optimal", (), "none")
    reduced = presolve(problem)
    if not all(reduced.kept):
        raise forbidden()
    gap = max(gap, LEAST_GAP)
    search = Search(reduced.problem, objective, gap, work, seed, cutoff, effort, engine)
    if all(len(choices) == 1 for choices in search.problem.nodes):
        search.offer((0,) * len(search.problem.nodes), "presolve")
        search.prove(search.cost if search.best is not None else 0.0, "presolve")
    if known is None and not search.done:
        _METHODS[objective](search)
    elif known is not None:
        found_by, _, proved_by = known.solver.partition(" / ")
        search.offer(reduced.lower(known.chosen), found_by)
        search.prove(known.bound, proved_by)
        _go_on(search)
    if search.best is None:
        search.work = replace(Work.within(max(work.left_s, reason_s)), stopped=work.stopped)
        least = seek_least(search) if reason_s else False
        if search.best is None:
            raise refused(reduced, search, least=least)
    order = tuple(range(len(problem.nodes))) if objective == "latency" else None
    solver = f"{search.found_by} / {search.proved_by}"
    bound = min(search.bound, search.cost)
    chosen = reduced.restore(search.best)
    cost = evaluate_choices(problem, chosen).value(objective)
    return Solution(chosen, cost, min(bound, cost), search.status, order, solver)


def minimise_load(search: Search) -> None:
    """The throughput objective: the least load of the busiest device, then the fewest bytes."""
    relax(search)
    is_relaxed = (
        len(search.problem.groups) == 1
        and not search.over
        and round_relaxation(search, SHARES if search.best is None else FIRST_SHARES)
    )
    if not search.done:
        seek(search)
    if search.best is None and math.isfinite(search.bound):
        refute(search)
    if math.isfinite(search.bound):
        _improve(search, is_relaxed=is_relaxed)
    lighten(search)


def _improve(search: Search, *, is_relaxed: bool = False) -> None:
    """Improve plan and bound of the throughput, `is_relaxed` if the relaxed MILP is solved."""
    for step in _steps(search, is_relaxed=is_relaxed):
        if not search.over:
            step(search)


def _go_on(search: Search) -> None:
    if search.objective == "throughput":
        _improve(search)
    elif search.objective == "memory" or len(search.problem.groups) == 1:
        run_milp(search, "memory" if search.objective == "memory" else "throughput")
    else:
        propose(search)


def _steps(search: Search, *, is_relaxed: bool) -> Iterator[Callable[[Search], object]]:
    """The methods that improve the plan and the bound, in turn.

    Pair splits and the configuration LP take turns as long as a turn gains something.
    """
    small = sum(map(len, search.problem.nodes)) <= EXACT_BINARIES
    if len(search.problem.groups) == 1 and not is_relaxed:
        yield round_relaxation
    if small or (search.effort < 2 and (search.effort or search.best is not None)):
        yield partial(run_milp, goal="throughput")
    if search.effort < 2:
        return
    if search.fleet is not None:
        for kicks in KICKS:
            before = search.cost, search.bound
            yield partial(exchange, fleet=search.fleet, kicks=kicks)
            yield partial(configure, fleet=search.fleet, final=kicks == KICKS[-1])
            if search.effort < THOROUGH and before == (search.cost, search.bound):
                break
    elif not small:
        yield partial(run_milp, goal="throughput")


def minimise_memory(search: Search) -> None:
    """The memory objective: the least peak, then the best throughput at about that peak."""
    seek(search)
    relax_memory(search)
    if not search.over and math.isfinite(search.bound):
        run_milp(search, "memory")
    if search.best is None:
        return
    allowed = search.cost * (1 + PEAK_TOLERANCE)
    limits = tuple(min(limit, allowed) for limit in search.problem.limit_bytes)
    second = search.of_load(replace(search.problem, limit_bytes=limits))
    second.offer(search.best, search.found_by)
    minimise_load(second)
    assert second.best is not None
    search.best = second.best
    search.cost = evaluate_choices(search.problem, second.best).value("memory")


def minimise_latency(search: Search) -> None:
    """The latency objective: throughput bounds it and often finds the best plan too.

    On one group of devices the least load is the least latency, so the MILP closes the gap. On
    several, waiting is most of what is left of the gap, and the MILP knows nothing of it.
    """
    search.prove(critical_path_s(search.problem), "critical path")
    if search.done:
        return
    inner = search.of_load(search.problem, search.cutoff)
    if len(search.problem.groups) == 1:
        minimise_load(inner)
    else:
        relax(inner)
        if not _is_idle(search):
            offer_all(inner, starts(inner), "dynamic programming")
        if inner.best is None and not _is_idle(search):  # else propose has moves of its own
            seek(inner)
    search.prove(inner.bound, inner.proved_by)
    if inner.best is not None:
        search.offer(inner.best, inner.found_by)
    if not _is_idle(search) and not search.done:
        propose(search)


def _is_idle(search: Search) -> bool:
    """Tell whether the clock has stopped a search beside a plan that is known elsewhere."""
    return math.isfinite(search.cutoff) and search.work.late


_METHODS: dict[Objective, Callable[[Search], None]] = {
    "throughput": minimise_load,
    "memory": minimise_memory,
    "latency": minimise_latency,
}


#: Moves that the local search may try, in multiples of all single ones: a small problem is soon
#: proven by the MILP, and the search has no other end.
ROUNDS = 30


def least_shortage(
    problem: Problem,
    objective: Objective,
    refusal: Infeasible,
    work: Work,
    seed: int = 0,
    engine: Engine = HIGHS,
) -> Solution:
    """Refine a quick refusal of `solve`: the least number of bytes that every plan is short of.

    Should the search for the least excess come upon a plan that fits after all (the first
    search ran out of time), that plan is the answer.

    Raises:
        Infeasible: The refined refusal.
    """
    reduced = presolve(problem)
    if not all(reduced.kept):
        raise forbidden()
    progress = Progress(reduced.problem, objective, 0.0, work, seed, engine=engine)
    if refusal.proven:
        progress.prove(math.inf, "earlier search")
    if refusal.closest is not None:
        progress.offer(reduced.lower(refusal.closest), "earlier search")
    least = seek_least(progress)
    if progress.best is None:
        raise refused(reduced, progress, least=least)
    chosen = reduced.restore(progress.best)
    cost = evaluate_choices(problem, chosen).value(objective)
    order = tuple(range(len(problem.nodes))) if objective == "latency" else None
    return Solution(chosen, cost, 0.0, "feasible", order, progress.found_by)


def seek_least(progress: Progress) -> bool:
    """Look for the plan of least excess, while there is work; whether it is proven the least.

    Raises:
        Infeasible: Forbidden pairs alone rule all plans out.
    """
    if progress.work.over:
        return False
    start = None
    form = formulate(progress.problem, "excess")
    if progress.closest is not None:
        free = replace(progress.problem, limit_bytes=(math.inf,) * progress.problem.devices)
        effort = min(EFFORT, ROUNDS * sum(map(len, free.nodes)))
        nearer = local_search(
            free,
            progress.closest,
            goal=peaks,
            effort=effort,
            work=progress.work,
            seed=progress.seed,
        )
        progress.offer(nearer, "local search")
        if form is not None:
            start = form.start(canonical(progress.problem, progress.closest))
    if form is None or progress.work.over:
        return False
    gap, engine = progress.gap / 10, progress.engine
    result = solve_milp(form.milp, progress.work, gap, start, engine=engine)
    if result.status == "infeasible" and progress.closest is None:
        raise forbidden()
    if result.values:
        progress.offer(form.decode(result.values), engine.integer_program)
    if result.status != "optimal" or progress.closest is None:
        return False
    # Rows hold within a share of the bytes held, however few of them are short: less than that
    # proves nothing, and a plan that is short of less by more than it refutes it.
    outcome, proven_bytes = (
        evaluate_choices(progress.problem, progress.closest),
        form.bound(result.bound),
    )
    tolerance = ROW_TOLERANCE * max(outcome.peak_bytes)
    return tolerance < proven_bytes <= outcome.excess_bytes + tolerance


def refused(reduced: Reduced, progress: Progress, *, least: bool) -> Infeasible:
    """The verdict if nothing fits; `least` says that `closest` is short of the fewest bytes."""
    proven = least or math.isinf(progress.bound)
    if progress.closest is None:
        return Infeasible(
            "no allowed plan was found with the work that the time limit allows", proven=proven
        )
    outcome = evaluate_choices(progress.problem, progress.closest)
    device = device_most_over(progress.problem, outcome)
    held, limit = outcome.peak_bytes[device], progress.problem.limit_bytes[device]
    name = reduced.problem.names[outcome.peak_position[device]]
    refusal = short_of_memory(held, limit, device, name, proven=proven, least=least)
    refusal.closest = reduced.restore(progress.closest)
    return refusal


def forbidden() -> Infeasible:
    """The verdict where memory plays no part."""
    return Infeasible("no plan is allowed: every combination of choices takes a forbidden pair")


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
