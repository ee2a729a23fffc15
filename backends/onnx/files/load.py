"""Rank files -> steps: cut at their communications, everything checked, also that they agree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto, helper

from partitioner.backends.errors import BackendError, one_line, why_unreadable
from partitioner.backends.feeding import local_feeds
from partitioner.backends.header import Header, fits
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
from partitioner.backends.regions import region_shape
from partitioner.foundations.files import read_file
from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Transfer, region_numel
from partitioner.ir.phases import Part, RunOrder
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.pipeline.timeline import check
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import TensorType, from_onnx_dtype

#: Most bytes of a rank file without its weights: what a protobuf message may have.
MOST_BYTES = 2**31 - 1
Steps = Sequence[Segment | Cut]
#: The header of a rank file, and its steps, of which segments have their first node only.
RankFile = tuple[Header, tuple[Segment | Cut, ...]]


def read_directory(directory: Path) -> tuple[Header, ...]:
    """The headers of all rank files of a folder, in order of rank; no weights are read.

    Raises:
        BackendError: A file is missing or wrong, they are of different plans, or they disagree
            about a communication.
    """
    first = read_rank(directory, 0)
    others = (read_rank(directory, rank) for rank in range(1, first[0].ranks))
    return check_ranks((first, *others), str(directory))


def read_rank(directory: Path, rank: int) -> RankFile:
    """Header and steps of a rank's file; the parts that it is fed and delivers fit its values."""
    _, proto, header = _read_file(directory / f"rank{rank}.onnx")
    steps, types = _steps(proto, header), _types(proto.graph)
    parts = [(n, header.run_type(part.whole), part.region) for n, part in header.inputs.items()]
    parts += [(out.value, header.run_type(out.whole), out.region) for out in header.outputs]
    for name, whole, region in parts:
        part = whole if region is None else TensorType.of(whole.dtype, region_shape(region))
        if types.get(name) != part:
            raise BackendError(
                f"rank {header.rank}: {name!r} is {types.get(name)}, but its part is {part}"
            )
    return header, tuple(
        replace(step, nodes=step.nodes[:1]) if isinstance(step, Segment) else step for step in steps
    )


def check_ranks(files: Sequence[RankFile], where: str) -> tuple[Header, ...]:
    """The headers of the files of all ranks, in order of rank; errors call their place `where`."""
    headers = tuple(header for header, _ in files)
    for rank, header in enumerate(headers):
        if _shared(header) != _shared(headers[0]):
            raise BackendError(f"{where}: rank{rank}.onnx is not of the plan that rank0.onnx is of")
    # Each file holds its own side of a communication only. Where two sides differ the ranks would
    # wait for each other, or move the wrong parts.
    sides: dict[int, dict[int, Cut]] = {}
    for rank, (_, steps) in enumerate(files):
        for step in steps:
            if isinstance(step, Cut):
                sides.setdefault(step.comm.seq, {})[rank] = step
    try:
        _check_reached([steps for _, steps in files])
        for seq in sorted(sides):
            _check_sides(seq, sides[seq])
        _check_delivery(headers)
        _check_order(headers[0], [steps for _, steps in files])
    except BackendError as error:
        raise BackendError(f"{where}: {error}") from None
    return headers


def _shared(header: Header) -> tuple[object, ...]:
    """The fields that are equal in all files of a folder."""
    plan = header.ranks, header.programs, header.origin, header.batch, header.copies
    return *plan, header.whole_inputs, header.whole_outputs, header.fed


def _check_delivery(headers: Sequence[Header]) -> None:
    """Refuse files that do not deliver every output once, or do not feed one where it lies."""
    for header in headers:
        local_feeds(header, header.fed)
    for name in headers[0].whole_outputs:
        type_ = headers[0].run_type(name)
        copies = headers[0].copies
        times = 1 if copies is None else len(copies.devices)
        parts = [out.region for header in headers for out in header.outputs if out.whole == name]
        if name in headers[0].fed:  # each holder delivers its part
            parts = [part for part in dict.fromkeys(parts) for _ in range(times)]
        delivered = sum(type_.numel if part is None else region_numel(part) for part in parts)
        if delivered != times * type_.numel:
            raise BackendError(
                f"the ranks deliver {delivered} elements of output {name!r}, which is {type_}; "
                "partition the model again"
            )


