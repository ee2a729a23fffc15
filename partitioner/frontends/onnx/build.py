"""A static onnx_ir model -> ir.Graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir
from onnx_ir import convenience

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.inferring.check_nodes import is_static
from partitioner.frontends.onnx.inferring.dims import Declared
from partitioner.frontends.onnx.reading.bodies import captured
from partitioner.frontends.onnx.reading.border import border
from partitioner.frontends.onnx.reading.names import fresh
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr, Constant, Graph, Node, Opaque
from partitioner.ir.onnx_types import from_onnx_dtype
from partitioner.ir.ops import rule_of
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.rule import Rule
from partitioner.ir.types import Dim, TensorType

#: Metadata in which PyTorch's exporter writes the modules around an operator, each by its whole
#: path, and last the operator: "['', 'layers', 'layers.0', 'add_3']".
_SCOPES = "pkg.torch.onnx.name_scopes"
_MOST_LETTERS = 10_000  #: Longer metadata is not read.
#: A Loop of so many iterations or more runs as often as its condition says.
_ENDLESS = 2**31 - 1


def build_graph(
    model: onnx_ir.Model,
    name: str,
    symbols: Mapping[str, tuple[Declared, ...]],
    where: str,
    missing: Mapping[str, Path],
    output_names: Mapping[str, str],
) -> Graph:
    """Convert a model without Constant nodes and functions, whose values all have static types.

    Args:
        model: The model; every output is a node's own result.
        name: The graph's name.
        symbols: Dims of the inputs as the model declares them, for the symbols of `Dim`.
        where: The model's name in error messages.
        missing: Inputs that are weights whose files are missing, with their files.
        output_names: See `Graph`.

    Raises:
        FrontendError: An element type or a value that the IR does not hold.
    """
    graph = model.graph
    opsets = dict(sorted(graph.opset_imports.items()))
    types = {
        _name(value): _with_symbols(_type(value, where), symbols.get(_name(value), ()))
        for value in graph.inputs
    }
    constants = {
        name: Constant(types[name], partial(_refuse, where, name, file), weight=True)
        for name, file in missing.items()
    }
    nodes: list[Node] = []
    modules: dict[str, str] = {}
    node_names: set[str | None] = set()
    for node in graph:
        outer = captured(node)
        for value in (*node.inputs, *outer):
            if _name(value) and _name(value) not in types:
                constants[_name(value)] = _constant(value, where)
                types[_name(value)] = constants[_name(value)].type
        types.update({value.name: _type(value, where) for value in node.outputs if value.name})
        node_name = fresh(node.name or f"{node.op_type}_0", node_names)
        scopes = node.metadata_props.get(_SCOPES, "")
        paths = re.findall(r"'([^']*)'", scopes) if len(scopes) <= _MOST_LETTERS else []
        if len(paths) > 1 and paths[-2]:
            modules[node_name] = paths[-2]
        nodes.append(_node(node, node_name, opsets, where))
    return Graph(
        name=name,
        inputs=tuple(name for name in map(_name, graph.inputs) if name not in missing),
        outputs=tuple(map(_name, graph.outputs)),
        nodes=tuple(nodes),
        types=types,
        constants=constants,
        opsets=opsets,
        modules=modules,
        output_names=output_names,
    )


def _node(node: onnx_ir.Node, name: str, opsets: Mapping[str, int], where: str) -> Node:
    return Node(
        name=name,
        op=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
        inputs=tuple(map(_name, node.inputs)),
        outputs=tuple(map(_name, node.outputs)),
        attrs={
            key: _body(node, value.as_graph(), opsets, where)
            if value.type == onnx_ir.AttributeType.GRAPH
            else _attr(value)
            for key, value in node.attributes.items()
        },
        captures=tuple(map(_name, captured(node))),
    )


def _body(node: onnx_ir.Node, body: onnx_ir.Graph, opsets: Mapping[str, int], where: str) -> Opaque:
    data = onnx_ir.serde.serialize_graph(body).SerializeToString(deterministic=True)
    once = _flops_of_body(body, opsets, where)
    return Opaque("GraphProto", data, _runs_of_bodies(node) * once)


def _runs_of_bodies(node: onnx_ir.Node) -> int:
    """Count how often a node runs a body of its own; once where that depends on data."""
    if node.domain or node.op_type not in ("Loop", "Scan"):
        return 1
    body = node.attributes["body"].as_graph()
    if node.op_type == "Scan":
        count = node.attributes["num_scan_inputs"].as_int()
        axes = node.attributes.get_ints("scan_input_axes", [0])
        return _size(node.inputs[len(node.inputs) - count], axes[0])
    count_operand = node.inputs[0] if node.inputs else None
    tensor = None if count_operand is None else convenience.get_const_tensor(count_operand)
    if tensor is not None and tensor.size == 1 and int(tensor.numpy().item()) < _ENDLESS:
        return max(int(tensor.numpy().item()), 0)
    stacked = node.outputs[max(len(body.inputs) - 2, 0) :]
    return max((_size(value, 0) for value in stacked), default=1)


def _size(value: onnx_ir.Value | None, axis: int) -> int:
    """The size of a dim; 1 where it is not known."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return 1
    size = value.shape[axis]
    return size if isinstance(size, int) else 1


