"""A rank file -> steps: cut at its communications, everything checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.header import Header, fits
from partitioner.backends.onnx.agreement import check_agreement, check_delivery
from partitioner.backends.onnx.header import DOMAIN, parse_transfers, read_header
from partitioner.backends.onnx.steps import Cut, RankModel, Segment
from partitioner.backends.regions import region_shape
from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Transfer
from partitioner.ir.onnx_types import from_onnx_dtype
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import TensorType

_PHASE_KEY = f"{DOMAIN}.phase"


def read_directory(directory: Path) -> tuple[Header, ...]:
    """The headers of all rank files of a folder, in order of rank; no weights are read.

    Raises:
        BackendError: A file is missing or wrong, they are of different plans, or they disagree
            about a communication.
    """
    first, steps = _read_steps(directory / "rank0.onnx")
    headers, files = [first], [steps]
    for rank in range(1, first.ranks):
        header, steps = _read_steps(directory / f"rank{rank}.onnx")
        if _common(header) != _common(first):
            raise BackendError(
                f"{directory}: rank{rank}.onnx is not of the plan that rank0.onnx is of"
            )
        headers.append(header)
        files.append(steps)
    try:
        check_agreement(files)
        check_delivery(headers)
    except BackendError as error:
        raise BackendError(f"{directory}: {error}") from None
    return tuple(headers)


def _read_steps(path: Path) -> tuple[Header, tuple[Segment | Cut, ...]]:
    proto, header = _read_file(path)
    steps = tuple(_steps(proto, header))
    _check_order(steps, header)
    _check_parts(header, dict(_types(proto.graph)))
    return header, steps


def _common(header: Header) -> tuple[object, ...]:
    """What all files of a folder have alike."""
    return header.ranks, header.programs, header.origin, header.whole_inputs, header.whole_outputs


def _check_parts(header: Header, types: Mapping[str, TensorType]) -> None:
    """What a rank is fed and delivers is of the size that its values have."""
    inputs, outputs = header.whole_inputs, header.whole_outputs
    fed = [(name, inputs[part.whole], part.region) for name, part in header.inputs.items()]
    got = [(out.value, outputs[out.whole], out.region) for out in header.outputs]
    for name, whole, region in fed + got:
        part = whole if region is None else TensorType.of(whole.dtype, region_shape(region))
        if types.get(name) != part:
            raise BackendError(
                f"rank {header.rank}: {name!r} is {types.get(name)}, but its part is {part}"
            )


def load_rank(source: Path | ModelProto, keep: Collection[str] = ()) -> RankModel:
    """One rank file.

    Args:
        source: The file, or its message (all constants inside).
        keep: Local values to have after a run, beside the outputs.

    Raises:
        BackendError: It is no rank file, or its communications are incomplete or out of order.
    """
    if isinstance(source, ModelProto):
        header = read_header(source, "the message")
        return _cut(source, header, None, tuple(keep))
    proto, header = _read_file(source)
    return _cut(proto, header, source.parent, tuple(keep))


def _read_file(path: Path) -> tuple[ModelProto, Header]:
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:
        raise BackendError(f"{path}: {one_line(error)}") from error
    header = read_header(proto, str(path))
    if path.name != f"rank{header.rank}.onnx":
        raise BackendError(f"{path} says that it is of rank {header.rank}")
    return proto, header


def _cut(
    proto: ModelProto, header: Header, folder: Path | None, keep: tuple[str, ...]
) -> RankModel:
    steps = tuple(_steps(proto, header))
    _check_order(steps, header)
    types = dict(_types(proto.graph))
    model = RankModel(header, proto, folder, steps, types, keep)
    linked = tuple(_link(model))
    needed = {name for step in linked for name in _names(step)} - set(model.constants)
    needed.update(output.value for output in header.outputs)
    for name in sorted(needed - set(types) - set(model.constants)):
        raise BackendError(f"rank {header.rank}: value {name!r} has no type in the file")
    return replace(model, steps=linked)


def _steps(proto: ModelProto, header: Header) -> Iterator[Segment | Cut]:
    """Segments (not linked yet) and cuts in file order."""
    run: list[NodeProto] = []
    phase = 0
    for node in proto.graph.node:
        if node.domain == DOMAIN:
            if run:
                yield Segment(phase, tuple(run), (), (), ())
            yield _parse_cut(node, header)
            run = []
            continue
        own = _phase(node, header)
        if run and own != phase:
            yield Segment(phase, tuple(run), (), (), ())
            run = []
        phase = own
        run.append(node)
    if run:
        yield Segment(phase, tuple(run), (), (), ())


def _phase(node: NodeProto, header: Header) -> int:
    text = next((entry.value for entry in node.metadata_props if entry.key == _PHASE_KEY), "0")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BackendError(f"rank {header.rank}: node {node.name!r} has phase {text!r}")
    return int(text)


def _parse_cut(node: NodeProto, header: Header) -> Cut:
    try:
        found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        dtype = from_onnx_dtype(found["dtype"])
        comm = Comm(
            seq=found["seq"],
            kind=CommKind(found["kind"].decode()),
            ranks=tuple(found["ranks"]),
            source=node.input[0] if node.input else "",
            target=node.output[0] if "target_shape" in found else "",
            dtype=dtype,
            transfers=parse_transfers(found["transfers"].decode()),
            reduce=found["reduce"].decode(),
            phase=found["phase"],
            target_phase=found["target_phase"],
            why=found["why"].decode(),
        )
        types = [_local_type(found.get(key), dtype) for key in ("source_shape", "target_shape")]
        uniform = bool(found["uniform"])
        _check_bounds(comm.transfers, header.rank, types[0], types[1])
        return Cut(header.rank, comm, tuple(found["active"]), uniform, types[0], types[1])
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, IRError) as error:
        raise BackendError(
            f"rank {header.rank}: communication {node.name!r}: {one_line(error)}"
        ) from error


def _check_bounds(
    transfers: Iterable[Transfer], rank: int, source: TensorType | None, target: TensorType | None
) -> None:
    for transfer in transfers:
        for end, region, kind in (
            (transfer.source, transfer.read, source),
            (transfer.target, transfer.write, target),
        ):
            if end == rank and not (kind is not None and fits(region, kind.shape)):
                raise ValueError(f"region {region} is not within {kind or 'a local tensor'}")


def _local_type(shape: onnx.TensorProto | None, dtype: str) -> TensorType | None:
    if shape is None:
        return None
    return TensorType.of(dtype, onnx.numpy_helper.to_array(shape).tolist())


def _check_order(steps: tuple[Segment | Cut, ...], header: Header) -> None:
    """Communications are all there and in the one global order (tools re-sort and drop nodes)."""
    found = [step.comm.seq for step in steps if isinstance(step, Cut)]
    if any(a >= b for a, b in pairwise(found)):
        raise BackendError(f"rank {header.rank}: communications are out of order: {found}")
    for step in steps:
        if isinstance(step, Cut) and step.pipelined and step.comm.kind is CommKind.ALL_REDUCE:
            raise BackendError(f"rank {header.rank}: {step} cannot end in a later phase")
    if len(found) != header.comms:
        raise BackendError(
            f"rank {header.rank}: the file holds {len(found)} communications, not {header.comms}"
        )


def _types(graph: GraphProto) -> Iterator[tuple[str, TensorType]]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name, _value_type(value)
    for tensor in graph.initializer:
        yield tensor.name, TensorType.of(from_onnx_dtype(tensor.data_type), tensor.dims)


def _value_type(value: ValueInfoProto) -> TensorType:
    kind = value.type.tensor_type
    return TensorType.of(from_onnx_dtype(kind.elem_type), (dim.dim_value for dim in kind.shape.dim))


def _link(model: RankModel) -> Iterator[Segment | Cut]:
    """Give each segment its inputs, outputs and constants."""
    made = dict.fromkeys(model.header.inputs, 0)  # the phase in which each value is made
    wanted_after = _wanted_after(model)
    for step, wanted in zip(model.steps, wanted_after, strict=True):
        reads = _reads(step)
        missing = [name for name in reads if name not in made and name not in model.constants]
        if missing:
            raise BackendError(f"rank {model.rank}: {missing[0]!r} is read before it is made")
        writes = _writes(step)
        phase, last = step.span
        late = [name for name in reads if made.get(name, 0) > phase]
        if late:
            raise BackendError(
                f"rank {model.rank}: {late[0]!r} is made in phase {made[late[0]]}, "
                f"but read in phase {phase}"
            )
        made.update(dict.fromkeys(writes, last))
        if isinstance(step, Cut):
            yield step
            continue
        yield replace(
            step,
            inputs=tuple(name for name in reads if name in made),
            outputs=tuple(name for name in writes if name in wanted),
            constants=tuple(name for name in reads if name not in made),
        )
    for name in (*(output.value for output in model.header.outputs), *model.keep):
        if name not in made and name not in model.constants:
            raise BackendError(f"rank {model.rank}: no value {name!r}")


def _wanted_after(model: RankModel) -> list[frozenset[str]]:
    """Per step, values that later steps read or that are delivered."""
    wanted = frozenset((*(output.value for output in model.header.outputs), *model.keep))
    found = []
    for step in reversed(model.steps):
        found.append(wanted)
        wanted = wanted.union(_reads(step))
    return found[::-1]


def _names(step: Segment | Cut) -> tuple[str, ...]:
    if isinstance(step, Cut):
        return tuple(name for name in (step.comm.source, step.comm.target) if name)
    return (*step.inputs, *step.outputs)


def _reads(step: Segment | Cut) -> tuple[str, ...]:
    if isinstance(step, Cut):
        return (step.comm.source,) if step.comm.source else ()
    return tuple(dict.fromkeys(_free(step.nodes, set())))


def _writes(step: Segment | Cut) -> tuple[str, ...]:
    if isinstance(step, Cut):
        return (step.comm.target,) if step.comm.target else ()
    return tuple(name for node in step.nodes for name in node.output if name)


def _free(nodes: Iterable[NodeProto], known: set[str]) -> Iterator[str]:
    """Values that nodes, or the bodies inside them, read and do not make."""
    known = set(known)
    for node in nodes:
        for name in node.input:
            if name and name not in known:
                yield name
        for body in _bodies(node):
            own = {value.name for value in (*body.input, *body.initializer)}
            yield from _free(body.node, known | own)
            made = own.union(name for inner in body.node for name in inner.output)
            yield from (v.name for v in body.output if v.name not in made | known)
        known.update(name for name in node.output if name)


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def constants_outside(model: RankModel) -> Mapping[str, TensorType]:
    """Constants that are sent, delivered or asked for: the runtime itself reads them."""
    names = [name for step in model.steps if isinstance(step, Cut) for name in _names(step)]
    names += [output.value for output in model.header.outputs] + list(model.keep)
    return {name: model.types[name] for name in names if name in model.constants}