def _check_order(header: Header, files: Sequence[Steps]) -> None:
    """Refuse an order of micro-batches in which ranks would wait for each other for ever."""
    if header.batch is None:
        return
    order = header.batch.order
    spans = {step.span for steps in files for step in steps if isinstance(step, Cut)}
    ends = ([order.phases.of(phase) for phase in span] for span in spans)
    edges = {
        (stage, target)
        for (part, stage), (of_target, target) in ends
        if part is of_target is Part.FORWARD and stage != target
    }
    try:
        check(order.table, sorted(edges))
    except PipelineScheduleError as error:
        raise BackendError(f"the schedule of micro-batches cannot run: {error}") from None


def _check_reached(files: Sequence[Steps]) -> None:
    """A phase is a number of hops, of which there are no more than steps."""
    most = sum(map(len, files))
    for rank, step in ((rank, step) for rank, steps in enumerate(files) for step in steps):
        first, last = step.span
        if not 0 <= first <= last <= most:
            name = f"node {step.nodes[0].name!r}" if isinstance(step, Segment) else str(step)
            raise BackendError(
                f"rank{rank}.onnx: phases {first} to {last} of {name} are not in order "
                f"within 0 to {most}; partition the model again"
            )


def _check_sides(seq: int, sides: Mapping[int, Cut]) -> None:
    (first, cut), *rest = sides.items()
    for rank, other in rest:
        for field, value in _agreed(other).items():
            if value != _agreed(cut)[field]:
                raise BackendError(
                    f"rank{rank}.onnx and rank{first}.onnx differ in communication {seq}: {field} "
                    f"{value} and {_agreed(cut)[field]}; partition the model again"
                )
    if sorted(sides) != sorted(cut.active):
        raise BackendError(
            f"communication {seq} is of ranks {sorted(cut.active)}, but is in the files of "
            f"{sorted(sides)}; partition the model again"
        )
    _check_transfers(seq, {rank: side.comm.transfers for rank, side in sides.items()})


def _agreed(cut: Cut) -> dict[str, Any]:
    """The fields that are equal on all sides of a communication."""
    comm = cut.comm
    return {
        "kind": comm.kind.value,
        "ranks": comm.ranks,
        "type": comm.dtype,
        "reduction": comm.reduce,
        "phase": comm.phase,
        "target phase": comm.target_phase,
        "active ranks": cut.active,
        "uniform": cut.uniform,
    }


def _check_transfers(seq: int, sides: Mapping[int, tuple[Transfer, ...]]) -> None:
    """Check that both ends of a transfer have it, in the same order among those of the pair."""
    pairs = {(t.source, t.target) for t in chain(*sides.values())}
    for source, target in sorted(pairs):
        sent, received = (
            [t for t in sides.get(end, ()) if (t.source, t.target) == (source, target)]
            for end in (source, target)
        )
        if sent != received:
            raise BackendError(
                f"rank{source}.onnx and rank{target}.onnx differ in communication {seq}: what goes "
                f"from {source} to {target}; partition the model again"
            )


def load_rank(source: Path | ModelProto, keep: Collection[str] = ()) -> RankModel:
    """A rank file, or its message with all constants inside, as steps.

    The local values in `keep` are there after a run, beside the outputs.
    """
    if isinstance(source, ModelProto):
        data, proto, header, folder = b"", source, read_header(source, "the message"), None
    else:
        (data, proto, header), folder = _read_file(source), source.parent
    steps, types = _steps(proto, header), _types(proto.graph)
    model = RankModel(header, proto, folder, steps, types, tuple(keep))
    linked = tuple(_link(model))
    values = {name for step in linked for name in (*step.reads, *step.writes)}
    values.update(output.value for output in header.outputs)
    for name in sorted(values - set(types)):
        raise BackendError(f"rank {header.rank}: value {name!r} has no type in the file")
    if isinstance(source, Path):  # last, as it reads all weights
        check_digest(source, data, proto)
    return replace(model, steps=linked)


def _read_file(path: Path) -> tuple[bytes, ModelProto, Header]:
    try:
        data = read_file(path, MOST_BYTES)
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
    for cut in cuts:
        if cut.pipelined and cut.comm.kind is CommKind.ALL_REDUCE:
            raise BackendError(f"rank {header.rank}: {cut} cannot end in a later phase")
    if header.batch is not None:
        _check_phases(steps, header.rank, header.batch.order)
    if len(cuts) != header.comms:
        raise BackendError(
            f"rank {header.rank}: the file holds {len(cuts)} communications, not {header.comms}"
        )
    return steps


