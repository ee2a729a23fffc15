"""The subgraphs of control-flow nodes, and the values that they read from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import onnx_ir
from onnx_ir import DataType, convenience, serde
from onnx_ir.traversal import RecursiveGraphIterator

from partitioner.frontends.onnx.reading.names import fresh

#: Constants of less bytes stay in their body, where sizes and axes steer its nodes.
LEAST_LIFTED_BYTES = 1024


def bodies(node: onnx_ir.Node) -> Iterator[onnx_ir.Graph]:
    """The subgraphs of a node."""
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == onnx_ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def captured(node: onnx_ir.Node) -> tuple[onnx_ir.Value, ...]:
    """Outer values that the subgraphs of a node read, at any depth, each once, in order."""
    outer: dict[onnx_ir.Value, None] = {}
    for body in bodies(node):
        inner: set[onnx_ir.Value] = {*body.inputs, *body.initializers.values()}
        for each in body:
            reads = (*each.inputs, *captured(each))
            outer |= {value: None for value in reads if value is not None and value not in inner}
            inner.update(each.outputs)
        outer |= {value: None for value in body.outputs if value not in inner}
    return tuple(outer)


def made(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """The values that a graph itself defines."""
    yield from dict.fromkeys((*graph.inputs, *graph.initializers.values()))
    for node in graph:
        yield from node.outputs


def lift_weights(graph: onnx_ir.Graph) -> None:
    """Make the constants of bodies, at any depth, weights of the graph, in place.

    Small ones stay, unless they lie in a file, as copies: a constant that is renamed takes along
    the name of its tensor, which is one of the message that was read.
    """
    holders = [body for node in RecursiveGraphIterator(graph) for body in bodies(node)]
    if not holders:
        return
    names = Counter(value.name for holder in (graph, *holders) for value in made(holder))
    taken = set(names)
    for body in holders:
        for value in [*body.initializers.values(), *_lift_constants(body)]:
            tensor = value.const_value
            if tensor is not None and not _is_weight(tensor):
                proto = onnx.TensorProto()
                proto.CopyFrom(serde.serialize_tensor(tensor))
                value.const_value = serde.deserialize_tensor(proto)
            elif tensor is not None and not value.is_graph_input():
                if value.is_graph_output():
                    _return_copy(body, value, fresh(f"{value.name}_copy", taken))
                name = value.name or ""
                body.initializers.pop(name)
                lifted = _initializer(value, fresh(name, taken) if names[name] > 1 else name)
                graph.register_initializer(lifted)


def _initializer(old: onnx_ir.Value, name: str) -> onnx_ir.Value:
    new = onnx_ir.val(name, const_value=convenience.get_const_tensor(old))
    convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    return new


def _lift_constants(body: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """Initializers in place of the Constant nodes that are left: weights that the body returns."""
    for node in list(body):
        if node.op_type == "Constant" and not node.domain:
            (result,) = node.outputs
            if _is_weight(convenience.get_const_tensor(result)):
                new = _initializer(result, result.name or "")
                body.remove(node, safe=True)
                body.register_initializer(new)
                yield new


def _return_copy(body: onnx_ir.Graph, value: onnx_ir.Value, name: str) -> None:
    """Let a body return a copy of a constant: it may not return what it reads from outside."""
    node = onnx_ir.node("Identity", [value], name=f"Identity_{name}")
    copy = node.outputs[0]
    copy.name, copy.shape, copy.type = name, value.shape, value.type
    body.append(node)
    for index, output in enumerate(body.outputs):
        if output is value:
            body.outputs[index] = copy


def _is_weight(tensor: onnx_ir.TensorProtocol | None) -> bool:
    if tensor is None or tensor.dtype == DataType.STRING:
        return False
    return isinstance(tensor, onnx_ir.ExternalTensor) or tensor.nbytes >= LEAST_LIFTED_BYTES
