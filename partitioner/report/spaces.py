"""The best plan of each searched space, and how it differs from the plan that was chosen."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation
from partitioner.ir.plan import Plan
from partitioner.report.findings.one_device import OneDevice
from partitioner.report.planned import Planned
from partitioner.report.schema import Changes, Moved, Space
from partitioner.report.text.diff import diff
from partitioner.search.limits import MOST_EXPLICIT

if TYPE_CHECKING:
    from partitioner.ir.graph import Graph
    from partitioner.search.outcome import Candidate, Outcome

#: Spaces that are compared with the chosen plan, and nodes of a graph up to which they are: a
#: comparison makes both schedules, and is stored with the plan.
MOST_SPACES = 8
MOST_NODES = 6000
#: Runs of moved nodes that a stored comparison lists.
MOST_RUNS = 60


def space_facts(outcome: Outcome, cluster: Cluster, single: OneDevice) -> list[Space]:
    """The best plan of each space as figures, the cheapest first, with its changes.

    On more than `MOST_EXPLICIT` devices, and of large graphs, there are no changes: the space alone
    is planned again by ``--strategy`` and ``--mesh``, and `partition diff` compares the folders.
    """
    cert = outcome.plan.certificate
    assert cert is not None
    candidates = sorted(outcome.candidates, key=lambda plan: plan.cost(cert.objective))
    chosen = _planned(outcome.graph, outcome.plan, outcome.evaluation, cluster, single)
    bare = replace(outcome.plan, certificate=None)
    small = len(cluster) <= MOST_EXPLICIT and len(outcome.graph.nodes) <= MOST_NODES
    compared = 0
    rows = []
    for candidate in candidates:
        row = _figures(candidate, cert.objective)
        if small and compared < MOST_SPACES and candidate.plan != bare:
            own = (candidate.graph, candidate.plan, candidate.evaluation)
            other = _planned(*own, cluster, single)
            row["changes"] = changes(chosen, other, cert.objective, str(candidate.space))
            compared += 1
        rows.append(row)
    return rows


def _figures(candidate: Candidate, objective: str) -> Space:
    figures = candidate.evaluation
    device = max(figures.load_s, key=figures.load_s.__getitem__, default=0)
    return Space(
        space=str(candidate.space),
        cost=candidate.cost(objective),
        devices_used=figures.devices_used,
        busiest=device,
        compute_s=figures.compute_s.get(device, 0.0),
        comm_s=figures.comm_s.get(device, 0.0),
        fits=figures.fits_exactly,
    )


def _planned(
    graph: Graph, plan: Plan, evaluation: Evaluation, cluster: Cluster, single: OneDevice
) -> Planned:
    return Planned(
        name=graph.name,
        graph=graph,
        cluster=cluster,
        plan=plan,
        evaluation=evaluation,
        summary={"one_device": dict(vars(single))},
    )


def changes(before: Planned, after: Planned, objective: str, space: str) -> Changes:
    """A comparison that is small enough to be stored: runs of nodes that moved alike are one."""
    full = diff(before, after, ("the chosen plan", space), objective)
    runs = _runs(full["moved"])
    return Changes(
        verdict=full["verdict"],
        figures=full["figures"],
        moved=runs[:MOST_RUNS],
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
