"""The reason why no plan fits: the plan that is short of the fewest bytes."""

from __future__ import annotations

import math
from dataclasses import replace

from partitioner.foundations import units
from partitioner.solver.joint.local_search import EFFORT, local_search, peaks
from partitioner.solver.joint.programs import ROW_TOLERANCE
from partitioner.solver.milp.engines import HIGHS, Engine, solve_milp
from partitioner.solver.milp.formulation import formulate
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.presolve.simplify import Reduced, presolve
from partitioner.solver.problem import Problem, canonical
from partitioner.solver.progress import Progress, device_most_over
from partitioner.solver.referee import Objective, evaluate_choices
from partitioner.solver.work import Work

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


def short_of_memory(
    held_bytes: float,
    limit_bytes: float,
    device: int,
    name: str | None = None,
    *,
    where: str = "",
    inside: str = "",
    more: str = "",
    proven: bool = False,
    least: bool = False,
) -> Infeasible:
    """The refusal for lack of memory.

    Args:
        held_bytes: Bytes that the device holds at its peak, at the node `name`.
        where: The device in words, by default its number.
        inside: What holds them at the node, in words.
        more: What follows in the message.
        proven: Whether no plan fits.
        least: Whether no plan is short of fewer bytes.
    """
    short, held = math.ceil(held_bytes - limit_bytes), math.ceil(held_bytes)
    limit = int(limit_bytes)
    verdict = "no plan fits" if proven else "no plan was found that fits"
    of = "" if least else "in the nearest one found "
    at = (where or f"on device {device}") + (f" at {name!r}" if name else "") + inside
    return Infeasible(
        f"{verdict}: {of}{_bytes(short)} {'is' if short == 1 else 'are'} short {at} "
        f"({_bytes(held)} held, limit {limit}: {units.size(held, 5)} against "
        f"{units.size(limit, 5)}){more}",
        device=device,
        name=name,
        bytes_short=held_bytes - limit_bytes,
        proven=proven,
    )


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"
