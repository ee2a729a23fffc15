"""The facts of the plan that was found, beside those of one device, and what is said of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.compute import Sources
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_view, rules_of
from partitioner.ir.plan import resolve
from partitioner.report.findings.one_device import OneDevice
from partitioner.report.findings.whole_machine import whole_machine_notes
from partitioner.report.spaces import space_facts
from partitioner.report.summary import facts
from partitioner.search.limits import MOST_EXPLICIT
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request
from partitioner.strategies.derive import Rules
from partitioner.strategies.kinds.parallel import parallel_notes


def summarise(
    outcome: Outcome,
    cluster: Cluster,
    request: Request,
    notes: tuple[str, ...],
) -> dict[str, Any]:
    """The facts of a plan's summary (see `report.summary`).

    Args:
        outcome: The plan with its figures.
        cluster: The devices.
        request: The request.
        notes: Of the front end, and on runs of plans.
    """
    graph, plan, whole = outcome.graph, outcome.plan, outcome.whole
    request = outcome.request or request
    runs: list[tuple[Graph, int | None]] = []
    if not plan.blocks:
        runs.append((graph, plan.micro_batches))
    if whole is not None and whole is not graph:  # one device need not cut it, nor compute it again
        runs.append((whole, None))
    with no_collection():
        single = OneDevice.best(cluster, request.objective, *runs)
        sources = _sources(outcome, cluster)
        alone: tuple[str, ...] = ()
        at_once = graph if plan.micro_batches is None and not plan.blocks else whole
        if at_once is not None:
            cost = outcome.evaluation.cost(request.objective)
            alone = whole_machine_notes(at_once, cluster, cost, sources, request.objective)
    return facts(
        outcome,
        single,
        len(cluster),
        (
            *outcome.notes,
            *notes,
            *parallel_notes(request.parallel, graph, plan, request.mesh),
            *request.constraints.notes,
            *_recompute_notes(outcome),
            *_opaque_notes(outcome),
            *_size_notes(cluster),
            *alone,
        ),
        rules=rules_of(graph),
        sources=sources,
        spaces=space_facts(outcome, cluster, single),
        constraints=request.constraints,
    )


def _sources(outcome: Outcome, cluster: Cluster) -> Sources:
    """Where the seconds of a plan come from."""
    if all(spec.profile is None and spec.table is None for spec in cluster.first_of_spec):
        return Sources({}, 0.0)
    return Sources.of(outcome.graph, resolve(outcome.graph, outcome.plan), cluster)


def _size_notes(cluster: Cluster) -> tuple[str, ...]:
    if len(cluster) <= MOST_EXPLICIT:
        return ()
    note = (
        f"{len(cluster)} devices: rank files are written for up to {MOST_EXPLICIT}; the plan, its "
        "timeline and its report are"
    )
    return (note,)


def _recompute_notes(outcome: Outcome) -> tuple[str, ...]:
    """The number of operators that are computed again, where that was offered."""
    optional = outcome.of.optional if outcome.of is not None else frozenset()
    repeated = [node for node in outcome.graph.nodes if node.name in optional]
    if not optional or (outcome.plan.micro_batches is not None and not repeated):
        return ()
    count = sum(not is_view(node) for node in repeated)
    return (f"{count} operators of the forward pass are computed again in the backward pass",)


def _opaque_notes(outcome: Outcome) -> tuple[str, ...]:
    """One line for each reason that keeps nodes whole.

    Blocks that are placed whole have operators for their parts that need no rule: those of the
    whole graph count.
    """
    graph, plan = outcome.graph, outcome.plan
    if plan.blocks and outcome.whole is not None and all(m.size() == 1 for m in plan.groups):
        graph = outcome.whole
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in Rules.of(graph).opaque.items():
        by_reason[why].append(name)
    notes = []
    for why, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(f"kept whole on one device: {', '.join(names[:3])}{more}: {why}")
    return tuple(notes)
