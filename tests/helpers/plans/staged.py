"""Plans in stages made by hand, and modules on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import partitioner
from partitioner.api.compiled.module import ModuleModel, ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.frontends.torch.trace import TracedModule, trace_micro_batch
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import fixed_nodes
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.rewrites.staging import changing_nodes, stages_of_all

Devices = Sequence[tuple[int, ...]]
#: Stage of each node of the forward pass that differs between micro-batches.
Stages = Callable[[Graph], dict[str, int]]


def equal_stages(graph: Graph, count: int) -> dict[str, int]:
    """Stages with equal numbers of nodes that read weights, in the order of the trace."""
    reading = _readers_of_weights(graph)
    stages, seen = {}, -1
    for node in changing_nodes(graph):
        seen += node.name in reading
        stages[node.name] = max(0, seen) * count // max(1, len(reading))
    return stages


def loss_apart(graph: Graph) -> dict[str, int]:
    """Two stages, of which the second one, after the last node that reads weights, has none."""
    names = [node.name for node in changing_nodes(graph)]
    last = max(map(names.index, _readers_of_weights(graph)))
    return {name: int(position > last) for position, name in enumerate(names)}


def _readers_of_weights(graph: Graph) -> list[str]:
    """Nodes of the forward pass, in the order of the trace."""
    fixed = fixed_nodes(graph)
    weights = {v for n in graph.nodes if n.name in fixed for v in n.writes} | graph.constants.keys()
    return [n.name for n in changing_nodes(graph) if not weights.isdisjoint(n.reads)]


def staged_plan(
    graph: Graph,
    devices: Devices,
    schedule: str | tuple[str, ...] = "1f1b",
    micro_batches: int = 4,
    stages: Stages | None = None,
    cuts: Plan | None = None,
) -> Plan:
    """A plan in stages.

    Args:
        graph: The graph of one micro-batch.
        devices: Devices of each stage.
        schedule: Name of the schedule, or its rows.
        micro_batches: Number of them.
        stages: Chooses the stages; default: `equal_stages`.
        cuts: A plan on as many devices as each stage has, whose cuts the stages take.
    """
    forward = equal_stages(graph, len(devices)) if stages is None else stages(graph)
    stage = stages_of_all(graph, forward)
    axes = dict(cuts.groups[0].axes) if cuts is not None else {}
    groups = tuple(
        DeviceMesh.of((axes or {"dp": len(one)}) if len(one) > 1 else {}, tuple(one))
        for one in devices
    )
    nodes = {
        node.name: NodePlan(
            stage[node.name], cuts.nodes[node.name].cuts if cuts is not None else {}
        )
        for node in graph.nodes
    }
    cluster = resolve_cluster(None, 1 + max(map(max, devices)))
    stages, pipeline = tuple(range(len(groups))), Pipeline(schedule, micro_batches)
    return Plan(graph.digest, cluster.to_data(), groups, nodes, None, pipeline, stages=stages)


def traced(
    module: nn.Module,
    args: Sequence[Tensor],
    micro_batches: int,
    kwargs: Mapping[str, Tensor] | None = None,
    *,
    training: bool = True,
) -> TracedModule:
    """A trace of one micro-batch."""
    example = Example(tuple(args), kwargs or {})
    return trace_micro_batch(module, example, ModuleOptions(training), micro_batches)


def on_trace(
    trace: TracedModule,
    plan: Plan,
    source: ModuleSource | None = None,
    cluster: Cluster | None = None,
) -> ModuleProgram:
    """The program of a trace and a plan of `staged_plan`; default: on reference accelerators."""
    cluster = cluster or resolve_cluster(None, 1 + max(max(mesh.devices) for mesh in plan.groups))
    plan = replace(plan, cluster=cluster.to_data())
    prices = evaluate(trace.graph, plan, cluster)
    return ModuleProgram.of(ModuleModel(trace, source or ModuleSource()), cluster, plan, prices, {})


def staged(
    module: nn.Module,
    batch: Sequence[Tensor],
    devices: Devices,
    schedule: str | tuple[str, ...] = "1f1b",
    micro_batches: int = 4,
    *,
    training: bool = True,
    stages: Stages | None = None,
    parallel: str = "",
    source: ModuleSource | None = None,
    cluster: Cluster | None = None,
) -> ModuleProgram:
    """A module on a plan in stages; `parallel`: how the stages of several devices are cut."""
    trace, cuts = traced_and_cut(
        module, batch, micro_batches, parallel, len(devices[0]), training=training
    )
    plan = staged_plan(trace.graph, devices, schedule, micro_batches, stages, cuts)
    return on_trace(trace, plan, source, cluster)


def traced_and_cut(
    module: nn.Module,
    batch: Sequence[Tensor],
    micro_batches: int,
    parallel: str = "",
    devices: int = 1,
    *,
    training: bool = True,
) -> tuple[TracedModule, Plan | None]:
    """A trace of one micro-batch, and the plan by which stages of so many devices are cut."""
    trace = traced(module, batch, micro_batches, training=training)
    if not parallel:
        return trace, None
    size = -(-len(batch[0]) // micro_batches)
    program = partitioner.compile(
        module,
        tuple(tensor[:size] for tensor in batch),
        devices=devices,
        training=training,
        parallel=parallel,
        cluster="ideal",
    )
    return trace.of(program.plan.nodes), program.plan


def accumulated(
    module: nn.Module, batch: Sequence[Tensor], micro_batches: int, scale: float = 1.0
) -> list[Tensor]:
    """A step of plain gradient accumulation: the results of the whole batch, the loss first.

    Losses and other scalars are means over the batch, the others are put together.
    """
    parts = list(zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True))
    size = len(batch[0])
    results: list[list[Tensor]] = []
    for part in parts:
        share = len(part[0]) / size
        flat = [x for x in pytree.tree_leaves(module(*part)) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and flat[0].requires_grad:
            (flat[0] * share * scale).backward()
        results.append([x.detach() if x.dim() else x.detach() * share for x in flat])
    columns = zip(*results, strict=True)
    return [torch.cat(c) if c[0].dim() else torch.stack(c).sum() for c in columns]


def tensors(result: Any) -> list[Tensor]:
    """The tensors among a module's results, flat."""
    return [x.detach() for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
