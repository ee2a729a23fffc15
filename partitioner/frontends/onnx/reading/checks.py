"""Checks of a model from outside, also of a hostile one: each is a function of the message."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
)

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.reading.runtime import runtime_operators
from partitioner.ir.errors import IRError
from partitioner.ir.types import TensorType, from_onnx_dtype

#: The opsets that ONNX Runtime 1.31 runs; older models are converted to the first of them.
OLDEST_OPSET, NEWEST_OPSET = 7, 26
#: Nodes after inlining functions, or so many times the nodes in the file if that is more. The
#: largest real graph seen has about 10,000 nodes.
MAX_EXPANDED_NODES, MAX_EXPANSION = 40_000, 8

_ELEMENT_TYPES, _EXTERNAL = frozenset(TensorProto.DataType.values()), TensorProto.EXTERNAL
_EXTERNAL_KEYS = {"location", "offset", "length", "checksum", "basepath"}
_OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
#: A domain that no model has.
_UNCHECKED = "partitioner.unchecked"
_FunctionId = tuple[str, str, str]


def check_model(
    proto: ModelProto,
    where: str,
    folder: Path | None,
    file: Path | None = None,
    *,
    plan_only: bool = False,
) -> Mapping[str, Path]:
    """Refuse a model that is not valid ONNX, or not ours to read, before any pass may trust it.

    Args:
        proto: The message, external data not loaded.
        where: The model's name in error messages.
        folder: Folder of the external data; None in memory.
        file: A file with the same message; None without one.
        plan_only: Whether files of initializers may be missing.

    Returns:
        The file of each initializer whose file is missing.
    """
    if not proto.HasField("graph"):
        raise FrontendError(f"{where}: not an ONNX model (it holds no graph)")
    _check_opset(proto, where)
    graphs = list(all_graphs(proto))
    for sparse in (tensor for graph in graphs for tensor in graph.sparse_initializer):
        name = sparse.values.name
        raise FrontendError(f"{where}: initializer {name!r} is sparse; store it as a dense tensor")
    _check_values(proto, where)
    initializers = (tensor.name for graph in graphs for tensor in graph.initializer)
    weights = initializers if plan_only else ()
    missing = _check_tensors(proto, where, folder, frozenset(weights))
    _check_calls(proto, where)
    _check_nodes(proto, where)
    try:
        _run_checker(proto, None if missing else file)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise FrontendError(f"{where}: not a valid ONNX model: {one_line(error)}") from error
    return missing


def nested_graphs(nodes: Iterable[NodeProto]) -> Iterator[GraphProto]:
    """The subgraph bodies under these nodes, at any depth, outer ones first."""
    for node in nodes:
        for attribute in node.attribute:
            single = [attribute.g] if attribute.type == AttributeProto.GRAPH else []
            for graph in (*single, *attribute.graphs):
                yield graph
                yield from nested_graphs(graph.node)


def node_lists(proto: ModelProto) -> Iterator[Sequence[NodeProto]]:
    """Nodes of the main graph, of each subgraph inside it, then the same of each function."""
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        yield nodes
        yield from (graph.node for graph in nested_graphs(nodes))


def all_nodes(proto: ModelProto) -> Iterator[NodeProto]:
    """The nodes of `node_lists`."""
    return chain.from_iterable(node_lists(proto))


def all_graphs(proto: ModelProto) -> Iterator[GraphProto]:
    """The main graph and all subgraphs, those of functions included."""
    yield proto.graph
    for holder in (proto.graph, *proto.functions):
        yield from nested_graphs(holder.node)


def own_opset(holder: ModelProto | FunctionProto) -> int:
    """The version of ONNX's own operators that a model or function imports; 0 for none."""
    return max((entry.version for entry in holder.opset_import if not entry.domain), default=0)


def _run_checker(proto: ModelProto, file: Path | None) -> None:
    """ONNX's own checker, less its demands that inputs and outputs declare a rank, outputs a type.

    It also refuses what ONNX Runtime has in ONNX's own domain, as LayerNormalization before
    opset 17: the checker sees it in a domain that it passes over.
    """
    own = any(_runtime_nodes(proto))
    untyped = any(value.type.WhichOneof("value") is None for value in proto.graph.output)
    if file is not None and not own and not untyped and not any(_unranked(proto)):
        onnx.checker.check_model(file)
        return
    copy = ModelProto()
    copy.CopyFrom(proto)
    for value in copy.graph.output:
        if value.type.WhichOneof("value") is None:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in list(_runtime_nodes(copy)):
        node.domain = _UNCHECKED
    for holder in (copy, *copy.functions) if own else ():
        holder.opset_import.append(onnx.helper.make_opsetid(_UNCHECKED, 1))
    for type_ in _unranked(copy):
        type_.shape.SetInParent()
    for tensor in all_tensors(copy):  # it would look for their files in the working directory
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")
            tensor.dims[:] = [0]
    onnx.checker.check_model(copy)