def _flops_of_body(body: onnx_ir.Graph, opsets: Mapping[str, int], where: str) -> float:
    """FLOPs of one run of a body; those of a node without static types are not known."""
    total = 0.0
    for node in body:
        operands = [*filter(None, node.inputs), *captured(node)]
        results = [value for value in node.outputs if value.name]
        if not all(is_static(x) or x.const_value is not None for x in (*operands, *results)):
            continue
        with suppress(FrontendError), border("a body"):
            inner = _node(node, node.name or node.op_type, opsets, where)
            held = {_name(x): _constant(x, where) for x in operands if x.const_value is not None}
            typed = {_name(x): _type(x, where) for x in (*operands, *results) if is_static(x)}
            graph = Graph(
                name="body",
                inputs=tuple(name for name in inner.reads if name not in held),
                outputs=inner.writes,
                nodes=(inner,),
                types={**typed, **{name: constant.type for name, constant in held.items()}},
                constants=held,
                opsets=opsets,
            )
            rule = rule_of(graph, inner)
            total += rule.flops if isinstance(rule, Rule) else estimated_flops(graph, inner)
    return total


def _name(value: onnx_ir.Value | None) -> str:
    """A value's name; "" for an absent operand or result."""
    return "" if value is None else value.name or ""


def _with_symbols(type_: TensorType, declared: tuple[Declared, ...]) -> TensorType:
    if len(declared) != type_.rank:
        return type_
    pairs = zip(type_.dims, declared, strict=True)
    return TensorType(
        type_.dtype,
        tuple(Dim(dim.size, name if isinstance(name, str) else None) for dim, name in pairs),
    )


def _constant(value: onnx_ir.Value | None, where: str) -> Constant:
    assert value is not None
    tensor = value.const_value
    if tensor is None:
        raise FrontendError(f"{where}: value {value.name!r} is read but nothing makes it")
    dtype = _dtype(tensor.dtype, f"{where}: constant {value.name!r}")
    return Constant(TensorType.of(dtype, tensor.shape.numpy()), _loader(tensor))


def _loader(tensor: onnx_ir.TensorProtocol) -> Callable[[], np.ndarray]:
    """A function that reads a tensor; a mapping of its file lasts as long as the array."""
    if not isinstance(tensor, onnx_ir.ExternalTensor):
        return tensor.numpy

    def load() -> np.ndarray:
        mapped = onnx_ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name or "",
            base_dir=tensor.base_dir,
        )
        return mapped.numpy()

    return load


def _refuse(where: str, name: str, file: Path) -> np.ndarray:
    raise FrontendError(f"{where}: weight {name!r} lies in {file}, which is missing")


def _type(value: onnx_ir.Value, where: str) -> TensorType:
    assert value.shape is not None and value.dtype is not None  # noqa: PT018
    dtype = _dtype(value.dtype, f"{where}: tensor {value.name!r}")
    return TensorType.of(dtype, value.shape.numpy())


def _dtype(dtype: onnx_ir.DataType, what: str) -> str:
    try:
        return from_onnx_dtype(dtype.value)
    except IRError as error:
        raise FrontendError(
            f"{what} has elements of {dtype.name}, which are not supported"
        ) from error


def _attr(attribute: onnx_ir.Attr) -> Attr:
    match attribute.type.name:
        case "FLOAT" | "INT" | "STRING":
            plain: int | float | str = attribute.value
            return plain
        case "FLOATS" | "INTS" | "STRINGS":
            return tuple(attribute.value)
        case "TENSOR":
            tensor = attribute.as_tensor()
            if tensor.dtype != onnx_ir.DataType.STRING:  # NumPy's strings are not ONNX's
                return tensor.numpy()
    proto = onnx_ir.serde.serialize_attribute(attribute)
    return Opaque("AttributeProto", proto.SerializeToString(deterministic=True))
