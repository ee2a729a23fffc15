"""A plan as text: devices, what is sharded or placed where, what is sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from partitioner import units
from partitioner.cost_model.schedule import Task
from partitioner.ir.graph import Node
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import DTYPE_BITS
from partitioner.result import Compiled
from partitioner.summary import certificate_line


def show(result: Compiled) -> str:
    """The whole plan as text."""
    parts = [_head(result), _devices(result), _steps(result)]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(result: Compiled) -> list[str]:
    graph, plan, cluster = result.graph, result.plan, result.cluster
    lines = [
        f"{graph.name}: {len(graph.nodes)} nodes on {cluster.name}, {len(cluster.devices)} devices"
    ]
    if plan.certificate is not None:
        lines.append(certificate_line(plan.certificate))
    lines += [f"group {index}: {mesh}" for index, mesh in enumerate(plan.groups)]
    return lines


def _devices(result: Compiled) -> list[str]:
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


def _steps(result: Compiled) -> list[str]:
    head = ("where", "step", "cut / parts", "seconds", "sent")
    return table([head, *_joined(result.schedule.tasks)])


def _joined(tasks: Sequence[Task]) -> Iterator[tuple[str, str, str, str, str]]:
    """Tasks in order; runs of uncut nodes on one group become one line."""
    for key, run in itertools.groupby(tasks, key=_run_key):
        entries = list(run)
        if key is None or len(entries) < 3:
            yield from (_row(task) for task in entries if task.placed or task.comm)
            continue
        first, last = entries[0].placed, entries[-1].placed
        assert first is not None
        assert last is not None
        busy = sum(max(task.devices.values(), default=0.0) for task in entries)
        what = f"{clean(first.node.name)} ... {clean(last.node.name)} ({len(entries)} nodes)"
        yield str(first.mesh), what, "whole", units.seconds(busy), ""


def _run_key(task: Task) -> object:
    """Groups uncut nodes of one device group; None for anything that gets a line of its own."""
    return task.placed.mesh if task.placed is not None and not task.placed.layouts else None


def _row(task: Task) -> tuple[str, str, str, str, str]:
    busy = units.seconds(max(task.devices.values(), default=0.0))
    if task.comm is not None:
        return _comm_row(task.comm, task, busy)
    placed = task.placed
    assert placed is not None
    return str(placed.mesh), _node(placed.node), _cuts(placed), busy, ""


def _comm_row(comm: Comm, task: Task, busy: str) -> tuple[str, str, str, str, str]:
    ranks = ",".join(map(str, comm.ranks))
    return (
        f"ranks {ranks}",
        f"  {comm.kind}",
        clean(comm.source),
        busy,
        units.size(comm_bytes(task)),
    )


def comm_bytes(task: Task) -> int:
    """Bytes that cross between devices (a reduction counts its tensor once a rank)."""
    comm = task.comm
    assert comm is not None
    if comm.kind is CommKind.ALL_REDUCE:
        return sum(size for _, _, size in task.writes)
    numel = sum(t.numel for t in comm.transfers if t.source != t.target)
    return (numel * DTYPE_BITS[comm.dtype] + 7) // 8


def _node(node: Node) -> str:
    return f"{clean(node.name)} ({clean(node.op)})"


def _cuts(placed: PlacedNode) -> str:
    if placed.rule is None:
        return "whole (no rule)"
    cuts = " ".join(f"{name}/{layout}" for name, layout in placed.layouts.items()) or "whole"
    results = ", ".join(str(at.sharding) for _, at in placed.results())
    return f"{cuts} -> {results}"


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
