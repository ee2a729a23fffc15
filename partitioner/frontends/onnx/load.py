"""ONNX models in: a file or a message -> ir.Graph with static types.

>>> from partitioner.frontends.onnx.load import load_onnx
>>> load_onnx("model.onnx", dims={"batch": 8}).graph  # doctest: +SKIP
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir
from onnx import ModelProto
from onnx_ir import convenience
from onnx_ir.passes.common import InlinePass

from partitioner.backends.runtimes import check_installed
from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.inferring.check_nodes import check_rules, is_static
from partitioner.frontends.onnx.inferring.dims import Binding, Declared, bind_dims, declared_dims
from partitioner.frontends.onnx.inferring.shapes import bounded_values, keep_together, make_static
from partitioner.frontends.onnx.reading.bodies import captured, lift_weights
from partitioner.frontends.onnx.reading.border import border
from partitioner.frontends.onnx.reading.names import fresh
from partitioner.frontends.onnx.reading.read import Source, name_of, read_source
from partitioner.frontends.onnx.reading.runtime import runtime_operators
from partitioner.frontends.onnx.rewriting.fold import lift_constants, settle_outputs
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr, Constant, Graph, Node, Opaque
from partitioner.ir.nodes.feeds import Feed
from partitioner.ir.ops import rule_of
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.rule import Rule
from partitioner.ir.types import Dim, TensorType, from_onnx_dtype, onnx_dtype
from partitioner.rewrites.fed_results import with_fed_results
from partitioner.rewrites.graph_writer import in_parts
from partitioner.rewrites.keys import keys_in_parts
from partitioner.rewrites.onnx_forms import WITH_KERNELS, WITHOUT_KERNELS

#: Metadata in which PyTorch's exporter writes the modules around an operator, each by its whole
#: path, and last the operator: "['', 'layers', 'layers.0', 'add_3']".
_SCOPES = "pkg.torch.onnx.name_scopes"
_MOST_LETTERS = 10_000  #: Longer metadata is not read.
#: A Loop of so many iterations or more runs as often as its condition says.
_ENDLESS = 2**31 - 1
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Traced:
    """A model as read."""

    graph: Graph  #: The model, simplified, with static types.
    source: Source  #: What was read.
    notes: tuple[str, ...]  #: Remarks for the user, one line each.

    @property
    def whole(self) -> ModelProto:
        """The model as the user gave it, which ONNX Runtime can run for comparison.

        It has the same inputs by name, and the same outputs in order. Its IR version is one that
        ONNX Runtime reads, its nodes (and results that these must have) are named and in order, and
        its outputs have the names that the graph gives them; nothing else differs.
        """
        return self.source.proto

    @property
    def folder(self) -> Path | None:
        """Where external data files of `whole` lie; None without any.

        It is for ONNX Runtime's session config entry
        "session.model_external_initializers_file_folder_path".
        """
        return self.source.folder

    def of_sizes(self, shapes: Mapping[str, tuple[int, ...]], feed: Feed = _NOTHING) -> Traced:
        """The same model with other sizes of its inputs, by name; a FrontendError if it has none.

        The weights are those that were read, also where the file has changed since.
        """
        with border(self.source.where):
            traced = _traced(self.source, _NOTHING, shapes)
        return _fed(traced, feed)

    @property
    def forms(self) -> tuple[Traced, ...]:
        """The model, and with the same results in nodes that can be cut along more dims."""
        divided = in_parts(keys_in_parts(self.graph), WITH_KERNELS)
        return (self,) if divided is self.graph else (self, replace(self, graph=divided))


def load_onnx(
    model: str | Path | ModelProto,
    dims: Mapping[str, int] = _NOTHING,
    shapes: Mapping[str, tuple[int, ...]] = _NOTHING,
    *,
    feed: Feed = _NOTHING,
    plan_only: bool = False,
) -> Traced:
    """Read a model. Weights in external files are mapped when a constant is loaded.

    Args:
        model: Path of an .onnx file, or the message (without external data).
        dims: Sizes of symbolic dims by symbol.
        shapes: Sizes of inputs by name, and of results of nodes that the model does not tell.
        feed: Results that are inputs of the next call, see `ir.nodes.feeds`.
        plan_only: Whether files of weights may be missing. Such a weight is known by its type only;
            to load it raises a FrontendError.

    Raises:
        FrontendError: The file is no valid model, or has what is not supported.
        MissingRuntimeError: ONNX Runtime, which infers and folds, is not installed.
    """
    check_installed("onnxruntime")
    with border(name_of(model)):
        traced = _traced(read_source(model, plan_only=plan_only), dims, shapes)
    return _fed(traced, feed)


def _fed(traced: Traced, feed: Feed) -> Traced:
    return replace(traced, graph=with_fed_results(traced.graph, feed)) if feed else traced


def _traced(
    source: Source, dims: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]
) -> Traced:
    where = source.where
    read = onnx_ir.from_proto(source.proto)
    if source.folder is not None:
        onnx_ir.external_data.set_base_dir(read.graph, source.folder)
    lift_weights(read.graph)
    declared, binding = _bind_inputs(read, dims, shapes, where)
    missing = _without_values(read.graph, frozenset(source.missing.values()))
    try:
        if read.functions:
            InlinePass()(read)
    except (ValueError, RuntimeError, onnx_ir.passes.InvariantError) as error:
        cause = error.__cause__ or error
        raise FrontendError(f"{where}: cannot inline its functions: {one_line(cause)}") from error
    lift_constants(read)
    bounded = bounded_values(read.graph, binding.given)
    copy = read.clone() if bounded else None
    depending = {value.name for value in bounded}
    given = {name: shape for name, shape in binding.given.items() if name not in depending}
    try:
        if copy is not None:
            make_static(copy, binding.symbols, where, binding.given)
        remarks = make_static(read, binding.symbols, where, given, bounded)
    except FrontendError as error:
        if not source.missing:
            raise
        files = ", ".join(sorted({str(file) for file in source.missing.values()}))
        raise FrontendError(
            f"{error} (the values in {files}, which is missing, may tell)"
        ) from error
    settle_outputs(read.graph, tuple(value.name for value in source.proto.graph.output))
    lift_constants(read)
    lift_weights(read.graph)
    together = ""
    if copy is not None:
        together, remark = keep_together(read.graph, bounded, copy.graph.outputs)
        remarks += remark
    graph = _build_graph(read, source, declared, missing)
    made = {n for node in graph.nodes if node.name == together for n in node.outputs}
    graph = replace(graph, bounded=frozenset(made))
    check_rules(graph, where)
    graph = in_parts(graph, WITHOUT_KERNELS)
    for value, name in zip(source.proto.graph.output, graph.outputs, strict=True):
        if value.type.WhichOneof("value") is None:  # outputs that declare no element type
            value.type.tensor_type.elem_type = onnx_dtype(graph.types[name].dtype)
    notes = (*_notes(source, binding, graph), *remarks)
    return Traced(graph, source, notes)


def _bind_inputs(
    model: onnx_ir.Model,
    dims: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> tuple[Mapping[str, tuple[Declared, ...]], Binding]:
    """Drop initializers from the inputs and give the rest static shapes."""
    graph = model.graph
    kept = [value for value in graph.inputs if value.name not in graph.initializers]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    for value in kept:
        if not isinstance(value.type, onnx_ir.TensorType):
            raise FrontendError(f"{where}: input {value.name!r} is not a tensor; only tensors are")
    declared = {value.name or "": declared_dims(value) for value in kept}
    try:
        results = {value.name: None for node in graph for value in node.outputs if value.name}
        binding = bind_dims(declared, dims, shapes, results)
    except FrontendError as error:
        raise FrontendError(f"{where}: {error}") from error
    for value in kept:
        value.shape = onnx_ir.Shape(binding.shapes[value.name or ""])
    return {name: shape for name, shape in declared.items() if shape is not None}, binding


def _without_values(graph: onnx_ir.Graph, files: Container[Path]) -> Mapping[str, Path]:
    """Make weights in these files inputs, in place: nobody reads them. Returns each one's file."""
    missing = {
        name: Path(value.const_value.path)
        for name, value in graph.initializers.items()
        if isinstance(value.const_value, onnx_ir.ExternalTensor)
        and Path(value.const_value.path) in files
    }
    for name in missing:
        value = graph.initializers.pop(name)
        assert value.const_value is not None
        value.type = onnx_ir.TensorType(value.const_value.dtype)
        value.shape = onnx_ir.Shape(value.const_value.shape.numpy())
        value.const_value = None
        graph.inputs.append(value)
    return missing


