"""Rank files -> steps: cut at their communications.

A file that is not as it was written is refused by its digest: what is in it was proven, and fits
the files of the other ranks, when it was written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto, helper

from partitioner.backends.errors import BackendError, one_line, why_unreadable
from partitioner.backends.header import Header
from partitioner.backends.onnx.files.messages import (
    BLOCK_KEY,
    DOMAIN,
    PHASE_KEY,
    PLAIN_KEY,
    attribute_graphs,
    parse_transfers,
    read_header,
)
from partitioner.backends.onnx.files.steps import Cut, RankModel, Segment
from partitioner.backends.onnx.files.weights import check_digest
from partitioner.foundations.files import read_file
from partitioner.ir.errors import IRError
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import TensorType, from_onnx_dtype

#: Most bytes of a rank file without its weights: what a protobuf message may have.
_MOST_BYTES = 2**31 - 1


def read_directory(directory: Path) -> tuple[Header, ...]:
    """The headers of all rank files of a folder, in order of rank; no weights are read.

    Raises:
        BackendError: A file is missing or wrong, or they are of different plans.
    """
    first = read_rank(directory, 0)
    others = (read_rank(directory, rank) for rank in range(1, first.ranks))
    return check_ranks((first, *others), str(directory))


def read_rank(directory: Path, rank: int) -> Header:
    """The header of a rank's file."""
    return _read_file(directory / f"rank{rank}.onnx")[2]


def check_ranks(headers: Sequence[Header], where: str) -> tuple[Header, ...]:
    """The headers of all ranks, in order of rank; errors call the place of their files `where`.

    Files of one plan agree about communications: all have the digest of what ranks exchange, and a
    digest of their own contents.
    """
    for rank, header in enumerate(headers):
        if _shared(header) != _shared(headers[0]):
            raise BackendError(f"{where}: rank{rank}.onnx is not of the plan that rank0.onnx is of")
    return tuple(headers)


def _shared(header: Header) -> tuple[object, ...]:
    """The fields that are equal in all files of a folder."""
    plan = header.ranks, header.programs, header.origin, header.batch, header.copies
    return *plan, header.whole_inputs, header.whole_outputs


def load_rank(source: Path | ModelProto, keep: Collection[str] = ()) -> RankModel:
    """A rank file, or its message with all constants inside, as steps.

    The local values in `keep` are there after a run, beside the outputs.
    """
    if isinstance(source, ModelProto):
        proto, header, folder = source, read_header(source, "the message"), None
    else:
        (data, proto, header), folder = _read_file(source), source.parent
        check_digest(source, data, proto)
    steps, types = _steps(proto, header), _types(proto.graph)
    model = RankModel(header, proto, folder, steps, types, tuple(keep))
    linked = tuple(_link(model))
    values = {name for step in linked for name in (*step.reads, *step.writes)}
    values.update(output.value for output in header.outputs)
    for name in sorted(values - set(types)):
        raise BackendError(f"rank {header.rank}: value {name!r} has no type in the file")
    return replace(model, steps=linked)


def _read_file(path: Path) -> tuple[bytes, ModelProto, Header]:
    try:
        data = read_file(path, _MOST_BYTES)
        proto = ModelProto.FromString(data)
    except (OSError, ValueError, DecodeError) as error:
        raise BackendError(f"{path}: {why_unreadable(error)}") from error
    header = read_header(proto, str(path))
    if path.name != f"rank{header.rank}.onnx":
        raise BackendError(f"{path} says that it is of rank {header.rank}")
    return data, proto, header


def _steps(proto: ModelProto, header: Header) -> tuple[Segment | Cut, ...]:
    """Segments (not linked yet) and cuts in file order."""
    steps = tuple(_split(proto.graph.node, header.rank))
    cuts = [step for step in steps if isinstance(step, Cut)]
    order = [cut.comm.seq for cut in cuts]
    if any(a >= b for a, b in pairwise(order)):
        raise BackendError(f"rank {header.rank}: communications are out of order: {order}")
    if len(cuts) != header.comms:
        raise BackendError(
            f"rank {header.rank}: the file holds {len(cuts)} communications, not {header.comms}"
        )
    return steps


def _split(nodes: Iterable[NodeProto], rank: int) -> Iterator[Segment | Cut]:
    run: list[NodeProto] = []
    run_phase, run_block = 0, None
    for node in nodes:
        communicates = node.domain == DOMAIN
        notes = (entry for entry in node.metadata_props if entry.key in (PHASE_KEY, BLOCK_KEY))
        noted = {entry.key: int(entry.value) for entry in notes}
        phase = run_phase if communicates else noted.get(PHASE_KEY, 0)
        block = None if communicates else noted.get(BLOCK_KEY)
        if run and (communicates or (phase, block) != (run_phase, run_block)):
            yield _segment(run_phase, run, run_block)
            run = []
        run_phase, run_block = phase, block
        if communicates:
            yield _cut(node, rank)
        else:
            run.append(node)
    if run:
        yield _segment(run_phase, run, run_block)


