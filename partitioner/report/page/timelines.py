"""The timelines of a report: of one request, of a stream whose stages overlap, or of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from partitioner.cost_model.schedule import simulate as simulator
from partitioner.cost_model.schedule.readings import Pass, critical_path, pass_text, passes
from partitioner.cost_model.schedule.simulate import Event, simulate
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.foundations import units
from partitioner.report.lanes import Lanes
from partitioner.report.schema import Timeline

STREAM = 4  #: Requests in flight in the second timeline.
MAX_EVENTS = 40_000  #: Of the second timeline.


def timelines(tasks: Schedule, refs: Sequence[int], lanes: Lanes) -> list[Timeline]:
    """A request alone and, if stages of different requests run at once, several in flight.

    Of a plan in stages: one step, pass by pass and task by task. Events are of the lanes' busiest
    devices; `refs` (see `schema`) are of the tasks.
    """
    if tasks.order is not None:
        return _step(tasks, refs, lanes)
    one = _timeline(simulate(tasks), refs, "one request", lanes)
    staged = any(task.target_phase for task in tasks.tasks)
    if staged and len(one["ref"]) * STREAM <= MAX_EVENTS:
        return [
            one,
            _timeline(simulate(tasks, STREAM), refs, f"{STREAM} requests in flight", lanes),
        ]
    return [one]


class _Row(NamedTuple):
    event: Event
    ref: int
    critical: bool
    name: str = ""  #: Label of its pass, of a step in stages.
    about: str = ""


def _timeline(
    timeline: simulator.Timeline,
    refs: Sequence[int],
    label: str,
    lanes: Lanes,
    boxes: Sequence[Pass] | None = None,
) -> Timeline:
    path = set(critical_path(timeline))
    inside = {index: box for box in boxes or () for index in box.events}
    rows = []
    for index, event in enumerate(timeline.events):
        box = inside.get(index)
        texts = ("", "") if box is None else (box.label, pass_text(box))
        rows.append(_Row(event, refs[event.task], index in path, *texts))
    return _columns(timeline, label, rows, lanes, passes=boxes is not None)


def _step(tasks: Schedule, refs: Sequence[int], lanes: Lanes) -> list[Timeline]:
    timeline = simulate(tasks)
    boxes = passes(tasks, timeline)
    whole = _passes(timeline, boxes, refs, lanes)
    if len(timeline.events) > MAX_EVENTS:
        return [whole]
    return [whole, _timeline(timeline, refs, "one step, task by task", lanes, boxes)]


def _passes(
    timeline: simulator.Timeline, boxes: Sequence[Pass], refs: Sequence[int], lanes: Lanes
) -> Timeline:
    """A timeline with the passes in place of nodes, and all communications."""
    path = set(critical_path(timeline))
    rows = []
    for box in boxes:
        first = next((i for i in box.events if timeline.events[i].kind == "compute"), box.events[0])
        task = timeline.events[first].task
        span = box.start_s, box.end_s
        event = Event(box.device, "compute", box.label, *span, task, box.micro_batch)
        critical = bool(path & {*box.events})
        rows.append(_Row(event, refs[task], critical, box.label, pass_text(box)))
    for index, event in enumerate(timeline.events):
        if event.kind == "comm" and event.end_s > event.start_s:
            rows.append(_Row(event, refs[event.task], index in path))
    rows.sort(key=lambda row: (row.event.start_s, row.event.device))
    label = f"one step of {timeline.requests} micro-batches, pass by pass"
    return _columns(timeline, label, rows, lanes, passes=True)


def _columns(
    timeline: simulator.Timeline,
    label: str,
    events: Sequence[_Row],
    lanes: Lanes,
    *,
    passes: bool = False,
) -> Timeline:
    lane = {device: index for index, device in enumerate(lanes.busiest)}
    rows = [row for row in events if row.event.device in lane]
    return Timeline(
        label=label,
        turn=timeline.turn,
        requests=timeline.requests,
        end_s=timeline.makespan_s,
        device=[lane[row.event.device] for row in rows],
        kind=[int(row.event.kind == "comm") for row in rows],
        ref=[row.ref for row in rows],
        request=[row.event.request for row in rows],
        start_s=[units.short(row.event.start_s) for row in rows],
        duration_s=[units.short(row.event.end_s - row.event.start_s) for row in rows],
        critical=[index for index, row in enumerate(rows) if row.critical],
        passes=[row.name for row in rows] if passes else None,
        about=[row.about for row in rows] if passes else None,
    )