def _notes(source: Source, binding: Binding, graph: Graph) -> Iterator[str]:
    yield from source.notes
    if binding.symbols:
        yield "dims: " + ", ".join(f"{name}={size}" for name, size in binding.symbols.items())
    for node in graph.nodes:
        attrs = node.attrs.values()
        if any(isinstance(value, Opaque) and value.kind == "GraphProto" for value in attrs):
            yield f"node {node.name!r} ({node.op}) holds subgraphs and is kept whole"
    custom: dict[str, str] = {}
    for node in graph.nodes:
        if "::" in node.op:
            custom.setdefault(node.op, node.name)
    for op, first in custom.items():
        domain, _, name = op.rpartition("::")
        if (domain, name) not in runtime_operators():
            yield f"stock ONNX Runtime has no operator {op} ({first!r}): verify and run will fail"


def _build_graph(
    model: onnx_ir.Model,
    source: Source,
    symbols: Mapping[str, tuple[Declared, ...]],
    missing: Mapping[str, Path],
) -> Graph:
    """Convert a model without functions and Constant nodes, of static types.

    `symbols` are the inputs' dims as declared; `missing` are files of inputs that are weights.
    """
    graph, where = model.graph, source.where
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
        name=source.name,
        inputs=tuple(name for name in map(_name, graph.inputs) if name not in missing),
        outputs=tuple(map(_name, graph.outputs)),
        nodes=tuple(nodes),
        types=types,
        constants=constants,
        opsets=opsets,
        modules=modules,
        output_names=source.output_names,
    )


