"""IR nodes, constants and value types as ONNX messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr, Node, Opaque
from partitioner.ir.onnx_types import from_onnx_dtype, onnx_dtype
from partitioner.ir.types import TensorType, numpy_dtype

__all__ = [
    "from_onnx_dtype",
    "node_proto",
    "onnx_dtype",
    "rename_graph",
    "tensor_proto",
    "value_info",
]

_NO_RENAMES: Mapping[str, str] = MappingProxyType({})


def node_proto(node: Node, rename: Mapping[str, str] = _NO_RENAMES) -> NodeProto:
    """One node, with some values renamed.

    Args:
        node: The node; the key "domain::Name" becomes domain and op_type.
        rename: New names by old, for operands, results and captured outer values alike.
    """
    domain, _, op_type = node.op.rpartition("::")
    proto = NodeProto(name=node.name, op_type=op_type, domain=domain)
    proto.input.extend(rename.get(name, name) for name in node.inputs)
    proto.output.extend(rename.get(name, name) for name in node.outputs)
    schema_types = _attribute_types(op_type, domain)
    for key, value in node.attrs.items():
        proto.attribute.append(
            _attribute(key, value, schema_types.get(key, AttributeProto.INTS), rename)
        )
    return proto


def tensor_proto(name: str, array: np.ndarray, dtype: str) -> TensorProto:
    """A constant with its elements inlined as raw little-endian bytes.

    Args:
        name: Value name.
        array: Elements (ml_dtypes for the types that NumPy lacks).
        dtype: Element type by the IR's name; must be the array's.
    """
    if array.dtype != numpy_dtype(dtype):
        raise IRError(f"tensor {name!r} holds {array.dtype.name} elements, not {dtype}")
    proto = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
    if proto.data_type != onnx_dtype(dtype):
        raise IRError(f"tensor {name!r} of {dtype} became ONNX element type {proto.data_type}")
    return proto


def value_info(name: str, kind: TensorType) -> ValueInfoProto:
    """Name, element type and sizes of a value (sizes only: symbols are not written)."""
    return helper.make_tensor_value_info(name, onnx_dtype(kind.dtype), kind.shape)


def rename_graph(graph: GraphProto, rename: Mapping[str, str]) -> GraphProto:
    """A copy of a subgraph body that reads outer values by their new names.

    Names that the body itself (or a body inside it) defines are its own and stay.
    """
    body = GraphProto()
    body.CopyFrom(graph)
    _rename_in_place(body, rename)
    return body


def _rename_in_place(body: GraphProto, rename: Mapping[str, str]) -> None:
    own = {value.name for value in (*body.input, *body.initializer)}
    own.update(name for node in body.node for name in node.output)
    outer = {old: new for old, new in rename.items() if old and old not in own}
    for node in body.node:
        node.input[:] = [outer.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs) if attribute.type in _BODIES else ():
                _rename_in_place(inner, outer)
    for value in body.output:
        value.name = outer.get(value.name, value.name)


_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def _attribute_types(op_type: str, domain: str) -> Mapping[str, int]:
    """Attribute types of the newest schema: what an empty list is a list of."""
    if not onnx.defs.has(op_type, domain):
        return {}
    schema = onnx.defs.get_schema(op_type, domain)
    return {key: cast("int", attribute.type) for key, attribute in schema.attributes.items()}


def _attribute(key: str, value: Attr, empty_type: int, rename: Mapping[str, str]) -> AttributeProto:
    if isinstance(value, Opaque):
        return _opaque_attribute(key, value, rename)
    if isinstance(value, np.ndarray):
        return helper.make_attribute(key, numpy_helper.from_array(value))
    if isinstance(value, tuple):
        return helper.make_attribute(key, list(value), attr_type=None if value else empty_type)
    return helper.make_attribute(key, value)


def _opaque_attribute(key: str, value: Opaque, rename: Mapping[str, str]) -> AttributeProto:
    if value.kind == "GraphProto":
        return helper.make_attribute(key, rename_graph(GraphProto.FromString(value.data), rename))
    if value.kind == "AttributeProto":
        proto = AttributeProto()
        proto.ParseFromString(value.data)
        return proto
    raise IRError(
        f"attribute {key!r} is opaque data of kind {value.kind!r}, which ONNX does not have"
    )
