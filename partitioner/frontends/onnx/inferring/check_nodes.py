"""Checks of single nodes of a model whose shapes are static: ONNX's own, and the op table's."""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx
import onnx_ir
from onnx import TypeProto
from onnx_ir import serde

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.reading.bodies import bodies
from partitioner.frontends.onnx.reading.border import border, reason
from partitioner.frontends.onnx.reading.runtime import MAX_OPERAND, infer_by_runtime
from partitioner.ir.graph import Graph
from partitioner.ir.ops import rule_of

#: Bytes of all tensors of a graph. Sums of them, over many devices, must fit 64 bits.
_MAX_BYTES = 2**56
#: Most dims of a tensor: NumPy's limit.
MAX_RANK = 64


def is_static(value: onnx_ir.Value) -> bool:
    """Test whether element type and all sizes are known."""
    return value.dtype is not None and value.shape is not None and value.shape.is_static()


def infer_by_schema(node: onnx_ir.Node, opsets: Mapping[str, int]) -> Mapping[str, TypeProto]:
    """Types of a node's results by ONNX's own inference; none where it cannot tell.

    What ONNX has no schema of, ONNX Runtime infers.

    Args:
        node: The node.
        opsets: Versions of the operators that the model imports, by domain.

    Raises:
        onnx.shape_inference.InferenceError: The node is not valid on its operands.
    """
    inputs, opset = [value for value in node.inputs if value is not None], opsets.get(node.domain)
    if opset is None or not all(map(is_static, inputs)) or next(bodies(node), None) is not None:
        return {}
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return infer_by_runtime(node, opsets)
    _check_equation(node)
    try:
        types: Mapping[str, TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema,
            serde.serialize_node(node),
            {value.name or "": serde.serialize_value(value).type for value in inputs},
            {
                value.name or "": serde.serialize_tensor(value.const_value)
                for value in inputs
                if value.const_value is not None and value.const_value.size <= MAX_OPERAND
            },
        )
    except onnx.checker.ValidationError:  # folding wrote a form of another opset
        return {}
    if node.domain and not all(map(_is_known, types.values())):
        return {**types, **infer_by_runtime(node, opsets)}
    return types


def _is_known(type_: TypeProto) -> bool:
    """Tell whether a type is a tensor's of a static shape."""
    shape = type_.tensor_type.shape if type_.tensor_type.HasField("shape") else None
    return shape is not None and all(dim.HasField("dim_value") for dim in shape.dim)


def _check_equation(node: onnx_ir.Node) -> None:
    """Refuse signs in the equation of an Einsum at which ONNX's own inference does not end."""
    if node.op_type != "Einsum" or node.domain:
        return
    equation = node.attributes.get_string("equation", "")
    terms = re.sub(r"->|\.\.\.|[A-Za-z, ]", "", equation)
    if terms or equation.count("->") > 1:
        raise onnx.shape_inference.InferenceError(f"equation {equation!r} is not one of Einsum")


def check_by_schema(node: onnx_ir.Node, opsets: Mapping[str, int], where: str) -> None:
    """Refuse a node that ONNX's own inference, and so ONNX Runtime, refuses.

    Raises:
        FrontendError: Names model and node.
    """
    try:
        infer_by_schema(node, opsets)
    except onnx.shape_inference.InferenceError as error:
        raise FrontendError(
            f"{where}: node {node.name!r} ({node.op_type}) is not valid: {reason(error)}"
        ) from error


def check_rules(graph: Graph, where: str) -> None:
    """Refuse a graph with a node whose types its row of the op table cannot be, or that is huge.

    Raises:
        FrontendError: Names model and node, or the tensor.
    """
    total = 0
    for name, type_ in graph.types.items():
        if type_.rank > MAX_RANK:
            raise FrontendError(
                f"{where}: tensor {name!r} has {type_.rank} dims; at most {MAX_RANK} are supported"
            )
        total += type_.nbytes
        if total > _MAX_BYTES:
            raise FrontendError(
                f"{where}: tensor {name!r} ({type_}) brings the model's tensors to {total:,} bytes,"
                f" over {_MAX_BYTES:,}; give smaller sizes"
            )
    for node in graph.nodes:
        with border(f"{where}: node {node.name!r} ({node.op})"):
            rule_of(graph, node)