def _runtime_nodes(proto: ModelProto) -> Iterator[NodeProto]:
    """Nodes of ONNX's own domain whose operators only ONNX Runtime has in this opset."""
    opset = own_opset(proto)
    for node in all_nodes(proto):
        if node.domain or onnx.defs.has(node.op_type, opset):
            continue
        if runtime_operators().get(("", node.op_type), opset + 1) <= opset:
            yield node


def _unranked(proto: ModelProto) -> Iterator[TypeProto.Tensor]:
    for graph in (proto.graph, *nested_graphs(proto.graph.node)):
        for value in (*graph.input, *graph.output):
            type_ = value.type.tensor_type
            if value.type.HasField("tensor_type") and not type_.HasField("shape"):
                yield type_


def _check_opset(proto: ModelProto, where: str) -> None:
    versions = {opset.version for opset in proto.opset_import if not opset.domain}
    for version in sorted(versions):
        if not 1 <= version <= NEWEST_OPSET:
            raise FrontendError(
                f"{where}: opset {version} is not in 1..{NEWEST_OPSET}; "
                f"convert it with onnx.version_converter or export for opset {NEWEST_OPSET - 1}"
            )
    if len(versions) > 1:
        raise FrontendError(f"{where}: imports ai.onnx in opsets {sorted(versions)}; keep one")


def _check_values(proto: ModelProto, where: str) -> None:
    """Refuse declared element types that ONNX does not define, and negative sizes."""
    for graph in all_graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            tensor = value.type.tensor_type
            what = f"{where}: value {value.name!r}"
            _check_element_type(tensor.elem_type, what)
            sizes = [dim.dim_value for dim in tensor.shape.dim if dim.HasField("dim_value")]
            if any(size < 0 for size in sizes):
                raise FrontendError(
                    f"{what} has sizes {sizes}; each must be at least 0 (an unknown one has a name)"
                )


def _check_element_type(number: int, what: str) -> None:
    if number not in _ELEMENT_TYPES:
        raise FrontendError(f"{what} has element type {number}, which ONNX does not define")


def follow_links(proto: ModelProto, path: Path) -> Path:
    """The folder of a model's external data, whose names in the model may be changed, in place.

    Where the model's path is a link, links beside it are followed if they all lead to files in the
    folder of the model's own file: so does the cache of Hugging Face keep models.
    """
    folder = path.parent
    if not path.is_symlink():
        return folder
    home, names = path.resolve().parent, {}
    external = [t for t in all_tensors(proto) if t.data_location == TensorProto.EXTERNAL]
    entries = [e for tensor in external for e in tensor.external_data if e.key == "location"]
    for name in {entry.value for entry in entries}:
        if not name or "\0" in name or PurePosixPath(name).name != name:
            return folder
        link = folder / name
        if not link.is_symlink() or link.resolve().parent != home:
            return folder
        names[name] = link.resolve().name
    for entry in entries:
        entry.value = names[entry.value]
    return home


def _check_tensors(
    proto: ModelProto, where: str, folder: Path | None, optional: frozenset[str]
) -> Mapping[str, Path]:
    """Refuse tensors whose data is of another size than their dims say, or in a file not to read.

    Returns:
        The file of each of the `optional` tensors whose file is missing.
    """
    missing: dict[str, Path] = {}
    for tensor in all_tensors(proto):
        what, is_external = f"{where}: tensor {tensor.name!r}", tensor.data_location == _EXTERNAL
        if is_external and folder is None:
            raise FrontendError(
                f"{what} lies in an external file, but the model was given in memory; "
                "pass the model's path"
            )
        if is_external and folder is not None:
            absent = _check_span(tensor, what, folder, may_be_missing=tensor.name in optional)
            if absent is not None:
                missing[tensor.name] = absent
        _check_element_type(tensor.data_type, what)
        if tensor.HasField("raw_data") and not is_external:
            need = _tensor_bytes(tensor, what)
            if len(tensor.raw_data) != need:
                raise FrontendError(
                    f"{what} of dims {tuple(tensor.dims)} needs {need} bytes, "
                    f"its raw_data has {len(tensor.raw_data)}"
                )
    return missing


