"""A model file or message -> a checked ModelProto of our own, in which everything has a name."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, version_converter

from partitioner.foundations.files import read_file
from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.reading.checks import (
    OLDEST_OPSET,
    all_graphs,
    all_nodes,
    all_tensors,
    check_model,
    follow_links,
    nested_graphs,
    own_opset,
)
from partitioner.frontends.onnx.reading.names import (
    distinct_outputs,
    fresh,
    name_nodes,
    name_results,
)
from partitioner.frontends.onnx.reading.runtime import runtime_domains
from partitioner.ir.checks import is_a
from partitioner.ir.errors import typed

#: A protobuf message holds at most 2 GiB; larger models keep their weights in files beside it.
MAX_FILE_BYTES = 2**31 - 1
#: ONNX Runtime 1.31 reads IR versions up to this one.
MAX_IR_VERSION = 13
#: Opset of the nodes that we add to a model which imports only custom domains.
_OWN_OPSET = 21
#: First IR version in which an initializer need not be an input.
_INITIALIZERS_ALONE = 4
#: What exports of Paddle have for a size that is not known, and for its name.
_UNKNOWN, _NAMELESS = -1, frozenset({"?", "-1", "None"})


@dataclass(frozen=True)
class Source:
    """A checked model."""

    #: The model, weights of external files not loaded. It computes what the user's does; every node
    #: has a name, and no output repeats an input, an initializer or an output.
    proto: ModelProto
    where: str  #: Its name in error messages: the path, or the graph's name.
    folder: Path | None  #: Where its external files lie; None for a message given in memory.
    name: str  #: For people.
    notes: tuple[str, ...]  #: The changes that a user should know of.
    missing: Mapping[str, Path]  #: The file of each initializer whose file is missing.
    output_names: Mapping[str, str]  #: The user's name of each output that has another one here.


def read_source(model: str | Path | ModelProto, *, plan_only: bool = False) -> Source:
    """Read and check a file or a message; to plan only, files of weights may be missing."""
    if not is_a(model, str, Path, ModelProto):
        raise FrontendError(
            f"the model is {typed(model)}; give the path of a file, an onnx.ModelProto or an "
            "nn.Module"
        )
    path = folder = None
    where = name_of(model)
    if isinstance(model, ModelProto):
        proto = ModelProto()
        proto.CopyFrom(model)
    else:
        path = Path(model)
        proto = parse_file(path)
        folder = follow_links(proto, path)
    _write_default_domain(proto)
    mended = _write_as_onnx(proto, "model" if path is None else path.stem)
    # Where links were followed, the file has other names of external files than the message.
    is_as_read = path is not None and folder == path.parent and not mended
    missing = check_model(proto, where, folder, path if is_as_read else None, plan_only=plan_only)
    proto, notes = _newer(proto, where)
    proto.ir_version = min(proto.ir_version, MAX_IR_VERSION)
    for holder in (proto.graph, *nested_graphs(proto.graph.node), *proto.functions):
        name_nodes(holder.node)
    name_results(proto)
    output_names, repeated = distinct_outputs(proto.graph)
    notes += repeated
    for file in dict.fromkeys(missing.values()):
        count = sum(other == file for other in missing.values())
        weights = "1 weight is" if count == 1 else f"{count} weights are"
        notes += (f"{file} is missing: {weights} planned by size alone",)
    name: str | bytes = proto.graph.name  # bytes, from protobuf, where it is no UTF-8
    name = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    return Source(proto, where, folder, name, notes, missing, output_names)


def name_of(model: str | Path | ModelProto) -> str:
    """A model's name in error messages: its path, or its graph's name."""
    return f"model {model.graph.name!r}" if isinstance(model, ModelProto) else str(model)


def parse_file(path: Path) -> ModelProto:
    """The message in a file, not checked yet."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FrontendError(f"{path}: not a regular file; pass an .onnx file")
        if status.st_size > MAX_FILE_BYTES:
            raise FrontendError(
                f"{path}: {status.st_size} bytes, but an ONNX file has at most {MAX_FILE_BYTES}; "
                "larger models keep their weights in external data files"
            )
        data = read_file(path, MAX_FILE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise FrontendError(f"{path}: cannot be read ({why})") from error
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise FrontendError(f"{path}: not an ONNX model ({one_line(error)})") from error
    return proto


def _newer(proto: ModelProto, where: str) -> tuple[ModelProto, tuple[str, ...]]:
    """A checked model in an opset that ONNX Runtime runs, and a note if it was converted."""
    version = own_opset(proto)
    if version >= OLDEST_OPSET:
        return proto, ()
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in all_tensors(proto)):
        raise FrontendError(
            f"{where}: opset {version} is older than {OLDEST_OPSET}, and ONNX's version converter "
            "does not keep external data; save it with its weights inside"
        )
    try:
        shaped = onnx.shape_inference.infer_shapes(proto)  # adapters of `broadcast` read shapes
        converted = version_converter.convert_version(shaped, OLDEST_OPSET)
        _spread_slopes(converted.graph, shaped.graph)
        check_model(converted, where, None)
    except (RuntimeError, version_converter.ConvertError, FrontendError) as error:
        raise FrontendError(
            f"{where}: opset {version} is older than {OLDEST_OPSET}, and ONNX's version converter "
            f"does not convert it: {one_line(error)}; export it anew"
        ) from error
    return converted, (f"opset {version} was converted to {OLDEST_OPSET}",)


