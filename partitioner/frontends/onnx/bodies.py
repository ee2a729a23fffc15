"""The subgraphs of control-flow nodes, and the values that they read from outside."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir


def bodies(node: onnx_ir.Node) -> Iterator[onnx_ir.Graph]:
    """The subgraphs of a node."""
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == onnx_ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def captured(node: onnx_ir.Node) -> tuple[onnx_ir.Value, ...]:
    """Outer values that the subgraphs of a node read, at any depth, each once, in order."""
    return tuple(dict.fromkeys(value for body in bodies(node) for value in _outer_values(body)))


def _outer_values(body: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    inner: set[onnx_ir.Value] = {*body.inputs, *body.initializers.values()}
    for node in body:
        for value in (*node.inputs, *captured(node)):
            if value is not None and value not in inner:
                yield value
        inner.update(node.outputs)
    yield from (value for value in body.outputs if value not in inner)
