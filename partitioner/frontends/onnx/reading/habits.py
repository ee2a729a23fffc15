"""Habits of exporters that ONNX Runtime takes and ONNX's checker refuses, written as ONNX has them.

Nodes stand in any order, a size that is not known is -1 or "?" (Paddle), initializers are no inputs
though the IR version is 3 (ONNX Runtime saves old models so), domains of operators are not
imported, the graph has no name. That an output has no type, the checker is not told (`checks`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from onnx import GraphProto, ModelProto, NodeProto, helper

from partitioner.frontends.onnx.reading.checks import nested_graphs, node_lists
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
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    for graph in (proto.graph, *nested_graphs(nodes)):
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
    used = {node.domain for nodes in node_lists(proto) for node in nodes if node.domain}
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
    makers_read = {
        index: {makers[name] for name in _read(node) if name in makers}
        for index, node in enumerate(graph.node)
    }
    if all(maker < index for index, before in makers_read.items() for maker in before):
        return False
    try:
        order = list(_earliest_first(makers_read))
    except CycleError:
        return False
    nodes = [NodeProto.FromString(graph.node[index].SerializeToString()) for index in order]
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _earliest_first(before: Mapping[int, Iterable[int]]) -> Iterator[int]:
    """The numbers, each behind those that must stand before it, else in their own order.

    Raises:
        CycleError: There is no such order.
    """
    sorter = TopologicalSorter(before)
    sorter.prepare()
    ready: list[int] = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, number)
        number = heapq.heappop(ready)
        yield number
        sorter.done(number)


def _read(node: NodeProto) -> Iterator[str]:
    """The names that a node and its bodies read."""
    yield from node.input
    for graph in nested_graphs([node]):
        yield from (name for inner in graph.node for name in inner.input)
        yield from (value.name for value in graph.output)
