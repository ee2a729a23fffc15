"""The timelines of a report: of a request, a stream or a step, and of a measured run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from partitioner.cost_model.schedule import simulate as simulator
from partitioner.cost_model.schedule.readings import Pass, critical_path, pass_text, passes
from partitioner.cost_model.schedule.simulate import Event, simulate
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.foundations import units
from partitioner.ir.mesh import copies_on
from partitioner.ir.program import Comm
from partitioner.report.measured import Comparison
from partitioner.report.planned import Lanes, Planned
from partitioner.report.schema import MeasuredEvents, MeasuredRun, MeasuredTaskRow, Timeline

STREAM = 4  #: Requests in flight in the second timeline.
MAX_EVENTS = 40_000  #: Of the second timeline.

#: An event, whether it is on the critical path, and its pass.
_Row: TypeAlias = tuple[Event, bool, Pass | None]
_COMPUTE, _COMM, _WAITING, _OTHER = range(4)
#: Rank, kind, ref, name, start and seconds of an event of a measured run.
_Event: TypeAlias = tuple[int, int, int | None, str, float, float]


def timelines(
    tasks: Schedule, refs: Sequence[int], lanes: Lanes, *, turn: str = "request"
) -> list[Timeline]:
    """A request alone and, if stages of different requests run at once, several in flight.

    Of a plan in stages: one step, pass by pass and task by task. Events are of the lanes' busiest
    devices; `refs` (see `schema`) are of the tasks. `turn` is what the plan repeats, see `Head`:
    steps of a training follow one another.
    """
    staged = not tasks.order.is_whole
    columns = _Columns(refs, lanes, staged=staged)
    one = simulate(tasks)
    boxes = passes(tasks, one)
    if staged:
        label = f"one step of {one.requests} micro-batches, pass by pass"
        shown = [columns.timeline(one, label, _passes(one, boxes))]
        if len(one.events) <= MAX_EVENTS:
            shown.append(columns.timeline(one, "one step, task by task", _tasks(one, boxes)))
        return shown
    copies = len(copies_on(task.placed.mesh for task in tasks.tasks if task.placed is not None))
    of_each = " on each whole copy" if copies else ""
    shown = [columns.timeline(one, f"one {turn}{of_each}", _tasks(one))]
    in_turns = turn == "request" and any(task.target_hops for task in tasks.tasks)
    if in_turns and len(shown[0]["ref"]) * STREAM <= MAX_EVENTS:
        stream = simulate(tasks, STREAM)
        in_turn = f", in turn on {copies} whole copies" if copies else ""
        label = f"{STREAM} requests in flight{in_turn}"
        shown.append(columns.timeline(stream, label, _tasks(stream)))
    return shown


def run_timeline(tasks: Schedule, refs: Sequence[int], lanes: Lanes, turn: str) -> Timeline:
    """Time a request or step as ranks run it, with what brings results to every rank."""
    staged, one = not tasks.order.is_whole, simulate(tasks)
    label = f"one {turn}, with its results brought to every rank"
    columns = _Columns(refs, lanes, staged=staged)
    return columns.timeline(one, label, _tasks(one, passes(tasks, one) if staged else ()))


@dataclass(frozen=True)
class _Columns:
    """Writes timelines of a schedule's events on the lanes' busiest devices."""

    refs: Sequence[int]  #: Of the tasks, see `schema`.
    lanes: Lanes
    staged: bool  #: Whether events have passes.

    def timeline(self, of: simulator.Timeline, label: str, every: Iterable[_Row]) -> Timeline:
        """The columns of the events that are on a lane's busiest device."""
        lane = {device: index for index, device in enumerate(self.lanes.busiest)}
        rows = [row for row in every if row[0].device in lane]
        boxes = [box for _, _, box in rows]
        return Timeline(
            label=label,
            turn=of.turn,
            requests=of.requests,
            end_s=of.makespan_s,
            device=[lane[event.device] for event, _, _ in rows],
            kind=[int(event.kind == "comm") for event, _, _ in rows],
            ref=[self.refs[event.task] for event, _, _ in rows],
            request=[event.request for event, _, _ in rows],
            start_s=[units.short(event.start_s) for event, _, _ in rows],
            duration_s=[units.short(event.end_s - event.start_s) for event, _, _ in rows],
            critical=[index for index, row in enumerate(rows) if row[1]],
            passes=[box.label if box else "" for box in boxes] if self.staged else None,
            about=[pass_text(box) if box else "" for box in boxes] if self.staged else None,
        )


