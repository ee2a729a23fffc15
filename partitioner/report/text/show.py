"""`partition show`: a plan as text, its devices, nodes and communications."""

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
from partitioner.report.summary import certificate_line, trial_lines

Row = tuple[str, str, str, str, str]
_STEP_HEAD = ("devices", "step", "what", "seconds", "sent")
#: Kinds in which every rank both sends and receives.
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
        everything: A line for each node, names in full, each operator's rule, and all tensors.
    """
    parts = [_head(result), _devices(result), _steps(result, everything=everything)]
    if everything:
        parts.append(_tensors(result.graph))
    parts.append([_LEGEND])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(result: Planned) -> list[str]:
    graph, plan, cluster = result.graph, result.plan, result.cluster
    lines = [f"{graph.name}: {len(graph.nodes)} nodes on {cluster.name}, {len(cluster)} devices"]
    if plan.certificate is not None:
        lines.append(certificate_line(plan.certificate, result.search_s))
        lines += trial_lines(plan.certificate.trials)
    lines += [f"group {index}: {mesh}" for index, mesh in enumerate(plan.groups)]
    return lines


def _devices(result: Planned) -> list[str]:
    figures = result.evaluation
    rows = [("device", "load", "compute", "communication", "peak memory", "weights", "at")]
    for device in range(len(result.cluster.devices)):
        peak = figures.peak.get(device)
        rows.append(
            (
                str(device),
                units.seconds(figures.load_s.get(device, 0.0)),
                units.seconds(figures.compute_s.get(device, 0.0)),
                units.seconds(figures.comm_s.get(device, 0.0)),
                units.size(peak.bytes if peak else 0),
                units.size(peak.resident_bytes if peak else 0),
                clean(peak.at) if peak else "-",
            )
        )
    return table(rows)


def _steps(result: Planned, *, everything: bool) -> list[str]:
    """The tasks in order: each, or runs of uncut nodes on one group and of equal slices joined."""
    tasks = [task for task in result.schedule.tasks if task.placed or task.comm]
    if not everything:
        return table([_STEP_HEAD, *_joined(tasks)])
    rows: list[tuple[str, ...]] = [(*_STEP_HEAD, "factors: operands -> results")]
    for task in tasks:
        rule = task.placed.rule if task.placed is not None else None
        rows.append((*_row(task, str), "" if rule is None else str(rule)))
    return table(rows)


def _joined(tasks: Sequence[Task]) -> Iterator[Row]:
    for key, run in itertools.groupby(tasks, key=_run_key):
        entries = list(run)
        first, last = entries[0], entries[-1]
        busy = [task.longest_s for task in entries]
        if isinstance(key, tuple):
            devices = sorted(rank for task in entries for rank in task.devices)
            _, step, text, _, _ = _row(first, clean)
            yield numbers(devices), step, text, units.seconds(max(busy)), ""
        elif key is None or len(entries) < 3:
            yield from (_row(task, clean) for task in entries)
        else:
            assert first.placed is not None
            assert last.placed is not None
            names = f"{clean(first.placed.node.name)} ... {clean(last.placed.node.name)}"
            step = f"{names} ({len(entries)} nodes)"
            yield _where(first.placed), step, _uncut(first.placed), units.seconds(sum(busy)), ""


def _run_key(task: Task) -> object:
    """Equal for tasks of one line: group of uncut nodes, tensor of slices; None for others."""
    if task.comm is not None:
        slices = task.comm.kind is CommKind.SLICE
        return (task.comm.source, task.comm.why) if slices else None
    assert task.placed is not None
    return task.placed.mesh if not task.placed.layouts else None


def _row(task: Task, shown: Callable[[str], str]) -> Row:
    busy = units.seconds(task.longest_s)
    if task.comm is not None:
        kind = task.comm.kind.spelled
        sent = units.size(comm_bytes(task)) if task.comm.kind is not CommKind.SLICE else ""
        return _direction(task.comm), f"  {kind}", shown(task.comm.source), busy, sent
    placed = task.placed
    assert placed is not None
    step = f"{shown(placed.node.name)} ({shown(placed.node.op)})"
    shardings = ", ".join(str(at.sharding) for _, at in placed.results())
    cuts = f"{placed.cut_text} -> {shardings}" if placed.layouts else _uncut(placed)
    return _where(placed), step, cuts, busy, ""


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
    """Every value of the model, which pins of tensors may name, with its type."""
    outputs = set(graph.outputs)
    rows = [("tensor", "what", "type")]
    rows += [(name, "input", str(graph.types[name])) for name in graph.inputs]
    rows += [(name, "constant", str(graph.types[name])) for name in graph.constants]
    for node in graph.nodes:
        for name in node.writes:
            role = "output" if name in outputs else "result"
            rows.append((name, f"{role} of {node.name}", str(graph.types[name])))
    return table(rows)


def comm_bytes(task: Task) -> int:
    """Bytes that cross between devices (a reduction counts its tensor once a rank)."""
    comm = task.comm
    assert comm is not None
    if comm.kind is CommKind.ALL_REDUCE:
        return sum(size for _, _, size in task.writes)
    numel = sum(t.numel for t in comm.transfers if t.source != t.target)
    return (numel * DTYPE_BITS[comm.dtype] + 7) // 8


def _uncut(placed: PlacedNode) -> str:
    if placed.rule is None:
        return "whole (no rule)"
    return "replicated" if placed.mesh.axes else "whole"


def clean(text: str) -> str:
    """Model text made safe for a terminal: no control characters, at most 60 characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 60 else shown[:40] + "..." + shown[-17:]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of left-aligned columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
