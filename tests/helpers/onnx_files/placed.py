"""Rank files of a model whose nodes are placed by hand, without a search."""

from collections.abc import Mapping
from pathlib import Path

import onnx

from partitioner.api.lowering import lower
from partitioner.backends.onnx.files.emit import emit
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan, resolve


def emit_placed(model: onnx.ModelProto, devices: Mapping[str, int], folder: Path) -> None:
    """Write the rank files of a model whose nodes run whole on these devices, by name."""
    graph = load_onnx(model).graph
    count = max(devices.values()) + 1
    cluster = resolve_cluster(None, count)
    nodes = {node.name: NodePlan(devices[node.name]) for node in graph.nodes}
    groups = tuple(map(DeviceMesh.single, range(count)))
    plan = Plan(graph.digest, cluster.to_data(), groups, nodes)
    tasks = schedule(graph, resolve(graph, plan), cluster)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    emit(lower(graph, tasks, count), graph, folder, metadata=metadata)
