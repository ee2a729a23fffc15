"""ONNX's own inference, node by node, where onnx_shape_inference knows no rule.

It knows the forms of old opsets (Slice with attributes, Upsample-7, TopK-1, Resize-10, Sum-6).
"""

from __future__ import annotations

import onnx
import onnx_ir
from onnx import TensorProto, TypeProto
from onnx_ir import serde

from partitioner.frontends.onnx.bodies import bodies

#: Largest constant operand handed over, in elements: sizes, axes, scales.
_MAX_OPERAND = 1024


def infer_by_schema(graph: onnx_ir.Graph) -> bool:
    """Fill in missing result types, in place and in order; True if any was inferred."""
    inferred = False
    for node in graph:
        if any(value.name and not _is_static(value) for value in node.outputs):
            inferred = _infer_node(node, graph.opset_imports.get(node.domain)) or inferred
    return inferred


def _is_static(value: onnx_ir.Value) -> bool:
    """Whether element type and all sizes are known."""
    return value.dtype is not None and value.shape is not None and value.shape.is_static()


def _infer_node(node: onnx_ir.Node, opset: int | None) -> bool:
    inputs = [value for value in node.inputs if value is not None]
    if opset is None or not all(map(_is_static, inputs)) or next(bodies(node), None) is not None:
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        types = onnx.shape_inference.infer_node_outputs(
            schema,
            serde.serialize_node(node),
            {value.name or "": _type(value) for value in inputs},
            {value.name or "": data for value in inputs if (data := _data(value)) is not None},
        )
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
        return False  # stays dynamic, and is then refused by name
    return sum(_set_type(value, types.get(value.name or "")) for value in node.outputs) > 0


def _type(value: onnx_ir.Value) -> TypeProto:
    assert value.dtype is not None and value.shape is not None  # noqa: PT018
    return onnx.helper.make_tensor_type_proto(value.dtype.value, value.shape.numpy())


def _data(value: onnx_ir.Value) -> TensorProto | None:
    tensor = value.const_value
    if tensor is None or tensor.size > _MAX_OPERAND:
        return None
    return serde.serialize_tensor(tensor)


def _set_type(value: onnx_ir.Value, proto: TypeProto | None) -> bool:
    if proto is None or _is_static(value) or not proto.HasField("tensor_type"):
        return False
    shape = serde.deserialize_type_proto_for_shape(proto)
    if shape is None or not shape.is_static():
        return False
    value.shape = shape
    value.type = serde.deserialize_type_proto_for_type(proto)
    return True
