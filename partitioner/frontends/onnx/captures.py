"""What the subgraphs of a control-flow node read from outside."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir


def captured(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    """Outer values that the subgraphs of a node read, at any depth, each once, in order."""
    seen: set[onnx_ir.Value] = set()
    for attribute in node.attributes.values():
        for body in _bodies(attribute):
            for value in _outer_values(body):
                if value not in seen:
                    seen.add(value)
                    yield value


def _bodies(attribute: onnx_ir.Attr) -> tuple[onnx_ir.Graph, ...]:
    if attribute.type == onnx_ir.AttributeType.GRAPH:
        return (attribute.as_graph(),)
    if attribute.type == onnx_ir.AttributeType.GRAPHS:
        return tuple(attribute.as_graphs())
    return ()


def _outer_values(body: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    own: set[onnx_ir.Value] = {*body.inputs, *body.initializers.values()}
    for node in body:
        for value in (*node.inputs, *captured(node)):
            if value is not None and value not in own:
                yield value
        own.update(node.outputs)
    yield from (value for value in body.outputs if value not in own)
