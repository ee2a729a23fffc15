"""Loops whose shapes differ from iteration to iteration: inference knows the first one's only."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.dims import agree, declared_dims, text


def check_loops(graph: onnx_ir.Graph, where: str) -> None:
    """Refuse loops, at any depth, whose inferred shapes may not be the true ones.

    Raises:
        FrontendError: Names the loop, and the value that changes shape or depends on data.
    """
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        what = f"{where}: node {node.name!r} ({node.op_type})"
        if node.domain == "" and node.op_type == "Loop":
            body = node.attributes["body"].as_graph()
            _check_carried(zip(body.inputs[2:], body.outputs[1:], strict=False), what)
            _check_stacked(node, body, what)
        elif node.domain == "" and node.op_type == "Scan":
            body = node.attributes["body"].as_graph()
            states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
            _check_carried(zip(body.inputs[:states], body.outputs[:states], strict=True), what)


def _check_carried(pairs: Iterable[tuple[onnx_ir.Value, onnx_ir.Value]], what: str) -> None:
    for before, after in pairs:
        old, new = declared_dims(before), declared_dims(after)
        if old is not None and new is not None and not agree(new, old):
            raise FrontendError(
                f"{what} carries {before.name!r} of shape {text(old)} into an iteration and "
                f"{text(new)} out of it; only loops that keep their shapes are supported"
            )


def _check_stacked(node: onnx_ir.Node, body: onnx_ir.Graph, what: str) -> None:
    stacked = node.outputs[len(body.inputs) - 2 :]
    for value in stacked:
        if (value.uses() or value.is_graph_output()) and not _runs_to_its_count(node, body):
            raise FrontendError(
                f"{what} stacks {value.name!r} over as many iterations as its condition allows, "
                "which depends on data; only loops with a constant condition are supported"
            )


def _runs_to_its_count(node: onnx_ir.Node, body: onnx_ir.Graph) -> bool:
    """Whether the condition is true at the start and handed on unchanged."""
    start = node.inputs[1] if len(node.inputs) > 1 else None
    if start is not None and not _is_true(start):
        return False
    value: onnx_ir.Value | None = body.outputs[0]
    while value is not None:
        producer = value.producer()
        if value is body.inputs[1] or _is_true(value):
            return True
        identity = producer is not None and producer.op_type == "Identity" and not producer.domain
        value = producer.inputs[0] if producer is not None and identity else None
    return False


def _is_true(value: onnx_ir.Value) -> bool:
    return value.const_value is not None and bool(value.const_value.numpy().all())