def _node(node: onnx_ir.Node, name: str, opsets: Mapping[str, int], where: str) -> Node:
    return Node(
        name=name,
        op=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
        inputs=tuple(map(_name, node.inputs)),
        outputs=tuple(map(_name, node.outputs)),
        attrs={key: _attr(node, value, opsets, where) for key, value in node.attributes.items()},
        captures=tuple(map(_name, captured(node))),
    )


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


def _attr(
    node: onnx_ir.Node, attribute: onnx_ir.Attr, opsets: Mapping[str, int], where: str
) -> Attr:
    match attribute.type.name:
        case "FLOAT" | "INT" | "STRING":
            plain: int | float | str = attribute.value
            return plain
        case "FLOATS" | "INTS" | "STRINGS":
            return tuple(attribute.value)
        case "GRAPH":
            body = attribute.as_graph()
            data = onnx_ir.serde.serialize_graph(body).SerializeToString(deterministic=True)
            flops = _runs_of_bodies(node) * _flops_of_body(body, opsets, where)
            return Opaque("GraphProto", data, flops)
        case "TENSOR":
            tensor = attribute.as_tensor()
            if tensor.dtype != onnx_ir.DataType.STRING:  # NumPy's strings are not ONNX's
                return tensor.numpy()
    proto = onnx_ir.serde.serialize_attribute(attribute)
    return Opaque("AttributeProto", proto.SerializeToString(deterministic=True))
