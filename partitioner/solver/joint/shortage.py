"""Why nothing fits: the plan that is short of the fewest bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from partitioner import units
from partitioner.solver.joint.engines import HIGHS, Engine
from partitioner.solver.joint.formulation import formulate
from partitioner.solver.joint.local_search import EFFORT, local_search, peaks
from partitioner.solver.joint.milp import solve_milp
from partitioner.solver.joint.presolve import Reduced, presolve
from partitioner.solver.joint.progress import Hunt
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.problem import Problem
from partitioner.solver.referee import Objective, evaluate_choices
from partitioner.solver.symmetry import canonical

#: Moves that the local search may try, in multiples of all single ones: a small problem is soon
#: proven by the MILP, and the search has no other end.
ROUNDS = 30


def least_shortage(
    problem: Problem,
    objective: Objective,
    refusal: Infeasible,
    time_limit_s: float,
    seed: int = 0,
    engine: Engine = HIGHS,
) -> Solution:
    """Refine a quick refusal of `solve`: the least number of bytes that every plan is short of.

    Should the search for the least excess come upon a plan that fits after all (the first
    search ran out of time), that plan is the answer.

    Args:
        problem: The problem that was refused.
        objective: The objective that it was refused under.
        refusal: What `solve` raised.
        time_limit_s: Wall-clock limit.
        seed: Of all random choices.
        engine: Solves the MILP.

    Raises:
        Infeasible: The refined refusal.
    """
    reduced = presolve(problem)
    if not all(reduced.kept):
        raise forbidden()
    deadline = time.monotonic() + time_limit_s
    hunt = Hunt(reduced.problem, objective, 0.0, deadline, seed, engine=engine)
    if refusal.proven:
        hunt.prove(math.inf, "earlier search")
    if refusal.closest is not None:
        hunt.offer(_reduced(reduced, refusal.closest), "earlier search")
    least = seek_least(hunt)
    if hunt.best is None:
        raise refused(reduced, hunt, least=least)
    chosen = reduced.restore(hunt.best)
    cost = evaluate_choices(problem, chosen).value(objective)
    order = tuple(range(len(problem.nodes))) if objective == "latency" else None
    return Solution(chosen, cost, 0.0, "feasible", order, hunt.found_by)


def seek_least(hunt: Hunt) -> bool:
    """Look for the plan of least excess until the deadline; whether it is proven to be that.

    Raises:
        Infeasible: Forbidden pairs alone rule all plans out.
    """
    start = None
    form = formulate(hunt.problem, "excess")
    if hunt.closest is not None:
        free = replace(hunt.problem, limit_bytes=(math.inf,) * hunt.problem.devices)
        effort = min(EFFORT, ROUNDS * sum(map(len, free.nodes)))
        nearer = local_search(
            free, hunt.closest, goal=peaks, effort=effort, deadline=hunt.deadline, seed=hunt.seed
        )
        hunt.offer(nearer, "local search")
        start = form.start(canonical(hunt.problem, hunt.closest))
    if not hunt.left_s:
        return False
    result = solve_milp(form.milp, hunt.left_s, hunt.gap / 10, start, engine=hunt.engine)
    if result.status == "infeasible":
        raise forbidden()
    if result.values:
        hunt.offer(form.decode(result.values), hunt.engine.label)
    return result.status == "optimal"


def refused(reduced: Reduced, hunt: Hunt, *, least: bool) -> Infeasible:
    """The verdict on a hunt that found nothing that fits.

    Args:
        reduced: Of the hunt's problem.
        hunt: Where the search ended.
        least: Whether `hunt.closest` is proven to be short of the fewest bytes.
    """
    proven = least or math.isinf(hunt.bound)
    if hunt.closest is None:
        return Infeasible("no allowed plan was found within the time limit", proven=proven)
    outcome = evaluate_choices(hunt.problem, hunt.closest)
    limits = hunt.problem.limit_bytes
    over = [peak - limit for peak, limit in zip(outcome.peak_bytes, limits, strict=True)]
    device = max(range(len(over)), key=over.__getitem__)
    position = outcome.peak_position[device]
    return Infeasible(
        shortage_message(
            proven=proven,
            least=least,
            where=f"on device {device} at {reduced.problem.names[position]!r}",
            short=math.ceil(over[device]),
            held=math.ceil(outcome.peak_bytes[device]),
            limit=int(limits[device]),
        ),
        device=device,
        position=position,
        name=reduced.problem.names[position],
        bytes_short=over[device],
        proven=proven,
        closest=reduced.restore(hunt.closest),
    )


def forbidden() -> Infeasible:
    """The verdict where memory plays no part."""
    return Infeasible("no plan is allowed: every combination of choices takes a forbidden pair")


def shortage_message(
    *, proven: bool, least: bool, where: str, short: int, held: int, limit: int
) -> str:
    """How many bytes are short.

    Args:
        proven: Whether it is certain that no plan fits.
        least: Whether no plan is short of fewer bytes.
        where: On which device, at which node.
        short: Bytes that are short.
        held: Bytes that are held.
        limit: Bytes that there are.
    """
    verdict = "no plan fits" if proven else "no plan was found that fits"
    of = "" if least else "in the nearest one found "
    figure = f"{short} bytes are short {where}"
    return (
        f"{verdict}: {of}{figure} ({held} bytes held, limit {limit}: "
        f"{units.size(held)} against {units.size(limit)})"
    )


def _reduced(reduced: Reduced, chosen: Sequence[int]) -> tuple[int, ...]:
    """A plan of the original as one of the smaller problem; its choices were kept."""
    return tuple(kept.index(pick) for kept, pick in zip(reduced.kept, chosen, strict=True))
