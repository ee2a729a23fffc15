"""A static onnx_ir model -> ir.Graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.captures import captured
from partitioner.frontends.onnx.dims import Declared
from partitioner.frontends.onnx.fold import fresh
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr, Constant, Graph, Node, Opaque
from partitioner.ir.onnx_types import from_onnx_dtype
from partitioner.ir.types import Dim, TensorType

_PLAIN = {
    onnx_ir.AttributeType.FLOAT,
    onnx_ir.AttributeType.INT,
    onnx_ir.AttributeType.STRING,
}
_LISTS = {
    onnx_ir.AttributeType.FLOATS,
    onnx_ir.AttributeType.INTS,
    onnx_ir.AttributeType.STRINGS,
}


@dataclass
class _Builder:
    """What has been collected on the way through the graph, in order."""

    where: str
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    names: set[str | None] = field(default_factory=set)


def build_graph(
    model: onnx_ir.Model,
    name: str,
    symbols: Mapping[str, tuple[Declared, ...]],
    where: str,
) -> Graph:
    """Convert a model whose values all have static types.

    Args:
        model: Functions inlined, no Constant nodes, shapes static, every output a node's result.
        name: The graph's name.
        symbols: Dims of the inputs as the model declares them, for the symbols of `Dim`.
        where: What error messages call the model.

    Raises:
        FrontendError: An element type or a value that the IR does not hold.
    """
    graph = model.graph
    builder = _Builder(where)
    for value in graph.inputs:
        kind = _type(builder, value)
        builder.types[value.name or ""] = _with_symbols(kind, symbols.get(value.name or "", ()))
    for node in graph:
        _add_node(builder, node)
    return Graph(
        name=name,
        inputs=tuple(value.name or "" for value in graph.inputs),
        outputs=tuple(value.name or "" for value in graph.outputs),
        nodes=tuple(builder.nodes),
        types=builder.types,
        constants=builder.constants,
        opsets=dict(sorted(graph.opset_imports.items())),
    )


def _with_symbols(kind: TensorType, declared: tuple[Declared, ...]) -> TensorType:
    if len(declared) != kind.rank:
        return kind
    pairs = zip(kind.dims, declared, strict=True)
    return TensorType(
        kind.dtype,
        tuple(Dim(dim.size, said if isinstance(said, str) else None) for dim, said in pairs),
    )


def _add_node(builder: _Builder, node: onnx_ir.Node) -> None:
    outer = tuple(captured(node))
    _take_constants(builder, (*node.inputs, *outer))
    name = fresh(node.name or f"{node.op_type}_0", builder.names)
    for value in node.outputs:
        if value.name:
            builder.types[value.name] = _type(builder, value)
    builder.nodes.append(
        Node(
            name=name,
            op=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
            inputs=tuple("" if value is None else value.name or "" for value in node.inputs),
            outputs=tuple(value.name or "" for value in node.outputs),
            attrs={key: _attr(value) for key, value in node.attributes.items()},
            captures=tuple(value.name or "" for value in outer),
        )
    )


def _take_constants(builder: _Builder, values: Iterable[onnx_ir.Value | None]) -> None:
    for value in values:
        if value is not None and value.name and value.name not in builder.types:
            _add_constant(builder, value, value.name)


def _add_constant(builder: _Builder, value: onnx_ir.Value, name: str) -> None:
    tensor = value.const_value
    if tensor is None:
        raise FrontendError(f"{builder.where}: value {value.name!r} is read but nothing makes it")
    kind = TensorType.of(
        _dtype(builder, tensor.dtype, f"constant {value.name!r}"), tensor.shape.numpy()
    )
    builder.types[name] = kind
    builder.constants[name] = Constant(kind, tensor.numpy)


def _type(builder: _Builder, value: onnx_ir.Value) -> TensorType:
    assert value.shape is not None and value.dtype is not None  # noqa: PT018
    dtype = _dtype(builder, value.dtype, f"tensor {value.name!r}")
    return TensorType.of(dtype, value.shape.numpy())


def _dtype(builder: _Builder, dtype: onnx_ir.DataType, what: str) -> str:
    try:
        return from_onnx_dtype(dtype.value)
    except IRError as error:
        raise FrontendError(
            f"{builder.where}: {what} has elements of {dtype.name}, which are not supported"
        ) from error


def _attr(attribute: onnx_ir.Attr) -> Attr:
    if attribute.type in _PLAIN:
        plain: int | float | str = attribute.value
        return plain
    if attribute.type in _LISTS:
        return tuple(attribute.value)
    if attribute.type == onnx_ir.AttributeType.TENSOR:
        return attribute.as_tensor().numpy()
    if attribute.type == onnx_ir.AttributeType.GRAPH:
        body = onnx_ir.serde.serialize_graph(attribute.as_graph())
        return Opaque("GraphProto", body.SerializeToString(deterministic=True))
    proto = onnx_ir.serde.serialize_attribute(attribute)
    return Opaque("AttributeProto", proto.SerializeToString(deterministic=True))