def _segment(phase: int, nodes: Sequence[NodeProto], block: int | None) -> Segment:
    plain = any(entry.key == PLAIN_KEY for node in nodes for entry in node.metadata_props)
    return Segment(phase, tuple(nodes), block=block, plain=plain)


def _cut(node: NodeProto, rank: int) -> Cut:
    try:
        attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        dtype = from_onnx_dtype(attrs["dtype"])
        comm = Comm(
            seq=attrs["seq"],
            kind=CommKind(attrs["kind"].decode()),
            ranks=tuple(attrs["ranks"]),
            source=node.input[0] if node.input else "",
            target=node.output[0] if "target_shape" in attrs else "",
            dtype=dtype,
            transfers=parse_transfers(attrs["transfers"].decode()),
            reduce=attrs["reduce"].decode(),
            phase=attrs["phase"],
            target_phase=attrs["target_phase"],
            why=attrs["why"].decode(),
        )
        source, target = (
            TensorType.of(dtype, onnx.numpy_helper.to_array(attrs[key]).tolist())
            if key in attrs
            else None
            for key in ("source_shape", "target_shape")
        )
        uniform = bool(attrs["uniform"])
        return Cut(rank, comm, tuple(attrs["active"]), uniform, source, target)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, IRError) as error:
        where = f"rank {rank}: communication {node.name!r}"
        raise BackendError(f"{where}: {one_line(error)}") from error


def _types(graph: GraphProto) -> dict[str, TensorType]:
    types: dict[str, TensorType] = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        proto = value.type.tensor_type
        sizes = (dim.dim_value for dim in proto.shape.dim)
        types[value.name] = TensorType.of(from_onnx_dtype(proto.elem_type), sizes)
    for tensor in graph.initializer:
        types[tensor.name] = TensorType.of(from_onnx_dtype(tensor.data_type), tensor.dims)
    return types


def _link(model: RankModel) -> Iterator[Segment | Cut]:
    delivered = (*(output.value for output in model.header.outputs), *model.keep)
    reads_of = [
        step.reads if isinstance(step, Cut) else tuple(dict.fromkeys(_free(step.nodes, set())))
        for step in model.steps
    ]
    last_read = {name: index for index, reads in enumerate(reads_of) for name in reads}
    last_read |= dict.fromkeys(delivered, len(model.steps))
    made = {*model.header.inputs}
    for index, (step, reads) in enumerate(zip(model.steps, reads_of, strict=True)):
        missing = [name for name in reads if name not in made and name not in model.constants]
        if missing:
            raise BackendError(f"rank {model.rank}: {missing[0]!r} is read before it is made")
        if isinstance(step, Cut):
            made.update(step.writes)
            yield step
            continue
        writes = [name for node in step.nodes for name in node.output if name]
        made.update(writes)
        yield replace(
            step,
            reads=tuple(name for name in reads if name in made),
            writes=tuple(name for name in writes if last_read.get(name, -1) > index),
            constants=tuple(name for name in reads if name not in made),
        )
    for name in delivered:
        if name not in made and name not in model.constants:
            raise BackendError(f"rank {model.rank}: no value {name!r}")


def _free(nodes: Iterable[NodeProto], known: set[str]) -> Iterator[str]:
    known = set(known)
    for node in nodes:
        for name in node.input:
            if name and name not in known:
                yield name
        yield from captured_values(node, known)
        known.update(name for name in node.output if name)


def captured_values(node: NodeProto, known: Collection[str] = ()) -> Iterator[str]:
    """The outer values that a node's bodies read, but for known ones; some several times."""
    inside = set(known)
    for body in (body for attribute in node.attribute for body in attribute_graphs(attribute)):
        passed = {value.name for value in (*body.input, *body.initializer)}
        yield from _free(body.node, inside | passed)
        made = passed.union(name for inner in body.node for name in inner.output)
        yield from (v.name for v in body.output if v.name not in made | inside)


def constants_outside(model: RankModel) -> tuple[str, ...]:
    """Constants that are sent, delivered or kept: the runtime itself reads them."""
    cuts = [step for step in model.steps if isinstance(step, Cut)]
    names = [name for cut in cuts for name in (*cut.reads, *cut.writes)]
    names += [output.value for output in model.header.outputs] + list(model.keep)
    return tuple(dict.fromkeys(name for name in names if name in model.constants))
