"""Habits of exporters that ONNX Runtime takes and ONNX's checker refuses, written as ONNX has them.

Nodes stand in any order, a size that is not known is -1 or "?" (Paddle), initializers are no inputs
though the IR version is 3 (ONNX Runtime saves old models so), domains of operators are not
imported, the graph has no name. That an output has no type, the checker is not told (`checks`).
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
from onnx import GraphProto, ModelProto, NodeProto, helper

from partitioner.frontends.onnx.reading.checks import all_graphs, all_nodes, nested_graphs
from partitioner.frontends.onnx.reading.runtime import runtime_domains

#: First IR version in which an initializer need not be an input.
_INITIALIZERS_ALONE = 4
#: What exports of Paddle have for a size that is not known, and for its name.
_UNKNOWN, _NAMELESS = -1, frozenset({"?", "-1", "None"})


def write_as_onnx(proto: ModelProto, name: str) -> bool:
    """Write a model without these habits, in place; True if it had one.

    Args:
        proto: The model.
        name: The graph's name if it has none.
    """
    changed = _put_in_order(proto.graph)
    for graph in all_graphs(proto):
        changed = _forget_unknown_sizes(graph) or changed
    if proto.HasField("graph") and not proto.graph.name:
        proto.graph.name = name
        changed = True
    changed = _import_domains(proto) or changed
    names = {value.name for value in proto.graph.input}
    alone = any(tensor.name not in names for tensor in proto.graph.initializer)
    if proto.ir_version < _INITIALIZERS_ALONE and alone:
        proto.ir_version = _INITIALIZERS_ALONE
        changed = True
    return changed


def _import_domains(proto: ModelProto) -> bool:
    """Import the domains of ONNX Runtime's operators, in the versions that it takes."""
    imported = {entry.domain for entry in proto.opset_import}
    used = {node.domain for node in all_nodes(proto) if node.domain}
    versions = runtime_domains()
    missing = sorted((used - imported) & versions.keys())
    for domain in missing:
        proto.opset_import.append(helper.make_opsetid(domain, versions[domain]))
    return bool(missing)


def _forget_unknown_sizes(graph: GraphProto) -> bool:
    changed = False
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value == _UNKNOWN or dim.dim_param in _NAMELESS:
                dim.ClearField("dim_value")
                dim.ClearField("dim_param")
                changed = True
    return changed


def _put_in_order(graph: GraphProto) -> bool:
    """Put each node behind those whose results it reads, in place; True if any moved.

    Nodes in a circle, or out of order in a body, stay as they are: ONNX Runtime refuses them, too.
    """
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(graph.node)))
    order.add_edges_from(
        (makers[name], index)
        for index, node in enumerate(graph.node)
        for name in _read(node)
        if name in makers
    )
    if all(maker < index for maker, index in order.edges):
        return False
    try:
        numbers = list(nx.lexicographical_topological_sort(order))
    except nx.NetworkXUnfeasible:
        return False
    nodes = [NodeProto.FromString(graph.node[index].SerializeToString()) for index in numbers]
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _read(node: NodeProto) -> Iterator[str]:
    """The names that a node and its bodies read."""
    yield from node.input
    for graph in nested_graphs([node]):
        yield from (name for inner in graph.node for name in inner.input)
        yield from (value.name for value in graph.output)
