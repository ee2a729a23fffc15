"""Checks, before a process starts, that the rank files of a folder mean the same communications.

Each file holds its own side only. Where two sides differ the ranks would wait for each other, or
move the wrong parts, so a folder whose files disagree is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from partitioner.backends.errors import BackendError
from partitioner.backends.header import Header
from partitioner.backends.onnx.files.steps import Cut, Segment
from partitioner.ir.exchange import Transfer, region_numel
from partitioner.ir.phases import Part
from partitioner.ir.pipeline import PipelineScheduleError, check

Steps = Sequence[Segment | Cut]


def check_agreement(files: Sequence[Steps]) -> None:
    """Compare the communications in the steps of each rank's file, in order of rank.

    Raises:
        BackendError: A communication is missing in the file of a rank that takes part, two files
            differ in one, or a step's phase is none that the files can reach.
    """
    _check_phases(files)
    comms: dict[int, dict[int, Cut]] = {}
    for rank, steps in enumerate(files):
        for step in steps:
            if isinstance(step, Cut):
                comms.setdefault(step.comm.seq, {})[rank] = step
    for seq, sides in sorted(comms.items()):
        _check_sides(seq, sides)


def check_delivery(headers: Sequence[Header]) -> None:
    """Refuse files that do not deliver every output once.

    Raises:
        BackendError: The ranks' parts have more or fewer elements than the output.
    """
    for name in headers[0].whole_outputs:
        type_ = headers[0].run_type(name)
        parts = [out.region for header in headers for out in header.outputs if out.whole == name]
        delivered = sum(type_.numel if part is None else region_numel(part) for part in parts)
        if delivered != type_.numel:
            raise BackendError(
                f"the ranks deliver {delivered} elements of output {name!r}, which is {type_}; "
                "partition the model again"
            )


def check_order(header: Header, files: Sequence[Steps]) -> None:
    """Refuse an order of micro-batches in which ranks would wait for each other for ever.

    Raises:
        BackendError: It is one, for the communications in these files.
    """
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


def _check_phases(files: Sequence[Steps]) -> None:
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
        for field, value in _shared(other).items():
            if value != _shared(cut)[field]:
                raise BackendError(
                    f"rank{rank}.onnx and rank{first}.onnx differ in communication {seq}: {field} "
                    f"{value} and {_shared(cut)[field]}; partition the model again"
                )
    if sorted(sides) != sorted(cut.active):
        raise BackendError(
            f"communication {seq} is of ranks {sorted(cut.active)}, but is in the files of "
            f"{sorted(sides)}; partition the model again"
        )
    _check_transfers(seq, {rank: side.comm.transfers for rank, side in sides.items()})


def _shared(cut: Cut) -> dict[str, Any]:
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
