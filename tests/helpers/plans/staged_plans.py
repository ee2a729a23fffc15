"""Compiled modules with hand-made plans in stages, for what users see of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from helpers.modules import trained
from partitioner.api.compiled.module import ModuleModel, ModuleProgram
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example, ModuleSource
from partitioner.frontends.torch.trace import TracedModule, trace_micro_batch
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.rewrites.staging import changing_nodes, stages_of_all

#: Devices of each stage, schedule, micro-batches.
Stages = tuple[tuple[tuple[int, ...], ...], str | tuple[str, ...], int]

ONE_F_ONE_B: Stages = (((0,), (1,)), "1f1b", 4)
GPIPE: Stages = (((0,), (1,)), "gpipe", 4)
ZERO_BUBBLE: Stages = (((0,), (1,)), "zb1", 4)
INTERLEAVED: Stages = (((0,), (1,), (0,), (1,)), "interleaved", 4)
REPLICATED: Stages = (((0, 1), (2, 3)), "1f1b", 4)
TABLE: Stages = (((0,), (1,)), ("0F0,0F1,,,0B0,,0B1,", ",1F0,1B0,,1F1,1B1,,"), 2)

CASES: dict[str, Stages] = {
    "1f1b": ONE_F_ONE_B,
    "gpipe": GPIPE,
    "zb1": ZERO_BUBBLE,
    "interleaved": INTERLEAVED,
    "replicated": REPLICATED,
    "table": TABLE,
    "one device": (((0,),), "1f1b", 4),
}


@functools.cache
def traced(micro_batches: int, training: bool = True) -> TracedModule:
    """The trace of one micro-batch of a small GPT."""
    options = ModuleOptions(True, "adamw") if training else ModuleOptions()
    model = trained.Gpt()
    example = Example(tuple(model.batch(0, 8)), {})
    return trace_micro_batch(model, example, options, micro_batches)


def staged_plan(graph: Graph, stages: Stages) -> Plan:
    """A plan that cuts the forward pass into stages of equal numbers of nodes."""
    devices, schedule, micro_batches = stages
    nodes = changing_nodes(graph)
    forward = {node.name: i * len(devices) // len(nodes) for i, node in enumerate(nodes)}
    stage = stages_of_all(graph, forward)
    groups = tuple(_group(group) for group in devices)
    return Plan(
        graph.digest,
        resolve_cluster(None, 1 + max(map(max, devices))).to_data(),
        groups,
        {node.name: NodePlan(stage[node.name]) for node in graph.nodes},
        None,
        Pipeline(schedule, micro_batches),
        stages=tuple(range(len(groups))),
    )


def _group(devices: Sequence[int]) -> DeviceMesh:
    if len(devices) == 1:
        return DeviceMesh.single(devices[0])
    return DeviceMesh.of({"dp": len(devices)}, tuple(devices))


@functools.cache
def staged(name: str) -> ModuleProgram:
    """A small GPT in training under one of `CASES`, on the reference accelerators."""
    stages = CASES[name]
    module = traced(stages[2])
    plan = staged_plan(module.graph, stages)
    cluster = resolve_cluster(None, 1 + max(map(max, stages[0])))
    figures = evaluate(module.graph, plan, cluster)
    return ModuleProgram.of(ModuleModel(module, ModuleSource()), cluster, plan, figures, {})
