"""A common plan for processes that compile a module at the same time: rank 0 searches it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.plan import Plan
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request

#: The trace with the graph that the plan is for, the plan, its figures, and its summary's facts.
PlannedModule = tuple[TracedModule, Plan, Evaluation, Mapping[str, Any]]


def agreement_on(devices: int) -> Agreement:
    """Messages between the ranks if torch.distributed runs so many; else of this process alone."""
    is_up = dist.is_available() and dist.is_initialized() and dist.get_world_size() == devices
    return Agreement(devices if is_up else 1, searches=True)


def plan_together(
    agreement: Agreement,
    module: TracedModule,
    cluster: Cluster,
    request: Request,
    search: Callable[[], tuple[Outcome, Mapping[str, Any]]],
    trace_of: Callable[[Plan], TracedModule],
) -> PlannedModule:
    """The plan that rank 0 finds, on every rank.

    Args:
        request: The request, which is compared but for its constraints.
        search: Finds the plan of the module's graph, with the facts of its summary.
        trace_of: Gives this rank's trace of the graph of a plan.

    Raises:
        PartitionerError: The search's error, on every rank.
        BackendError: The ranks compile different models, or with different options.
    """

    def find() -> PlannedModule:
        outcome, summary = search()
        traced = trace_of(outcome.plan).on(outcome.graph)
        return traced, outcome.plan, outcome.evaluation, summary

    if agreement.ranks == 1:
        return find()
    planned: list[PlannedModule] = []

    def make() -> str:
        planned.append(find())
        return json.dumps([planned[0][1].to_json(), planned[0][3]])

    given = {one.name: getattr(request, one.name) for one in fields(request)}
    said = [f"{name}={value!r}" for name, value in given.items() if name != "constraints"]
    doing = f"compile({', '.join(said)}) on {cluster.name}"
    digest = agreement.first(lambda: module.graph.digest, doing)
    with agreement.together(doing):
        _check(agreement.rank, module.graph.digest, digest)
    text, summary = json.loads(agreement.first(make, "compile()"))
    with agreement.together("compile()"):
        if planned:
            return planned[0]
        plan = Plan.from_json(text)
        traced = trace_of(plan)
        _check(agreement.rank, traced.graph.digest, plan.graph_digest)
        return traced, plan, evaluate(traced.graph, plan, cluster), summary


def adopted(agreement: Agreement, module: TracedModule, plan: Plan) -> tuple[TracedModule, Plan]:
    """Rank 0's plan, with this rank's trace of the graph that it is for.

    Plans of searches that a time limit ended may differ between ranks.

    Raises:
        BackendError: The ranks traced different graphs; the same text on every rank.
    """
    text = agreement.first(plan.to_json, "module()")
    if text != plan.to_json():
        plan = Plan.from_json(text)
        module = module.of(plan.nodes)
    with agreement.together("module()"):
        _check(agreement.rank, module.graph.digest, plan.graph_digest)
    return module, plan


def _check(rank: int, digest: str, expected: str) -> None:
    if digest != expected:
        raise BackendError(f"rank {rank} traced another graph than rank 0: compile the same model")
