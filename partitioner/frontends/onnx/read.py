"""A model file or message -> a checked ModelProto of our own, with tidy names."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.checks import check_model, nested_graphs
from partitioner.frontends.onnx.unused import name_results
from partitioner.ir.checks import is_a

#: A protobuf message holds at most 2 GiB; larger models keep their weights in files beside it.
MAX_FILE_BYTES = 2**31 - 1
#: ONNX Runtime 1.31 reads IR versions up to this one.
MAX_IR_VERSION = 13
#: Opset of the nodes that we add to a model which imports only custom domains.
_OWN_OPSET = 21


@dataclass(frozen=True)
class Source:
    """A checked model.

    Attributes:
        proto: The model, weights of external files not loaded. What it computes is unchanged;
            every node has a name, and no output repeats an input, an initializer or an output.
        where: What error messages call it: the path, or the graph's name.
        folder: Where its external files lie; None for a message given in memory.
        name: For people.
        notes: What was changed, for the user.
    """

    proto: ModelProto
    where: str
    folder: Path | None
    name: str
    notes: tuple[str, ...]


def read_source(model: str | Path | ModelProto) -> Source:
    """Read and check a model.

    Raises:
        FrontendError: Not a readable, valid ONNX model of a supported opset.
    """
    if not is_a(model, str, Path, ModelProto):
        raise FrontendError(
            f"the model is a {type(model).__name__}; pass a path or a ModelProto "
            "(a PyTorch module goes through torch.onnx.export first)"
        )
    path = None if isinstance(model, ModelProto) else Path(model)
    if isinstance(model, ModelProto):
        proto = ModelProto()
        proto.CopyFrom(model)
        where = f"model {model.graph.name!r}"
    else:
        proto, where = parse_file(Path(model)), str(model)
    _default_domain(proto)
    check_model(proto, where, path)
    proto.ir_version = min(proto.ir_version, MAX_IR_VERSION)
    _name_nodes(proto.graph.node)
    for body in nested_graphs(proto.graph.node):
        _name_nodes(body.node)
    for function in proto.functions:
        _name_nodes(function.node)
    name_results(proto)
    notes = tuple(_distinct_outputs(proto.graph))
    name = proto.graph.name or ("model" if path is None else path.stem)
    return Source(proto, where, None if path is None else path.parent, name, notes)


def parse_file(path: Path) -> ModelProto:
    """The message in a file, not checked yet.

    Raises:
        FrontendError: Not a readable file of at most 2 GiB, or no protobuf message of a model.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FrontendError(f"{path}: not a regular file; pass an .onnx file")
        if status.st_size > MAX_FILE_BYTES:
            raise FrontendError(
                f"{path}: {status.st_size} bytes, but an ONNX file has at most {MAX_FILE_BYTES}; "
                "larger models keep their weights in external data files"
            )
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise FrontendError(f"{path}: cannot be read ({why})") from error
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise FrontendError(f"{path}: not an ONNX model ({one_line(error)})") from error
    return proto


def _default_domain(proto: ModelProto) -> None:
    """Write the default domain as "" everywhere ("ai.onnx" is its other spelling)."""
    for opset in proto.opset_import:
        opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
    if proto.opset_import and all(opset.domain for opset in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid("", _OWN_OPSET))
    for function in proto.functions:
        for opset in function.opset_import:
            opset.domain = "" if opset.domain == "ai.onnx" else opset.domain
    for node in _all_nodes(proto):
        if node.domain == "ai.onnx":
            node.domain = ""


def _all_nodes(proto: ModelProto) -> Iterator[NodeProto]:
    for graph in nested_graphs(proto.graph.node):
        yield from graph.node
    yield from proto.graph.node
    for function in proto.functions:
        yield from function.node
        for graph in nested_graphs(function.node):
            yield from graph.node


def _name_nodes(nodes: Iterable[NodeProto]) -> None:
    """Give each unnamed node the name `Op_k`, k the first number that is free."""
    taken = {node.name for node in nodes}
    counts: dict[str, int] = {}
    for node in nodes:
        while not node.name:
            count = counts.get(node.op_type, 0)
            counts[node.op_type] = count + 1
            name = f"{node.op_type}_{count}"
            node.name = "" if name in taken else name


def _distinct_outputs(graph: GraphProto) -> Iterator[str]:
    """Give an output that is an input, an initializer or a repeated output its own value."""
    taken = _value_names(graph)
    seen = {value.name for value in graph.input} | {init.name for init in graph.initializer}
    for value in graph.output:
        if value.name in seen:
            name = _fresh(f"{value.name}_output", taken)
            node = graph.node.add(op_type="Identity", name=f"Identity_{name}")
            node.input.append(value.name)
            node.output.append(name)
            yield f"output {value.name!r} repeats another value: it is returned as {name!r}"
            value.name = name
        seen.add(value.name)


def _value_names(graph: GraphProto) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    return names | {name for node in graph.node for name in node.output}


def _fresh(name: str, taken: set[str]) -> str:
    count, found = 0, name
    while found in taken:
        count += 1
        found = f"{name}_{count}"
    taken.add(found)
    return found
