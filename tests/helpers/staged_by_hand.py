"""Programs of plans in stages whose stages are given by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from partitioner.compiled.module import ModuleModel, ModuleProgram
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.resolve import resolve_cluster
from partitioner.frontends.torch.micro_batches import trace_micro_batch
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.strategies.staging import changing_nodes, stages_of_all


def traced(
    module: nn.Module,
    args: Sequence[Tensor],
    micro_batches: int,
    kwargs: Mapping[str, Tensor] | None = None,
) -> TracedModule:
    """A training trace of one micro-batch."""
    options = ModuleOptions(True, "adamw")
    return trace_micro_batch(module, Example(tuple(args), kwargs or {}), options, micro_batches)


def even_stages(graph: Graph, stages: int) -> dict[str, int]:
    """Stage of each node of the forward pass: as many nodes in each, in the traced order."""
    nodes = changing_nodes(graph)
    return {node.name: index * stages // len(nodes) for index, node in enumerate(nodes)}


def staged(
    module: TracedModule,
    lanes: Sequence[int],
    schedule: str,
    micro_batches: int,
    forward: Mapping[str, int] | None = None,
    cluster: Cluster | None = None,
) -> ModuleProgram:
    """The program of a plan with one device a stage.

    Args:
        module: The trace of a micro-batch.
        lanes: Device of each stage.
        schedule: Name of the schedule.
        micro_batches: Number that the module was traced for.
        forward: Stage of each node of the forward pass; None for stages of as many nodes each.
        cluster: The devices; None for reference accelerators.
    """
    graph = module.graph
    stages = stages_of_all(graph, forward or even_stages(graph, len(lanes)))
    cluster = cluster or resolve_cluster(None, max(lanes) + 1)
    plan = Plan(
        graph.digest,
        cluster.to_data(),
        tuple(DeviceMesh.of({"dp": 1}, (lane,)) for lane in lanes),
        {node.name: NodePlan(stages[node.name]) for node in graph.nodes},
        None,
        Pipeline(schedule, micro_batches, tuple(range(len(lanes)))),
    )
    prices: Any = evaluate(graph, plan, cluster)
    return ModuleProgram.of(ModuleModel(module, ModuleSource()), cluster, plan, prices, {})
