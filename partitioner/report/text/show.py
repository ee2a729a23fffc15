"""A plan as text: devices, what is sharded or placed where, what is sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from partitioner import units
from partitioner.cost_model.schedule import Task
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import numbers
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import DTYPE_BITS
from partitioner.report.planned import Planned
from partitioner.report.summary import certificate_line

Row = tuple[str, str, str, str, str]
_STEP_HEAD = ("devices", "step", "what", "seconds", "sent")
#: Kinds of which every rank both gives and takes.
_COLLECTIVE = (CommKind.ALL_REDUCE, CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER)

_LEGEND = """\
load     of one request: compute + communication; "at" is the node that the peak is reached at
devices  2: one device; tp=2 on 0,1: a mesh and its devices; 1 -> 2: from sender to receiver
what     n/tp: factor n is cut over axis tp; -> [tp, -]: of each dim of a result, the axes that cut
         it; partial(sum:tp): not yet summed over tp; whole: on one device; replicated: every
         device computes all of it; of a communication: the tensor that moves
seconds  of the busiest device, of one request
sent     bytes that cross between devices (a reduction counts its tensor once a device)"""


def show(result: Planned, *, everything: bool = False) -> str:
    """The whole plan as text.

    Args:
        result: The plan.
        everything: A line for each node, names in full, each operator's rule, and all tensors.
    """
    parts = [_head(result), _devices(result), _steps(result, everything=everything)]
    if everything:
        parts += [_tensors(result.graph)]
    parts.append([_LEGEND])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(result: Planned) -> list[str]:
    graph, plan, cluster = result.graph, result.plan, result.cluster
    lines = [f"{graph.name}: {len(graph.nodes)} nodes on {cluster.name}, {len(cluster)} devices"]
    if plan.certificate is not None:
        lines.append(certificate_line(plan.certificate, result.search_s))
    lines += [f"group {index}: {mesh}" for index, mesh in enumerate(plan.groups)]
    return lines


def _devices(result: Planned) -> list[str]:
    got = result.evaluation
    rows = [("device", "load", "compute", "communication", "peak memory", "weights", "at")]
    for device in range(len(result.cluster.devices)):
        peak = got.peak.get(device)
        rows.append(
            (
                str(device),
                units.seconds(got.load_s.get(device, 0.0)),
                units.seconds(got.compute_s.get(device, 0.0)),
                units.seconds(got.comm_s.get(device, 0.0)),
                units.size(peak.bytes if peak else 0),
                units.size(peak.resident_bytes if peak else 0),
                clean(peak.at) if peak else "-",
            )
        )
    return table(rows)


def _steps(result: Planned, *, everything: bool) -> list[str]:
    """The tasks in order: each, or runs of uncut nodes on one group and of equal slices joined."""
    tasks = [task for task in result.schedule.tasks if task.placed or task.comm]
    if everything:
        rows = [_row(task, str) for task in tasks]
        return table([(*_STEP_HEAD, "factors: operands -> results"), *_with_rules(rows, tasks)])
    return table([_STEP_HEAD, *_joined(tasks)])


def _with_rules(rows: Sequence[Row], tasks: Sequence[Task]) -> Iterator[tuple[str, ...]]:
    for row, task in zip(rows, tasks, strict=True):
        rule = task.placed.rule if task.placed is not None else None
        yield (*row, "" if rule is None else str(rule))


def _joined(tasks: Sequence[Task]) -> Iterator[Row]:
    for key, run in itertools.groupby(tasks, key=_run_key):
        entries = list(run)
        first, last = entries[0], entries[-1]
        busy = [max(task.devices.values(), default=0.0) for task in entries]
        if isinstance(key, tuple):
            devices = sorted(rank for task in entries for rank in task.devices)
            _, what, text, _, _ = _row(first, clean)
            yield numbers(devices), what, text, units.seconds(max(busy)), ""
        elif key is None or len(entries) < 3:
            yield from (_row(task, clean) for task in entries)
        else:
            assert first.placed is not None
            assert last.placed is not None
            names = f"{clean(first.placed.node.name)} ... {clean(last.placed.node.name)}"
            step = f"{names} ({len(entries)} nodes)"
            yield _where(first.placed), step, _uncut(first.placed), units.seconds(sum(busy)), ""


def _run_key(task: Task) -> object:
    """What makes tasks one line: a group for uncut nodes, a tensor for slices; None for others."""
    if task.comm is not None:
        slices = task.comm.kind is CommKind.SLICE
        return (task.comm.source, task.comm.why) if slices else None
    assert task.placed is not None
    return task.placed.mesh if not task.placed.layouts else None


def _row(task: Task, shown: Callable[[str], str]) -> Row:
    busy = units.seconds(max(task.devices.values(), default=0.0))
    if task.comm is not None:
        kind = task.comm.kind.spelled
        sent = units.size(comm_bytes(task)) if task.comm.kind is not CommKind.SLICE else ""
        return _direction(task.comm), f"  {kind}", shown(task.comm.source), busy, sent
    placed = task.placed
    assert placed is not None
    step = f"{shown(placed.node.name)} ({shown(placed.node.op)})"
    return _where(placed), step, _cuts(placed), busy, ""


def _where(placed: PlacedNode) -> str:
    return str(placed.mesh) if placed.mesh.axes else str(placed.mesh.devices[0])


def _direction(comm: Comm) -> str:
    """``"1 -> 2"``, or all devices of a collective."""
    if comm.kind in _COLLECTIVE or comm.kind is CommKind.SLICE:
        return numbers(comm.ranks)
    moves = [transfer for transfer in comm.transfers if transfer.source != transfer.target]
    sources = sorted({transfer.source for transfer in moves})
    targets = sorted({transfer.target for transfer in moves})
    both = sources == targets or not moves
    return numbers(comm.ranks) if both else f"{numbers(sources)} -> {numbers(targets)}"


def _tensors(graph: Graph) -> list[str]:
    """Every value of the model with its type: what pins of tensors may name."""
    outputs = set(graph.outputs)
    rows = [("tensor", "what", "type")]
    rows += [(name, "input", str(graph.types[name])) for name in graph.inputs]
    rows += [(name, "constant", str(graph.types[name])) for name in graph.constants]
    for node in graph.nodes:
        for name in node.writes:
            what = "output" if name in outputs else "result"
            rows.append((name, f"{what} of {node.name}", str(graph.types[name])))
    return table(rows)


def comm_bytes(task: Task) -> int:
    """Bytes that cross between devices (a reduction counts its tensor once a rank)."""
    comm = task.comm
    assert comm is not None
    if comm.kind is CommKind.ALL_REDUCE:
        return sum(size for _, _, size in task.writes)
    numel = sum(t.numel for t in comm.transfers if t.source != t.target)
    return (numel * DTYPE_BITS[comm.dtype] + 7) // 8


def _cuts(placed: PlacedNode) -> str:
    if not placed.layouts:
        return _uncut(placed)
    return f"{placed.cut_text} -> {', '.join(str(at.sharding) for _, at in placed.results())}"


def _uncut(placed: PlacedNode) -> str:
    if placed.rule is None:
        return "whole (no rule)"
    return "replicated" if placed.mesh.axes else "whole"


def clean(text: str) -> str:
    """Model text made safe for a terminal: no control characters, at most 60 characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 60 else shown[:40] + "..." + shown[-17:]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, the first row as a header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