def all_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model: initializers and attributes, at any depth and in functions."""
    for graph in all_graphs(proto):
        yield from graph.initializer
    for node in all_nodes(proto):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors


def _check_span(
    tensor: TensorProto, what: str, folder: Path, *, may_be_missing: bool
) -> Path | None:
    """The tensor's file if it is missing."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    unknown = sorted(set(entries) - _EXTERNAL_KEYS)
    if unknown:
        raise FrontendError(f"{what} has external data keys {unknown}, which ONNX does not define")
    location = entries.get("location", "")
    inside = PurePosixPath(location)
    outside = inside.is_absolute() or PureWindowsPath(location).drive
    if not location or "\0" in location or outside or ".." in PureWindowsPath(location).parts:
        raise FrontendError(f"{what} names external file {location!r}, not one in {folder}")
    path = folder / inside
    steps = [folder.joinpath(*inside.parts[: count + 1]) for count in range(len(inside.parts))]
    if any(step.is_symlink() for step in steps):
        raise FrontendError(f"{what} names external file {location!r}, which is a link")
    need = _tensor_bytes(tensor, what)
    offset = _entry(entries, "offset", 0, what)
    length = _entry(entries, "length", need, what)
    if length != need:
        raise FrontendError(f"{what} needs {need} bytes, its external data has length {length}")
    if may_be_missing and not path.exists():
        return path
    size = _file_bytes(path, what)
    if offset + length > size:
        raise FrontendError(
            f"{what} ends at byte {offset + length} of {location!r}, which has {size}"
        )
    return None


def _file_bytes(path: Path, what: str) -> int:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise FrontendError(
            f"{what}: external file {path} is missing (--plan-only, plan_only=True: not needed)"
        ) from error
    except OSError as error:
        raise FrontendError(f"{what}: external file {path} cannot be read") from error
    if not stat.S_ISREG(status.st_mode):
        raise FrontendError(f"{what}: external file {path} is not a regular file")
    return status.st_size


def _tensor_bytes(tensor: TensorProto, what: str) -> int:
    if any(size < 0 for size in tensor.dims):
        raise FrontendError(f"{what} has dims {tuple(tensor.dims)}; each must be at least 0")
    try:
        return TensorType.of(from_onnx_dtype(tensor.data_type), tensor.dims).nbytes
    except IRError as error:
        raise FrontendError(f"{what}: {error}") from error


def _entry(entries: Mapping[str, str], key: str, default: int, what: str) -> int:
    text = entries.get(key, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise FrontendError(f"{what} has external data {key} {text!r}, not a count of bytes")
    return int(text)


def _check_calls(proto: ModelProto, where: str) -> None:
    """Refuse functions that call themselves, and nests that would inline to a bomb."""
    bodies = {(f.domain, f.name, f.overload): _flat(f.node) for f in proto.functions}
    calls = {
        key: [callee for node in body if (callee := _called(node)) in bodies]
        for key, body in bodies.items()
    }
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        loop = " -> ".join("::".join(filter(None, key)) for key in error.args[1])
        raise FrontendError(f"{where}: functions call themselves: {loop}") from error
    sizes: dict[_FunctionId, int] = {}
    for key in order:
        sizes[key] = len(bodies[key]) + sum(sizes[callee] for callee in calls[key])
    total = sum(sizes.get(_called(node), 1) for node in _flat(proto.graph.node))
    limit = max(MAX_EXPANDED_NODES, MAX_EXPANSION * sum(map(len, node_lists(proto))))
    if total > limit:
        shown = f"{total:,}" if math.log10(total) < 15 else f"10^{math.log10(total):.0f}"
        raise FrontendError(f"{where}: inlining its functions gives {shown} nodes, over {limit:,}")


def _check_nodes(proto: ModelProto, where: str) -> None:
    """Refuse a Split with another number of parts than results, which readers would allocate.

    And an absent operand that is not optional, at which ONNX Runtime ends the process.
    """
    opset = own_opset(proto)
    for node in all_nodes(proto):
        counts = [a.i for a in node.attribute if a.name == "num_outputs" and not a.ref_attr_name]
        if node.op_type == "Split" and not node.domain and counts not in ([], [len(node.output)]):
            raise FrontendError(
                f"{where}: node {node.name!r} (Split) has num_outputs {counts[0]} and "
                f"{len(node.output)} results; they must be as many"
            )
        if node.domain or "" not in node.input or not onnx.defs.has(node.op_type, opset):
            continue
        formals = onnx.defs.get_schema(node.op_type, opset).inputs
        for index, name in enumerate(node.input):
            formal = formals[min(index, len(formals) - 1)] if formals else None
            if not name and formal is not None and formal.option != _OPTIONAL:
                raise FrontendError(
                    f"{where}: node {node.name!r} ({node.op_type}) leaves out operand {index} "
                    f"({formal.name}), which is not optional"
                )


def _called(node: NodeProto) -> _FunctionId:
    return node.domain, node.op_type, node.overload


def _flat(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    return [*nodes, *(node for graph in nested_graphs(nodes) for node in graph.node)]
