"""The plans of a search that are worth a run, and the one that measurements keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from partitioner.ir.plan import Trial
from partitioner.search.outcome import Candidate, Outcome, best_of
from partitioner.search.request import Request


def worth_a_run(outcome: Outcome, request: Request, devices: int) -> tuple[Candidate, ...]:
    """The best different plans of a search, at most `Request.tune`, the chosen one first.

    The best of each space go before second ones of a space.
    """
    left = list(outcome.candidates)
    ranked: list[Candidate] = []
    while left:
        best = best_of(left, request.objective, devices)
        left.remove(best)
        ranked.append(best)
    ranked.sort(key=lambda candidate: candidate.plan.digest != outcome.plan.digest)
    firsts: dict[str, Candidate] = {}
    different: dict[str, Candidate] = {}
    for candidate in ranked:
        different.setdefault(candidate.plan.digest, candidate)
    for candidate in different.values():
        firsts.setdefault(str(candidate.space), candidate)
    seconds = [one for one in different.values() if one not in firsts.values()]
    return (*firsts.values(), *seconds)[: request.tune]


def kept(outcome: Outcome, candidate: Candidate, trials: Sequence[Trial], gap: float) -> Outcome:
    """The outcome with the plan that was kept by measurement.

    Its certificate has the cost of that plan by the model, and the bound of the search: nothing
    more is proven of the plan than before it was run.

    Args:
        outcome: The search's.
        candidate: One of its candidates.
        trials: The runs.
        gap: Relative gap up to which a plan counts as optimal.
    """
    certificate = outcome.plan.certificate
    assert certificate is not None
    if candidate.plan.digest == outcome.plan.digest:
        tried = replace(certificate, trials=tuple(trials))
        return replace(outcome, plan=replace(outcome.plan, certificate=tried))
    cost = candidate.cost(certificate.objective)
    bound = min(cost, certificate.bound)
    if not candidate.bounds_space:
        bound = min(bound, candidate.solution.bound)
    is_proven = cost - bound <= gap * cost
    ended = "optimal" if is_proven else "feasible"
    certificate = replace(
        certificate,
        cost=cost,
        bound=bound,
        status="time_limit" if certificate.status == "time_limit" and not is_proven else ended,
        strategy=candidate.plan.kind,
        solver=candidate.solution.solver,
        trials=tuple(trials),
    )
    return replace(
        outcome,
        graph=candidate.graph,
        plan=replace(candidate.plan, certificate=certificate),
        evaluation=candidate.evaluation,
        notes=candidate.notes,
    )