def _check_phases(steps: Iterable[Segment | Cut], rank: int, order: RunOrder) -> None:
    """Refuse steps in phases that the rank does not run, or as often as it does not."""
    for step in steps:
        if isinstance(step, Segment):
            what, phases = f"node {step.nodes[0].name!r}", {step.phase}
        else:
            ends = (step.source, step.comm.phase), (step.target, step.comm.target_phase)
            what, phases = str(step), {phase for type_, phase in ends if type_ is not None}
        for phase in sorted(phases - order.own(rank)):
            raise BackendError(
                f"rank {rank}: {what} is in phase {phase}, which its schedule does not run there"
            )
        if len({order.phases.is_once(phase) for phase in step.span}) > 1:
            raise BackendError(
                f"rank {rank}: {what} is between phase {step.span[0]} and phase {step.span[1]}, of "
                "which one runs once a request and one for each micro-batch"
            )


def _split(nodes: Iterable[NodeProto], rank: int) -> Iterator[Segment | Cut]:
    run: list[NodeProto] = []
    run_phase, run_block = 0, None
    for node in nodes:
        communicates = node.domain == DOMAIN
        phase = run_phase if communicates else _number(node, PHASE_KEY, "phase", rank) or 0
        block = None if communicates else _number(node, BLOCK_KEY, "block", rank)
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


def _number(node: NodeProto, key: str, what: str, rank: int) -> int | None:
    text = next((entry.value for entry in node.metadata_props if entry.key == key), None)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BackendError(f"rank {rank}: node {node.name!r} has {what} {text!r}")
    return int(text)


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
        _check_bounds(comm.transfers, rank, source, target)
        uniform = bool(attrs["uniform"])
        return Cut(rank, comm, tuple(attrs["active"]), uniform, source, target)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, IRError) as error:
        where = f"rank {rank}: communication {node.name!r}"
        raise BackendError(f"{where}: {one_line(error)}") from error


def _check_bounds(
    transfers: Iterable[Transfer], rank: int, source: TensorType | None, target: TensorType | None
) -> None:
    for t in transfers:
        for end, region, type_ in ((t.source, t.read, source), (t.target, t.write, target)):
            if end == rank and not (type_ is not None and fits(region, type_.shape)):
                raise ValueError(f"region {region} is not within {type_ or 'a local tensor'}")


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
    made = dict.fromkeys(model.header.inputs, 0)  # the phase in which each value is made
    runs_first = _runs_first(model.header)
    for index, (step, reads) in enumerate(zip(model.steps, reads_of, strict=True)):
        missing = [name for name in reads if name not in made and name not in model.constants]
        if missing:
            raise BackendError(f"rank {model.rank}: {missing[0]!r} is read before it is made")
        phase, last = step.span
        late = [name for name in reads if made.get(name, 0) > phase]
        late += [name for name in reads if name in made and not runs_first(made[name], phase)]
        if late:
            raise BackendError(
                f"rank {model.rank}: {late[0]!r} is made in phase {made[late[0]]}, "
                f"but read in phase {phase}"
            )
        if isinstance(step, Cut):
            made.update(dict.fromkeys(step.writes, last))
            yield step
            continue
        writes = [name for node in step.nodes for name in node.output if name]
        made.update(dict.fromkeys(writes, last))
        yield replace(
            step,
            reads=tuple(name for name in reads if name in made),
            writes=tuple(name for name in writes if last_read.get(name, -1) > index),
            constants=tuple(name for name in reads if name not in made),
        )
    for name in delivered:
        if name not in made and name not in model.constants:
            raise BackendError(f"rank {model.rank}: no value {name!r}")


def _runs_first(header: Header) -> Callable[[int, int], bool]:
    """A function that tells whether a rank runs a phase before another one of the same pass."""
    if header.batch is None:
        return lambda one, other: one <= other
    phases, count = header.batch.order.phases, header.batch.parts.count
    index = {run: at for at, run in enumerate(header.batch.order.runs(header.rank))}

    def runs_first(one: int, other: int) -> bool:
        return all(
            index[one, 0 if phases.is_once(one) else m] <= index[other, m] for m in range(count)
        )

    return lambda one, other: one == other or phases.is_once(other) or runs_first(one, other)


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
