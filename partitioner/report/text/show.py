"""`partition show`: a plan as text, its devices, nodes, communications, and a measured run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

from partitioner.cost_model.schedule.readings import LETTERS, Pass, passes
from partitioner.cost_model.schedule.simulate import Event, simulate
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.foundations import units
from partitioner.ir.mesh import numbers
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import JOINING, CommKind
from partitioner.report.findings.bottleneck import turn_of
from partitioner.report.findings.notes import moved_notes
from partitioner.report.measured import Comparison
from partitioner.report.planned import Planned, lanes
from partitioner.report.stages import stage_text, stages, step_facts, step_sentence
from partitioner.report.steps import comm_bytes, pass_name
from partitioner.report.summary import block_lines, certificate_line, stretch_rows, trial_lines
from partitioner.report.text.tables import LEAST, columns, legend, table

Row = tuple[str, ...]
#: Groups of one device that have a line each.
MOST_ALONE = 16
#: Parts of experts whose loads are listed.
MOST_LOADS = 8
WIDTH = 120  #: Most columns of a step.
_WORST = 10  #: Measured tasks in the table of the worst errors.
_IDLE, _BUSY = ".", "="
_OTHER = f"{_BUSY} messages, {_IDLE} bubbles"
_STEP_HEAD: Row = ("devices", "step", "what", "seconds", "sent")
#: Kinds in which every rank both sends and receives, or keeps what it has.
_COLLECTIVE = (*JOINING, CommKind.SLICE)

_LEGEND = {
    "load": 'of one {turn}: compute + communication; "at" is the node that the peak is reached at',
    "devices": "2: one device; x=2 on 0,1: a mesh and its devices; 1 -> 2: from sender to receiver",
    "what": "n/x: factor n is cut over axis x; -> [x, -]: of each dim of a result, the axes that "
    "cut it; partial(sum:x): not yet summed over x; whole: on one device; replicated: every device "
    "computes all of it; of a communication: the tensor that moves",
    "seconds": "of the busiest device, of one {unit}",
    "sent": "bytes that cross between devices (a reduction counts its tensor once a device)",
}
_STAGED_LEGEND = {
    "pass": "F0, B0, W0: forward, backward, weight gradients of stage 0, once a micro-batch; "
    "setup, reduce: once a step; D: results, once a micro-batch; F0 -> F1: a message",
}
_STAGE_LEGEND = """\
forward, backward: busy seconds of a micro-batch; weights: with the optimizer's state;
in flight: most micro-batches at once, with what each keeps for the backward pass (with head-room);
sends: of a micro-batch, forward and backward"""


def show(result: Planned, *, everything: bool = False) -> str:
    """The whole plan as text; with `everything`, all nodes, names in full, rules and tensors."""
    staged = not result.schedule.order.is_whole
    parts = [_head(result)]
    if staged:
        parts += [_stages(result), step_text(result.schedule)]
    parts += [_devices(result), _steps(result, everything=everything)]
    if everything:
        graph = result.graph  # every value, which pins of tensors may name
        rows = [("tensor", "what", "type")]
        rows += [(name, "input", str(graph.types[name])) for name in graph.inputs]
        rows += [(name, "constant", str(graph.types[name])) for name in graph.constants]
        for node in graph.nodes:
            for name in node.writes:
                role = "output" if name in graph.outputs else "result"
                rows.append((name, f"{role} of {node.name}", str(graph.types[name])))
        parts.append(table(rows))
    turn = turn_of(result.graph, staged=staged)
    unit = "micro-batch" if staged else turn
    words = {word: text.format(turn=turn, unit=unit) for word, text in _LEGEND.items()}
    parts.append(legend({**_STAGED_LEGEND, **words} if staged else words))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(result: Planned) -> list[str]:
    graph, plan, cluster = result.graph, result.plan, result.cluster
    devices = units.count(len(cluster), "device")
    lines = [f"{graph.name}: {len(graph.nodes)} nodes on {cluster.name}, {devices}"]
    if plan.certificate is not None:
        lines.append(certificate_line(plan.certificate, result.search_s))
        lines += trial_lines(plan.certificate.trials)
    stretches = stretch_rows(graph, plan)
    lines += [f"in blocks: {line}" for line in block_lines(stretches, devices=len(cluster))]
    if sentence := step_sentence(step_facts(plan, result.evaluation)):
        lines.append(f"{sentence}: {units.seconds(result.evaluation.step_s)} a step")
    alone = [mesh.devices[0] for mesh in plan.groups if mesh.size() == 1]
    for index, mesh in enumerate(plan.groups):
        stage = stage_text(plan, plan.stages[index])
        if len(alone) <= MOST_ALONE or mesh.size() > 1:
            lines.append(f"group {index}: {mesh}" + (f" ({stage})" if stage else ""))
    if len(alone) > MOST_ALONE:
        lines.append(f"{len(alone)} groups of one device: {numbers(sorted(alone))}")
    return [*lines, *(f"note: {note}" for note in moved_notes(graph, plan))]


def _stages(result: Planned) -> list[str]:
    head = ("stage", "devices", "nodes", "forward", "backward", "weights", "in flight", "sends")
    rows = [head]
    for index, stage in enumerate(stages(result.schedule)):
        kept = units.size(stage["in_flight"] * stage["kept_bytes"])
        each = units.size(stage["kept_bytes"])
        ends = zip(stage["sends_to"], stage["sends_bytes"], strict=True)
        sends = (f"{units.size(nbytes)} to stage {to}" for to, nbytes in ends)
        rows.append(
            (
                str(index),
                numbers(stage["devices"]),
                str(stage["nodes"]),
                units.seconds(stage["forward_s"]),
                units.seconds(stage["backward_s"]),
                units.size(stage["weights_bytes"]),
                f"{stage['in_flight']} x {each} = {kept}",
                ", ".join(sends) or "-",
            )
        )
    return [*table(rows), _STAGE_LEGEND]


def step_text(schedule: Schedule) -> list[str]:
    """A line for the first device of each lane.

    ``F2----`` is the forward pass of micro-batch 2, ``==`` a message; dots are bubbles.
    """
    timeline = simulate(schedule)
    end_s = timeline.makespan_s
    if not end_s:
        return []
    boxes = passes(schedule, timeline)
    names = [f"devices {numbers(lane)}" for lane in schedule.order.lanes]
    wide = max(map(len, names))
    width = min(WIDTH, max((columns() or sys.maxsize) - wide - 2, LEAST))
    lines = [
        f"one step of {units.seconds(end_s)}: F forward, B backward, W weight gradients; {_OTHER}"
    ]
    for name, lane in zip(names, schedule.order.lanes, strict=True):
        device = lane[0]
        first = [box for box in boxes if box.device == device]
        sent = [e for e in timeline.events if e.device == device and e.kind == "comm"]
        cells = [_IDLE] * width
        parts: list[Pass | Event] = [*sent, *first]
        for part in parts:
            start, stop = (round(width * t / end_s) for t in (part.start_s, part.end_s))
            letters = stop - start
            if isinstance(part, Event):
                cells[start:stop] = _BUSY * letters
                continue
            short = LETTERS.get(part.part, str(part.part))
            label = part.label if len(part.label) <= letters else short
            cells[start:stop] = label.ljust(letters, "-")[:letters]
        lines.append(f"{name.ljust(wide)}  {''.join(cells)}")
    return lines


def _devices(result: Planned) -> list[str]:
    """A line a device or, of a large cluster, a line for equal devices."""
    figures = result.evaluation
    rows = [("device", "load", "compute", "communication", "peak memory", "weights", "at")]
    joined = lanes(result)
    for members, device, fullest in zip(
        joined.members, joined.busiest, joined.fullest, strict=True
    ):
        peak = figures.needed_peak(fullest)
        rows.append(
            (
                numbers(members),
                units.seconds(figures.load_s.get(device, 0.0)),
                units.seconds(figures.compute_s.get(device, 0.0)),
                units.seconds(figures.comm_s.get(device, 0.0)),
                units.size(figures.needed_bytes[fullest]),
                units.size(peak.resident_bytes),
                clean(peak.at or "-"),
            )
        )
    return table(rows)


def _steps(result: Planned, *, everything: bool) -> list[str]:
    """The tasks in order: each, or runs of uncut nodes on one group and of equal slices joined."""
    tasks = [task for task in result.schedule.tasks if task.placed or task.comm]
    order = result.schedule.order
    head: Row = _STEP_HEAD if order.is_whole else ("pass", *_STEP_HEAD)

    def in_pass(task: Task) -> Row:
        return tuple(filter(None, (pass_name(order, task),)))

    if not everything:
        runs = itertools.groupby(tasks, key=in_pass)
        return table([head, *((*name, *row) for name, run in runs for row in _joined(list(run)))])
    rows: list[Row] = [(*head, "factors: operands -> results")]
    for task in tasks:
        rule = task.placed.rule if task.placed is not None else None
        rows.append((*in_pass(task), *_row(task, str), "" if rule is None else str(rule)))
    return table(rows)


def _joined(tasks: Sequence[Task]) -> Iterator[Row]:
    def line(task: Task) -> object:
        """Equal for tasks of one line: group of uncut nodes, tensor of slices; None for others."""
        if task.comm is not None:
            slices = task.comm.kind is CommKind.SLICE
            return (task.comm.source, task.comm.why) if slices else None
        assert task.placed is not None
        return task.placed.mesh if not task.placed.layouts else None

    for key, run in itertools.groupby(tasks, key=line):
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


def _row(task: Task, shown: Callable[[str], str]) -> Row:
    busy = units.seconds(task.longest_s)
    if (comm := task.comm) is not None:
        kind = comm.kind.spelled
        sent = units.size(comm_bytes(task)) if comm.kind is not CommKind.SLICE else ""
        where = numbers(comm.ranks)
        if comm.kind not in _COLLECTIVE:
            moves = [move for move in comm.transfers if move.source != move.target]
            sources = sorted({move.source for move in moves})
            targets = sorted({move.target for move in moves})
            if sources != targets:
                where = f"{numbers(sources)} -> {numbers(targets)}"
        return where, f"  {kind}", shown(comm.source), busy, sent
    placed = task.placed
    assert placed is not None
    step = f"{shown(placed.node.name)} ({shown(placed.node.op)})"
    shardings = ", ".join(str(at.sharding) for _, at in placed.results())
    cuts = f"{placed.cut_text} -> {shardings}" if placed.layouts else _uncut(placed)
    if placed.loads:
        cuts += f"; loads {loads_text(placed)}"
    return _where(placed), step, cuts, busy, ""


def loads_text(placed: PlacedNode) -> str:
    """The share of the choices that each part of the experts gets: ``"40%, 35%, 25%"``."""
    shares = [units.share(load) for load in placed.loads]
    if len(shares) <= MOST_LOADS:
        return ", ".join(shares)
    return f"of {len(shares)} parts {units.share(max(placed.loads))} at most"


def _where(placed: PlacedNode) -> str:
    return str(placed.mesh) if placed.mesh.axes else str(placed.mesh.devices[0])


def _uncut(placed: PlacedNode) -> str:
    if placed.rule is None:
        return "whole (no rule)"
    return "replicated" if placed.mesh.axes else "whole"


def clean(text: str, most: int = 60) -> str:
    """Model text made safe for a terminal: no control characters, at most so many characters."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= most else shown[: most - 20] + "..." + shown[-17:]


