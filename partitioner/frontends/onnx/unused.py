"""Results that nobody reads: nodes without a reader go, and optional results where that is safe.

ONNX lets a node leave optional results out, but ONNX Runtime does not let every op do so: its
Attention wants both present results or none where there are past keys, its BatchNormalization and
Split crash on a result without a name. So results are left out for the ops of a table only, and
results that a model leaves out are given names where the op needs them.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir
from onnx import ModelProto, NodeProto

from partitioner.frontends.onnx.bodies import bodies
from partitioner.frontends.onnx.checks import nested_graphs, node_lists

#: Ops that ONNX Runtime runs without any of their last optional results.
_INDEPENDENT = frozenset((
    "Dropout", "GRU", "LSTM", "LayerNormalization", "MaxPool", "RNN", "SoftmaxCrossEntropyLoss",
    "Unique",
))  # fmt: skip
#: First opset in which an attribute, not the number of results, tells BatchNormalization's mode.
_NORM_MODE = 14

_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional


def remove_unused(model: onnx_ir.Model) -> None:
    """Remove nodes and initializers that nobody reads, in place; no other result loses its name."""
    graph = model.graph
    _remove_nodes(graph, graph.opset_imports.get("", 0))
    kept = {*graph.inputs, *graph.outputs}
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in kept:
            del graph.initializers[name]


def name_results(proto: ModelProto) -> None:
    """Name the absent results that their op needs, and drop absent ones at the end, in place."""
    taken = _names(proto)
    for holder in (proto, *proto.functions):
        opset = {entry.domain: entry.version for entry in holder.opset_import}.get("", 0)
        nodes = holder.graph.node if isinstance(holder, ModelProto) else holder.node
        for inner in (nodes, *(body.node for body in nested_graphs(nodes))):
            for node in inner:
                if node.domain == "" and "" in node.output and onnx.defs.has(node.op_type, opset):
                    _name_absent(node, onnx.defs.get_schema(node.op_type, opset), taken)


def _remove_nodes(graph: onnx_ir.Graph, opset: int) -> None:
    outputs = frozenset(graph.outputs)
    for node in reversed(graph):
        if not any(_is_read(value, outputs) for value in node.outputs):
            graph.remove(node, safe=True)
            continue
        node.resize_inputs(_last(value is not None for value in node.inputs))
        if node.domain == "" and _independent(node, opset):
            node.resize_outputs(_last(_is_read(value, outputs) for value in node.outputs))
        for body in bodies(node):
            _remove_nodes(body, opset)


def _is_read(value: onnx_ir.Value, outputs: frozenset[onnx_ir.Value]) -> bool:
    return bool(value.uses()) or value in outputs


def _last(present: Iterable[bool]) -> int:
    """How many places there are up to the last one that is present."""
    return max((index + 1 for index, there in enumerate(present) if there), default=0)


def _independent(node: onnx_ir.Node, opset: int) -> bool:
    if node.op_type != "BatchNormalization":
        return node.op_type in _INDEPENDENT
    mode = node.attributes.get("training_mode")
    return opset >= _NORM_MODE and (mode is None or mode.as_int() == 0)


def _names(proto: ModelProto) -> set[str]:
    """Every value name of the model, at any depth."""
    functions = [node for function in proto.functions for node in function.node]
    names = {name for nodes in node_lists(proto) for node in nodes for name in node.output}
    names.update(name for function in proto.functions for name in function.input)
    for graph in (proto.graph, *nested_graphs(proto.graph.node), *nested_graphs(functions)):
        names.update(value.name for value in (*graph.input, *graph.initializer))
    return names


def _name_absent(node: NodeProto, schema: onnx.defs.OpSchema, taken: set[str]) -> None:
    results = list(node.output)
    needed = [_needs(node, schema, index) for index in range(len(results))]
    count = _last(bool(name) or must for name, must in zip(results, needed, strict=True))
    del node.output[count:]
    for index, name in enumerate(node.output):
        if not name and (needed[index] or node.op_type in {"Attention", "BatchNormalization"}):
            count = 0
            while f"{node.op_type}_unread_{count}" in taken:
                count += 1
            node.output[index] = f"{node.op_type}_unread_{count}"
            taken.add(node.output[index])


def _needs(node: NodeProto, schema: onnx.defs.OpSchema, index: int) -> bool:
    """Whether a result must have a name: it is not optional, or the node trains."""
    if any(a.name == "training_mode" and a.i for a in node.attribute):
        return node.op_type == "BatchNormalization"
    return schema.outputs[min(index, len(schema.outputs) - 1)].option != _OPTIONAL
