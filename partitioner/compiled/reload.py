"""The plan of a saved compilation beside the graph that its model has now."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partitioner.compiled.base import check_explicit
from partitioner.compiled.folder import load_plan, load_summary
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Certificate, Plan

#: Relative difference of two sums of one plan's costs that is rounding.
COST_TOLERANCE = 1e-9


@dataclass(frozen=True)
class StoredPlan:
    """What a folder holds of a plan (see `Planned`).

    Attributes:
        cluster: What it was planned for.
        plan: Without a certificate if the stored one is not of this plan.
        evaluation: Of the plan.
        summary: As it was printed.
        warnings: What is wrong with the certificate.
    """

    cluster: Cluster
    plan: Plan
    evaluation: Evaluation
    summary: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    def parts(self) -> dict[str, Any]:
        """The fields of `Planned` that it gives."""
        return {**vars(self), "seconds": self.summary["seconds"]}


def stored_plan(folder: Path, graph: Graph) -> StoredPlan:
    """Read a folder's plan and judge it on the graph; it may have been edited.

    Raises:
        ResultError: A file is missing or wrong.
        PlanError: The plan does not fit the graph.
        CostError: Its cluster is none, or lacks a device that the plan uses.
    """
    plan = load_plan(folder)
    cluster = Cluster.from_data(plan.cluster)
    check_explicit(cluster)
    evaluation = evaluate(graph, plan, cluster)
    summary = load_summary(folder)
    warnings = tuple(_stale(folder, plan.certificate, evaluation))
    if warnings:
        plan = replace(plan, certificate=None)
    return StoredPlan(cluster, plan, evaluation, summary, warnings)


def _stale(folder: Path, cert: Certificate | None, found: Evaluation) -> Iterator[str]:
    """Says that a certificate is not of the plan that it stands in, if so."""
    if cert is None:
        return
    cost = found.cost(cert.objective)
    if not math.isclose(cost, cert.cost, rel_tol=COST_TOLERANCE):
        yield (
            f"{folder}: the certificate in plan.json is left out: it says {cert.objective} cost "
            f"{cert.cost:.6g}, but the plan costs {cost:.6g}; it was edited, or made by another "
            "version"
        )
