"""What a rank file holds as messages of ONNX: nodes, constants, types, and its description.

The description is one JSON text in the model's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.header import Header, parse_header, parse_region
from partitioner.ir.checks import count
from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Attr, Node, Opaque
from partitioner.ir.types import TensorType, numpy_dtype, onnx_dtype

#: Domain of the communication operators and of the keys in metadata.
DOMAIN = "partitioner"
#: Version of what rank files hold; files of another version are refused.
FORMAT_VERSION = 2
#: Keys of the model's metadata.
PROGRAM_KEY = f"{DOMAIN}.program"
VERSION_KEY = f"{DOMAIN}.format_version"
#: Keys of a node's metadata.
PHASE_KEY = f"{DOMAIN}.phase"
ORIGIN_KEY = f"{DOMAIN}.origin"
BLOCK_KEY = f"{DOMAIN}.block"
#: Metadata of convolutions that ONNX Runtime is to compute in plain layouts, with their segment.
PLAIN_KEY = f"{DOMAIN}.plain"


def node_proto(node: Node, rename: Mapping[str, str] = MappingProxyType({})) -> NodeProto:
    """A node; outer values that the bodies in it read are renamed, by old name."""
    domain, _, op_type = node.op.rpartition("::")
    # attribute types of the newest schema: what an empty list is a list of
    is_known = onnx.defs.has(op_type, domain)
    schema = onnx.defs.get_schema(op_type, domain).attributes if is_known else {}
    types = {key: cast("int", attribute.type) for key, attribute in schema.items()}
    return NodeProto(
        name=node.name,
        op_type=op_type,
        domain=domain,
        input=node.inputs,
        output=node.outputs,
        attribute=[
            _attribute(key, value, types.get(key, AttributeProto.INTS), rename)
            for key, value in node.attrs.items()
        ],
    )


def tensor_proto(name: str, array: np.ndarray, dtype: str) -> TensorProto:
    """A constant with its elements inlined as raw little-endian bytes."""
    if array.dtype != numpy_dtype(dtype):
        raise IRError(f"tensor {name!r} holds {array.dtype.name} elements, not {dtype}")
    proto = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
    if proto.data_type != onnx_dtype(dtype):
        raise IRError(f"tensor {name!r} of {dtype} became ONNX element type {proto.data_type}")
    return proto


def value_info(name: str, type_: TensorType) -> ValueInfoProto:
    """Name, element type and sizes of a value (sizes only: symbols are not written)."""
    return helper.make_tensor_value_info(name, onnx_dtype(type_.dtype), type_.shape)


def attribute_graphs(attribute: AttributeProto) -> Sequence[GraphProto]:
    """The subgraph bodies in an attribute."""
    return [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs


def rename_outer(body: GraphProto, rename: Mapping[str, str]) -> None:
    """Rename the outer values that a body reads, in place; names that bodies define stay."""
    defined = {value.name for value in (*body.input, *body.initializer)}
    defined.update(name for node in body.node for name in node.output)
    outer = {old: new for old, new in rename.items() if old and old not in defined}
    for node in body.node:
        node.input[:] = [outer.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in attribute_graphs(attribute):
                rename_outer(inner, outer)
    for value in body.output:
        value.name = outer.get(value.name, value.name)


def _attribute(key: str, value: Attr, empty_type: int, rename: Mapping[str, str]) -> AttributeProto:
    if isinstance(value, Opaque) and value.kind == "GraphProto":
        body = GraphProto.FromString(value.data)
        rename_outer(body, rename)
        return helper.make_attribute(key, body)
    if isinstance(value, Opaque) and value.kind == "AttributeProto":
        attribute: AttributeProto = AttributeProto.FromString(value.data)
        return attribute
    if isinstance(value, Opaque):
        raise IRError(
            f"attribute {key!r} is opaque data of kind {value.kind!r}, which ONNX does not have"
        )
    if isinstance(value, np.ndarray):
        return helper.make_attribute(key, numpy_helper.from_array(value))
    if isinstance(value, tuple):
        return helper.make_attribute(key, list(value), attr_type=None if value else empty_type)
    return helper.make_attribute(key, value)


def read_header(model: ModelProto, where: str) -> Header:
    """The description in a rank file, which errors call `where`."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if PROGRAM_KEY not in metadata:
        raise BackendError(f"{where} is not a rank file: its metadata lacks {PROGRAM_KEY!r}")
    version = metadata.get(VERSION_KEY)
    if version != str(FORMAT_VERSION):
        raise BackendError(f"{where} has format version {version}, this is {FORMAT_VERSION}")
    try:
        return parse_header(json.loads(metadata[PROGRAM_KEY]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IRError) as error:
        raise BackendError(f"{where}: metadata {PROGRAM_KEY!r}: {one_line(error)}") from error


def dump_transfers(transfers: Iterable[Transfer]) -> str:
    """Transfers as JSON: `[[source, target, read, write], ...]`."""
    rows = [(t.source, t.target, t.read, t.write) for t in transfers]
    return json.dumps(rows, separators=(",", ":"))


def parse_transfers(text: str) -> tuple[Transfer, ...]:
    """Transfers from JSON."""
    return tuple(
        Transfer(count(source), count(target), parse_region(read) or (), parse_region(write) or ())
        for source, target, read, write in json.loads(text)
    )