def measured_text(comparison: Comparison[Planned]) -> str:
    """A plan's prediction beside a measured run of it."""
    ranks = [("rank", "compute", "communication", "waiting", "layouts", "peak memory")]
    for rank, totals in enumerate(comparison.totals):
        peak = "not measured" if totals["peak_bytes"] is None else units.size(totals["peak_bytes"])
        ranks.append(
            (
                str(rank),
                _pair(totals["predicted_compute_s"], totals["compute_s"]),
                _pair(totals["predicted_comm_s"], totals["comm_s"]),
                units.seconds(totals["waited_s"]),
                units.seconds(totals["other_s"]),
                f"{units.size(totals['predicted_peak_bytes'])} -> {peak}",
            )
        )
    worst = []
    for row in comparison.worst[:_WORST]:
        of = (
            clean(row.name),
            str(row.rank),
            units.seconds(row.predicted_s),
            units.seconds(row.measured.seconds),
            "-" if row.ratio is None else units.digits(row.ratio),
        )
        worst.append(of)
    measured = comparison.measured
    threads = f"{units.count(measured.threads, 'thread')} a rank"
    date = measured.measured_at.replace("T", " ").removesuffix("+00:00")
    step = _beside(comparison.predicted.latency_s, measured.step_s)
    head = [
        f"measured by {measured.backend}, {threads}, {measured.steps} steps, {date} UTC",
        f"  on         {clean(measured.device)}",
        f"  one step   {step} (with the recording: {units.seconds(measured.recorded_step_s)})",
    ]
    if measured.stream_s is not None:
        stream = _beside(comparison.result.evaluation.step_s, measured.stream_s)
        head.append(f"  a stream   {stream}")
    parts = [head, table(ranks)]
    if worst:
        parts.append(table([("worst errors", "rank", "predicted", "measured", "ratio"), *worst]))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _beside(predicted_s: float, measured_s: float) -> str:
    ratio = f": {units.digits(measured_s / predicted_s)} times that" if predicted_s else ""
    return f"predicted {units.seconds(predicted_s)}, measured {units.seconds(measured_s)}{ratio}"


def _pair(predicted_s: float, measured_s: float) -> str:
    return f"{units.seconds(predicted_s)} -> {units.seconds(measured_s)}"
