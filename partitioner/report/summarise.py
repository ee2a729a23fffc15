"""The facts of the plan that was found, beside those of one device and of the other spaces."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.compute import Sources
from partitioner.foundations import units
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_view, rules_of
from partitioner.ir.plan import resolve
from partitioner.report.delivery import Delivery
from partitioner.report.findings.notes import UNKNOWN_PROCESS, graph_notes, whole_machine
from partitioner.report.one_device import OneDevice
from partitioner.report.planned import Planned
from partitioner.report.schema import Changes, Moved, Space, ranges
from partitioner.report.stages import step_facts
from partitioner.report.summary import kept_whole, split_facts, stretch_rows
from partitioner.report.text.diff import diff
from partitioner.report.verdict import Rival, rivals_of, usual
from partitioner.search.outcome import Candidate, Outcome, OutOfTime
from partitioner.search.request import MOST_EXPLICIT, Request
from partitioner.strategies.derive import Rules
from partitioner.strategies.kinds.parallel import DATA, parallel_notes

#: Spaces that are compared with the chosen plan, and nodes of a graph up to which they are: a
#: comparison makes both schedules, and is stored with the plan.
MOST_SPACES = 8
MOST_NODES = 6000
#: Runs of moved nodes that a stored comparison lists.
MOST_RUNS = 60


def summarise(
    outcome: Outcome,
    cluster: Cluster,
    request: Request,
    notes: tuple[str, ...],
) -> dict[str, Any]:
    """The predicted facts of a plan, for its summary, each figure beside that of one device."""
    graph, plan, figures, whole = outcome.graph, outcome.plan, outcome.evaluation, outcome.whole
    cert, devices, request = plan.certificate, len(cluster), outcome.request or request
    assert cert is not None
    runs: list[tuple[Graph, int | None]] = []
    # fewer micro-batches than those do not fit one device, and more save it nothing but memory
    takes_fewest = outcome.alone is not None and request.objective != "memory"
    if not (plan.blocks or takes_fewest):
        runs.append((graph, plan.micro_batches))
    if whole is not None and whole is not graph:  # one device need not cut it, nor compute it again
        runs.append((whole, None))
    if outcome.alone is not None:
        runs.append(outcome.alone)
    with no_collection():
        single = OneDevice.best(cluster, request.objective, plan.kind, *runs)
        sources = Sources.of(graph, resolve(graph, plan), cluster)
        at_once = graph if plan.micro_batches is None and not plan.blocks else whole
        machine: Rival | str | None = None
        if at_once is not None:
            machine = whole_machine(at_once, cluster, sources, request.objective)
    plans = sorted(outcome.candidates, key=lambda plan: plan.cost(cert.objective))
    spaces = space_facts(outcome, plans, cluster, single, sources.shares())
    others = [
        _with_results(space, plan, outcome, cluster)
        for space, plan in zip(spaces, plans, strict=True)
        if "changes" in space or space["cost"] != cert.cost
    ]
    process = UNKNOWN_PROCESS if isinstance(machine, str) else machine
    name = cluster.devices[single.device].name
    rivals = rivals_of(request.objective, single, name, others, process, _without_plan(outcome))
    all_notes = [
        *outcome.notes,
        *notes,
        *parallel_notes(request.parallel, graph, plan, request.mesh),
        *request.constraints.notes,
        *_notes(outcome),
        *([machine] if isinstance(machine, str) else []),
        *graph_notes(graph, cluster),
    ]
    if devices > MOST_EXPLICIT:
        all_notes.append(
            f"{devices} devices: rank files are written for up to {MOST_EXPLICIT}; the plan, its "
            "timeline and its report are"
        )
    bound = request.constraints.bound_nodes(graph)
    return {
        "objective": cert.objective,
        "cost": cert.cost,
        "bound": cert.bound,
        "gap": cert.gap,
        "status": cert.status,
        "strategy": cert.strategy,
        "searched": cert.space,
        "solver": cert.solver,
        "seed": cert.seed,
        "folded": cert.folded,
        **({"trials": [dict(vars(trial)) for trial in cert.trials]} if cert.trials else {}),
        "speedup": single.gain(figures, "throughput"),
        "gain": single.gain(figures, cert.objective),
        "latency_s": figures.latency_s,
        "throughput_per_s": units.finite(figures.throughput_per_s),
        "devices": devices,
        "devices_used": figures.devices_used,
        "sharded_flops_share": figures.sharded_flops_share,
        **step_facts(plan, figures),
        **({"blocks": stretch_rows(graph, plan)} if plan.blocks else {}),
        **split_facts(plan),
        **kept_whole(graph, rules_of(graph)),
        "cost_sources": dict(sources.shares()),
        "cost_error": sources.error,
        "launches": dict(cluster.launches),
        "pinned": request.constraints.bound,
        "bound_by": {text: ranges(nodes) for text, nodes in bound.items()},
        "load_s": [figures.load_s.get(device, 0.0) for device in range(devices)],
        "peak_bytes": [figures.needed_bytes.get(device, 0) for device in range(devices)],
        "one_device": dict(vars(single)),
        "fewer_devices": _fewer(outcome, single, devices),
        "spaces": spaces,
        "alternatives": [dict(vars(rival)) for rival in rivals],
        "ruled_out": dict(outcome.ruled_out),
        "not_searched": {str(space): str(error) for space, error in outcome.failed},
        "notes": all_notes,
    }


def _fewer(outcome: Outcome, single: OneDevice, devices: int) -> dict[str, Any] | None:
    """The cheapest plan on fewer devices, or the chosen one if it leaves some idle."""
    cert = outcome.plan.certificate
    assert cert is not None
    used = outcome.evaluation.devices_used
    rivals = [
        (plan.cost(cert.objective), plan.evaluation.devices_used) for plan in outcome.candidates
    ]
    if cert.status != "infeasible" and single.fits:
        rivals.append((single.cost(cert.objective), 1))
    better = [rival for rival in rivals if rival[1] < used and rival[0] < cert.cost]
    if not better and used == devices:
        return None
    cost, count = min(better, default=(cert.cost, used))
    return {"devices": count, "cost": cost, "cost_here": cert.cost}


def _notes(outcome: Outcome) -> Iterator[str]:
    """List what is computed again, and a line for each reason that keeps nodes whole."""
    optional = outcome.of.optional if outcome.of is not None else frozenset()
    repeated = [node for node in outcome.graph.nodes if node.name in optional]
    if optional and (outcome.plan.micro_batches is None or repeated):
        count = sum(not is_view(node) for node in repeated)
        yield f"{count} operators of the forward pass are computed again in the backward pass"
    graph, plan = outcome.graph, outcome.plan
    if plan.blocks and outcome.whole is not None and all(m.size() == 1 for m in plan.groups):
        graph = outcome.whole  # of whole blocks by the whole graph
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in Rules.of(graph).opaque.items():
        by_reason[why].append(name)
    for why, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"kept whole on one device: {', '.join(names[:3])}{more}: {why}"


def _without_plan(outcome: Outcome) -> Rival | None:
    """Data parallelism that has no plan, within memory or within the time limit."""
    failed = ((space, error) for space, error in outcome.failed if space.name == DATA)
    for space, error in failed:
        return usual(0.0, space.groups[0].size(), isinstance(error, OutOfTime), is_known=False)
    return None


def _with_results(space: Space, plan: Candidate, outcome: Outcome, cluster: Cluster) -> Space:
    """The figures of a plan that verdicts speak of with its results on every rank."""
    cert = outcome.plan.certificate
    assert cert is not None
    is_usual = space["space"].split()[0] == DATA
    is_smaller = space["devices_used"] < outcome.evaluation.devices_used
    if cert.objective == "memory" or not (is_usual or is_smaller):
        return space
    delivery = Delivery.of(plan.graph, plan.plan, cluster, plan.evaluation)
    return space if delivery is None else {**space, "cost": delivery.cost(cert.objective)}


def space_facts(
    outcome: Outcome,
    plans: Sequence[Candidate],
    cluster: Cluster,
    single: OneDevice,
    sources: Mapping[str, float],
) -> list[Space]:
    """The best plan of each space as figures, in the order given, with its changes.

    On more than `MOST_EXPLICIT` devices, and of large graphs, there are no changes: the space alone
    is planned again by ``--strategy`` and ``--mesh``, and `partition diff` compares the folders.
    """
    cert = outcome.plan.certificate
    assert cert is not None

    def planned(of: Outcome | Candidate) -> Planned:
        return Planned(
            name=of.graph.name,
            graph=of.graph,
            cluster=cluster,
            plan=of.plan,
            evaluation=of.evaluation,
            summary={"one_device": dict(vars(single)), "cost_sources": sources},
        )

    chosen, bare = planned(outcome), replace(outcome.plan, certificate=None)
    small = len(cluster) <= MOST_EXPLICIT and len(outcome.graph.nodes) <= MOST_NODES
    compared = 0
    rows = []
    for candidate in plans:
        figures, space = candidate.evaluation, str(candidate.space)
        busiest = max(figures.load_s, key=figures.load_s.__getitem__, default=0)
        row = Space(
            space=space,
            cost=candidate.cost(cert.objective),
            devices_used=figures.devices_used,
            busiest=busiest,
            compute_s=figures.compute_s.get(busiest, 0.0),
            comm_s=figures.comm_s.get(busiest, 0.0),
            fits=figures.fits_exactly,
        )
        if candidate.plan.micro_batches is not None:
            row["micro_batches"] = candidate.plan.micro_batches
        if small and compared < MOST_SPACES and candidate.plan != bare:
            row["changes"] = changes(chosen, planned(candidate), cert.objective, space)
            compared += 1
        rows.append(row)
    return rows


def changes(before: Planned, after: Planned, objective: str, space: str) -> Changes:
    """A comparison that is small enough to be stored: runs of nodes that moved alike are one."""
    full = diff(before, after, ("the chosen plan", space), objective)
    return Changes(
        verdict=full["verdict"],
        figures=full["figures"],
        moved=_runs(full["moved"])[:MOST_RUNS],
        moved_count=len(full["moved"]),
        same=full["same"],
        traffic=full["traffic"],
    )


def _runs(moved: Sequence[Moved]) -> list[Moved]:
    """Neighbours with equal decisions before and after as one row, the longest seconds first."""
    rows = []
    for _, run in itertools.groupby(moved, key=operator.itemgetter("before", "after")):
        nodes = list(run)
        first, last = nodes[0], nodes[-1]
        ops = dict.fromkeys(node["op"] for node in nodes)
        several = f"{first['name']} … {last['name']} ({len(nodes)} nodes)"
        rows.append(
            Moved(
                name=several if len(nodes) > 1 else first["name"],
                op=", ".join(list(ops)[:3]),
                before=first["before"],
                after=first["after"],
                seconds_before=sum(node["seconds_before"] for node in nodes),
                seconds_after=sum(node["seconds_after"] for node in nodes),
            )
        )
    return sorted(rows, key=lambda row: -max(row["seconds_before"], row["seconds_after"]))
