"""Solve a problem: presolve, relaxations, incumbents, then the MILP for what gap is left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from partitioner.solver.joint.engines import HIGHS, Engine
from partitioner.solver.joint.formulation import Goal, formulate
from partitioner.solver.joint.incumbents import refute, relax, relax_memory, seek
from partitioner.solver.joint.latency import propose
from partitioner.solver.joint.local_search import local_search
from partitioner.solver.joint.milp import solve_milp
from partitioner.solver.joint.presolve import Reduced, presolve
from partitioner.solver.joint.progress import Hunt
from partitioner.solver.joint.shortage import forbidden, refused, seek_least
from partitioner.solver.outcome import Solution
from partitioner.solver.placement.configuration import configure
from partitioner.solver.placement.exchange import exchange
from partitioner.solver.placement.neighbourhoods import share_anew
from partitioner.solver.problem import Problem, SolverError, validate
from partitioner.solver.referee import OBJECTIVES, PEAK_TOLERANCE, Objective, evaluate_choices
from partitioner.solver.symmetry import canonical

#: Rows of the MILP hold within this of their scale: a plan may look as if it fitted by so much.
ROW_TOLERANCE = 2e-6
#: Min-max programs with more binaries are only relaxed. Of ResNet-50 on 4 devices (704 binaries)
#: HiGHS solves the root in 0.3 s and 6 nodes in the next 25 s, without moving either bound by 1 %;
#: random placements of 80 binaries are proven to 1 % in 7 s, of 120 not in 10 s.
EXACT_BINARIES = 100
#: Moves that local search tries from the MILP's plan, for the tie-break.
POLISH = 2_000
#: Kicks of pair splits, each time before the bound is raised: most plans need few.
KICKS = (10, 20, 40, 1000)
#: A smaller gap cannot be proven: the tie-break in the objective and rounding take as much.
LEAST_GAP = 1e-4


def solve(
    problem: Problem,
    objective: Objective = "throughput",
    time_limit_s: float = 30.0,
    gap: float = 0.01,
    seed: int = 0,
    cutoff: float = math.inf,
    reason_s: float = 2.0,
    effort: int = 1,
    engine: Engine = HIGHS,
) -> Solution:
    """The best plan found within the limits, with a bound on what any plan can reach.

    Deterministic for equal arguments when the gap is met before the time limit.

    Args:
        problem: The question.
        objective: "throughput" (least load of the busiest device), "memory" (least peak of the
            fullest device, then throughput at that peak) or "latency" (one request).
        time_limit_s: Wall-clock limit.
        gap: Relative gap at which to stop; less than 1e-4 counts as 1e-4.
        seed: Of all random choices.
        cutoff: Give the search up, with what it has, once no plan can be below this.
        reason_s: Seconds beyond the time limit that the reason of a refusal may take; without
            any, the refusal tells of the nearest plan seen (`least_shortage` can refine it).
        effort: 1 for an answer in seconds; from 2 on placements are also cut along several
            orders and improved by large neighbourhoods, at several times the cost.
        engine: Solves the MILPs.

    Raises:
        SolverError: The problem is malformed or the objective unknown.
        Infeasible: No plan fits.
    """
    if objective not in OBJECTIVES:
        raise SolverError(f"objective {objective!r}: one of {', '.join(OBJECTIVES)} is known")
    validate(problem)
    deadline = time.monotonic() + time_limit_s
    if not problem.nodes:
        return Solution((), 0.0, 0.0, "optimal", (), "none")
    reduced = presolve(problem)
    if not all(reduced.kept):
        raise forbidden()
    hunt = Hunt(
        reduced.problem,
        objective,
        max(gap, LEAST_GAP),
        deadline,
        seed,
        cutoff,
        effort=effort,
        engine=engine,
    )
    _METHODS[objective](hunt)
    if hunt.best is None:
        _explain(reduced, hunt, reason_s)
    assert hunt.best is not None
    order = tuple(range(len(problem.nodes))) if objective == "latency" else None
    solver = f"{hunt.found_by} / {hunt.proved_by}"
    bound = min(hunt.bound, hunt.cost)
    chosen = reduced.restore(hunt.best)
    cost = evaluate_choices(problem, chosen).value(objective)
    return Solution(chosen, cost, min(bound, cost), hunt.status, order, solver)


def minimise_load(hunt: Hunt) -> None:
    """The throughput objective."""
    relax(hunt)
    if not hunt.done:
        seek(hunt)
    if hunt.best is None and math.isfinite(hunt.bound):
        refute(hunt)
    if math.isinf(hunt.bound):
        return
    for step in _steps(hunt):
        if not hunt.done and hunt.left_s:
            step(hunt)


def _steps(hunt: Hunt) -> Iterator[Callable[[Hunt], None]]:
    """What improves the plan and the bound, in turn."""
    small = sum(map(len, hunt.problem.nodes)) <= EXACT_BINARIES
    if hunt.effort < 2 or small:
        yield close
    if hunt.effort < 2:
        return
    if hunt.fleet is not None:
        for kicks in KICKS:
            yield partial(exchange, kicks=kicks)
            yield partial(configure, final=kicks == KICKS[-1])
    yield share_anew
    if hunt.fleet is None and not small:
        yield close


def close(hunt: Hunt) -> None:
    """Let the MILP close the gap of the throughput objective."""
    run_milp(hunt, "throughput")


def minimise_memory(hunt: Hunt) -> None:
    """The memory objective: the least peak, then the best throughput at about that peak."""
    seek(hunt)
    relax_memory(hunt)
    if not hunt.done and hunt.left_s and math.isfinite(hunt.bound):
        run_milp(hunt, "memory")
    if hunt.best is None:
        return
    allowed = hunt.cost * (1 + PEAK_TOLERANCE)
    limits = tuple(min(limit, allowed) for limit in hunt.problem.limit_bytes)
    second = Hunt(
        replace(hunt.problem, limit_bytes=limits),
        "throughput",
        hunt.gap,
        hunt.deadline,
        hunt.seed,
        effort=hunt.effort,
        engine=hunt.engine,
    )
    second.eliminator = hunt.eliminator  # it knows no limits
    second.offer(hunt.best, hunt.found_by)
    minimise_load(second)
    assert second.best is not None
    hunt.best = second.best
    hunt.cost = evaluate_choices(hunt.problem, second.best).value("memory")


def minimise_latency(hunt: Hunt) -> None:
    """The latency objective: throughput bounds it and often finds the best plan too."""
    inner = replace(hunt, objective="throughput")
    inner.eliminator = hunt.eliminator
    minimise_load(inner)
    hunt.prove(inner.bound, inner.proved_by)
    if inner.best is not None:
        hunt.offer(inner.best, inner.found_by)
    if not hunt.done:
        propose(hunt)


_METHODS: dict[Objective, Callable[[Hunt], None]] = {
    "throughput": minimise_load,
    "memory": minimise_memory,
    "latency": minimise_latency,
}


def run_milp(hunt: Hunt, goal: Goal) -> None:
    """Let the MILP close the gap, from the best plan so far.

    Where work is placed on groups and a plan is known, a large program is only relaxed: branching
    adds little to its bound (see `EXACT_BINARIES`).
    """
    cutoff = hunt.cost if hunt.best is not None else None
    form = formulate(hunt.problem, goal, cutoff)
    milp, start, source = form.milp, None, hunt.engine.label
    if hunt.best is not None:
        start = form.start(canonical(hunt.problem, hunt.best))
        if form.spread and _groups(hunt.problem) > 1 and sum(milp.integer) > EXACT_BINARIES:
            milp, start, source = milp.relaxed(), None, f"{hunt.engine.label} LP"
    result = solve_milp(milp, hunt.left_s, hunt.gap / 2, start, engine=hunt.engine)
    if result.status == "infeasible" and hunt.best is None:
        hunt.prove(math.inf, source)
        return
    if math.isfinite(result.bound):
        hunt.prove(form.bound(result.bound), source)
    if not result.values:
        return
    chosen = form.decode(result.values)
    outcome = hunt.offer(chosen, source)
    if outcome is None:
        return
    if outcome.excess_bytes > 0 and milp is form.milp:
        _repair(hunt, goal)
    elif goal == "throughput" and form.spread:
        better = local_search(hunt.problem, chosen, effort=POLISH, deadline=hunt.deadline)
        hunt.offer(better, source)


def _groups(problem: Problem) -> int:
    return len({choice.group for choices in problem.nodes for choice in choices})


def _repair(hunt: Hunt, goal: Goal) -> None:
    """The plan fits only within the solver's tolerance: ask again with a little less memory."""
    limits = tuple(limit * (1 - ROW_TOLERANCE) for limit in hunt.problem.limit_bytes)
    form = formulate(replace(hunt.problem, limit_bytes=limits), goal)
    result = solve_milp(form.milp, hunt.left_s, hunt.gap / 2, engine=hunt.engine)
    if result.values:
        hunt.offer(form.decode(result.values), hunt.engine.label)


def _explain(reduced: Reduced, hunt: Hunt, reason_s: float) -> None:
    """Say why nothing fits, unless a plan that does turns up on the way.

    Raises:
        Infeasible: None does.
    """
    hunt.deadline = time.monotonic() + max(hunt.left_s, reason_s) if reason_s else 0.0
    least = seek_least(hunt) if reason_s else False
    if hunt.best is None:
        raise refused(reduced, hunt, least=least)