def _tasks(timeline: simulator.Timeline, boxes: Sequence[Pass] = ()) -> list[_Row]:
    path = set(critical_path(timeline))
    inside = {index: box for box in boxes for index in box.events}
    return [(event, at in path, inside.get(at)) for at, event in enumerate(timeline.events)]


def _passes(timeline: simulator.Timeline, boxes: Sequence[Pass]) -> list[_Row]:
    """The passes in place of nodes, each with the task of its first one, and all communications."""
    rows: list[_Row] = []
    path = set(critical_path(timeline))
    for box in boxes:
        events = [timeline.events[index] for index in box.events]
        first = next((event for event in events if event.kind == "compute"), events[0])
        span = replace(first, kind="compute", start_s=box.start_s, end_s=box.end_s)
        whole = replace(span, name=box.label, request=box.micro_batch)
        rows.append((whole, not path.isdisjoint(box.events), box))
    for index, event in enumerate(timeline.events):
        if event.kind == "comm" and event.end_s > event.start_s:
            rows.append((event, index in path, None))
    return sorted(rows, key=lambda row: (row[0].start_s, row[0].device))


def measured_run(comparison: Comparison[Planned], comms: Mapping[Comm, int]) -> MeasuredRun:
    """The data of a measured run; `comms` has the row of each communication without its `seq`."""
    measured, result = comparison.measured, comparison.result
    by_comm = {comm: -1 - row for comm, row in comms.items()}
    by_node = result.graph.order
    by_task: list[int | None] = []
    by_seq: dict[int, int | None] = {}
    for run in result.run_schedule.tasks:
        ref = by_node.get(run.name)
        if run.comm is not None:
            ref = by_seq[run.comm.seq] = by_comm.get(run.comm.renamed(seq=0))
        by_task.append(ref)

    def first(nodes: Sequence[str], comms: Sequence[int]) -> int | None:
        known = (*map(by_node.get, nodes), *map(by_seq.get, comms))
        return next((ref for ref in known if ref is not None), None)

    names = {(row.rank, row.nodes, row.comms): row.name for row in comparison.rows}
    seen: list[_Event] = []
    for rank, of_rank in enumerate(measured.ranks):
        for task in of_rank.tasks:
            name = names.get((rank, task.nodes, task.comms), task.label)
            ref, start_s = first(task.nodes, task.comms), task.start_s + task.waited_s
            kind = _COMPUTE if task.nodes else _COMM if task.comms else _OTHER
            if task.waited_s:
                seen.append((rank, _WAITING, ref, name, task.start_s, task.waited_s))
            seen.append((rank, kind, ref, name, start_s, task.seconds))
    timeline = comparison.predicted
    planned = [
        (e.device, int(e.kind == "comm"), by_task[e.task], e.name, e.start_s, e.end_s - e.start_s)
        for e in timeline.events
    ]
    return MeasuredRun(
        backend=measured.backend,
        threads=measured.threads,
        steps=measured.steps,
        measured_at=measured.measured_at,
        predicted_step_s=timeline.latency_s,
        step_s=measured.step_s,
        recorded_step_s=measured.recorded_step_s,
        predicted_stream_s=None if measured.stream_s is None else result.evaluation.step_s,
        stream_s=measured.stream_s,
        end_s=max([timeline.latency_s, *(start + seconds for *_, start, seconds in seen)]),
        predicted=_columns(planned),
        measured=_columns(seen),
        ranks=list(comparison.totals),
        tasks=[
            MeasuredTaskRow(
                rank=row.rank,
                name=row.name,
                ref=first(row.nodes, row.comms),
                predicted_s=units.short(row.predicted_s),
                measured_s=units.short(row.measured.seconds),
                waited_s=units.short(row.measured.waited_s),
                spread=round(row.measured.spread, 4),
            )
            for row in comparison.worst
        ],
    )


def _columns(events: Iterable[_Event]) -> MeasuredEvents:
    columns = list(zip(*events, strict=True)) or [()] * 6
    rank, kind, ref, name, start_s, duration_s = map(list, columns)
    return MeasuredEvents(
        rank=rank,
        kind=kind,
        ref=ref,
        name=name,
        start_s=[units.short(value) for value in start_s],
        duration_s=[units.short(value) for value in duration_s],
    )
