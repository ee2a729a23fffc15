"""ONNX models in: a file or a message -> ir.Graph with static types.

>>> from partitioner.frontends.onnx.load import load_onnx
>>> load_onnx("model.onnx", dims={"batch": 8}).graph  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx_ir
from onnx import ModelProto
from onnx_ir.passes.common import InlinePass

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.build import build_graph
from partitioner.frontends.onnx.inferring.check_nodes import check_rules
from partitioner.frontends.onnx.inferring.dims import Binding, Declared, bind_dims, declared_dims
from partitioner.frontends.onnx.inferring.shapes import bounded_values, keep_together, make_static
from partitioner.frontends.onnx.reading.bodies import lift_weights
from partitioner.frontends.onnx.reading.border import border
from partitioner.frontends.onnx.reading.read import Source, name_of, read_source
from partitioner.frontends.onnx.reading.runtime import runtime_operators
from partitioner.frontends.onnx.rewriting.fold import lift_constants, settle_outputs
from partitioner.ir.graph import Graph, Opaque
from partitioner.ir.onnx_types import onnx_dtype
from partitioner.rewrites.graph_writer import in_parts
from partitioner.rewrites.keys import keys_in_parts
from partitioner.rewrites.onnx_forms import WITH_KERNELS, WITHOUT_KERNELS

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Traced:
    """A model as read."""

    graph: Graph  #: The model, simplified, with static types.
    #: The model as the user gave it, which ONNX Runtime can run for comparison: the same inputs by
    #: name, the same outputs in order. Its IR version is one that ONNX Runtime reads, its nodes
    #: (and results that these must have) are named and in order, and its outputs have the names
    #: that the graph gives them; nothing else differs.
    whole: ModelProto
    #: Where external data files of `whole` lie (ONNX Runtime's session config entry
    #: "session.model_external_initializers_file_folder_path"); None without any.
    folder: Path | None
    notes: tuple[str, ...]  #: Remarks for the user, one line each.

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
    plan_only: bool = False,
) -> Traced:
    """Read a model. Weights in external files are mapped when a constant is loaded.

    Args:
        model: Path of an .onnx file, or the message (without external data).
        dims: Sizes of symbolic dims by symbol.
        shapes: Sizes of inputs by name, and of results of nodes that the model does not tell.
        plan_only: Whether files of weights may be missing. Such a weight is known by its type only;
            to load it raises a FrontendError.

    Raises:
        FrontendError: The model is not valid or not supported, or an input dim has no size.
    """
    with border(name_of(model)):
        return _traced(read_source(model, plan_only=plan_only), dims, shapes)


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
    graph = build_graph(read, source.name, declared, where, missing, source.output_names)
    made = {n for node in graph.nodes if node.name == together for n in node.outputs}
    graph = replace(graph, bounded=frozenset(made))
    check_rules(graph, where)
    graph = in_parts(graph, WITHOUT_KERNELS)
    for value, name in zip(source.proto.graph.output, graph.outputs, strict=True):
        if value.type.WhichOneof("value") is None:  # outputs that declare no element type
            value.type.tensor_type.elem_type = onnx_dtype(graph.types[name].dtype)
    notes = (*_notes(source, binding, graph), *remarks)
    return Traced(graph, source.proto, source.folder, notes)


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