def _spread_slopes(graph: GraphProto, shaped: GraphProto) -> None:
    """Give each PRelu, in place, a slope by channel: the converter leaves one for the last dim."""
    values = (*shaped.input, *shaped.output, *shaped.value_info)
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in values}
    ranks |= {tensor.name: len(tensor.dims) for tensor in shaped.initializer}
    singles = {tensor.name for tensor in shaped.initializer if list(tensor.dims) == [1]}
    taken: set[str | None] = {name for node in graph.node for name in node.output} | set(ranks)
    for index, node in reversed(list(enumerate(graph.node))):
        x, slope = node.input[:2] if node.op_type == "PRelu" else ("", "")
        if ranks.get(slope) == 1 and slope not in singles and ranks.get(x, 0) > 2:
            node.input[1] = fresh(f"{slope}_by_channel", taken)
            axes = list(range(1, ranks[x] - 1))
            graph.node.insert(
                index, helper.make_node("Unsqueeze", [slope], [node.input[1]], axes=axes)
            )


def _write_default_domain(proto: ModelProto) -> None:
    """Write the default domain as "" everywhere ("ai.onnx" is its other spelling)."""
    for holder in (proto, *proto.functions):
        for opset in holder.opset_import:
            opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
    for node in all_nodes(proto):
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    if proto.opset_import and all(opset.domain for opset in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid("", _OWN_OPSET))


def _write_as_onnx(proto: ModelProto, name: str) -> bool:
    """Write habits that ONNX Runtime takes and ONNX's checker refuses as ONNX has them, in place.

    Nodes stand in any order, a size that is not known is -1 or "?" (Paddle), initializers are no
    inputs though the IR version is 3 (ONNX Runtime saves old models so), domains of operators are
    not imported, the graph has no name: it gets `name`. That an output has no type, the checker is
    not told (`checks`).

    Returns:
        Whether the model had such a habit.
    """
    changed = _put_in_order(proto.graph)
    for graph in all_graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value == _UNKNOWN or dim.dim_param in _NAMELESS:
                    dim.ClearField("dim_value")
                    dim.ClearField("dim_param")
                    changed = True
    if proto.HasField("graph") and not proto.graph.name:
        proto.graph.name = name
        changed = True
    imported = {entry.domain for entry in proto.opset_import}
    used = {node.domain for node in all_nodes(proto) if node.domain}
    for domain in sorted(used - imported):
        version = runtime_domains().get(domain)
        if version is not None:
            proto.opset_import.append(helper.make_opsetid(domain, version))
            changed = True
    names = {value.name for value in proto.graph.input}
    alone = any(tensor.name not in names for tensor in proto.graph.initializer)
    if proto.ir_version < _INITIALIZERS_ALONE and alone:
        proto.ir_version = _INITIALIZERS_ALONE
        changed = True
    return changed


def _put_in_order(graph: GraphProto) -> bool:
    """Put each node behind those whose results it reads, in place; True if any moved."""
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(range(len(graph.node)))
    order.add_edges_from(
        (makers[name], index)
        for index, node in enumerate(graph.node)
        for name in _read(node)
        if name in makers
    )
    if all(maker < index for maker, index in order.edges):
        return False
    try:
        numbers = list(nx.lexicographical_topological_sort(order))
    except nx.NetworkXUnfeasible:  # nodes in a circle: ONNX Runtime refuses them, too
        return False
    nodes = [NodeProto.FromString(graph.node[index].SerializeToString()) for index in numbers]
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _read(node: NodeProto) -> Iterator[str]:
    yield from node.input
    for graph in nested_graphs([node]):
        yield from (name for inner in graph.node for name in inner.input)
        yield from (value.name for value in graph.output)
