"""The timelines of a report: of one request, of a stream whose stages overlap, or of one step."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.cost_model import simulate as simulator
from partitioner.cost_model.critical_path import critical_path
from partitioner.cost_model.passes import Pass, pass_text, passes
from partitioner.cost_model.schedule import Schedule
from partitioner.cost_model.simulate import Event, simulate
from partitioner.report.page.schema import Timeline

STREAM = 4  #: Requests in flight in the second timeline.
MAX_EVENTS = 40_000  #: Of the second timeline.


def timelines(tasks: Schedule, refs: Sequence[int]) -> list[Timeline]:
    """One request; and several in flight, if stages of different requests run at once.

    Of a plan in stages: one step, pass by pass and task by task.

    Args:
        refs: Ref (see `schema`) of each task.
    """
    if tasks.order is not None:
        return _step(tasks, refs)
    one = _timeline(simulate(tasks), refs, "one request")
    staged = any(task.target_phase for task in tasks.tasks)
    if staged and len(one["ref"]) * STREAM <= MAX_EVENTS:
        return [one, _timeline(simulate(tasks, STREAM), refs, f"{STREAM} requests in flight")]
    return [one]


def _timeline(timeline: simulator.Timeline, refs: Sequence[int], label: str) -> Timeline:
    events = timeline.events
    return _columns(
        timeline, label, events, [refs[event.task] for event in events], critical_path(timeline)
    )


def _step(tasks: Schedule, refs: Sequence[int]) -> list[Timeline]:
    timeline = simulate(tasks)
    boxes = passes(tasks, timeline)
    whole = _passes(timeline, boxes, refs)
    if len(timeline.events) > MAX_EVENTS:
        return [whole]
    detail = _timeline(timeline, refs, "one step, task by task")
    inside = {index: box for box in boxes for index in box.events}
    labels = [inside[i].label if i in inside else "" for i in range(len(timeline.events))]
    about = [pass_text(inside[i]) if i in inside else "" for i in range(len(timeline.events))]
    return [whole, {**detail, "passes": labels, "about": about}]


def _passes(timeline: simulator.Timeline, boxes: Sequence[Pass], refs: Sequence[int]) -> Timeline:
    """A timeline with the passes in place of nodes, and all communications."""
    path = set(critical_path(timeline))
    comms = [i for i, e in enumerate(timeline.events) if e.kind == "comm" and e.end_s > e.start_s]
    drawn: list[tuple[Event, int, str, str, bool]] = []
    for box in boxes:
        first = next((i for i in box.events if timeline.events[i].kind == "compute"), box.events[0])
        task = timeline.events[first].task
        span = box.start_s, box.end_s
        event = Event(box.device, "compute", box.label, *span, task, box.micro_batch)
        drawn.append((event, refs[task], box.label, pass_text(box), bool(path & {*box.events})))
    for index in comms:
        event = timeline.events[index]
        drawn.append((event, refs[event.task], "", "", index in path))
    drawn.sort(key=lambda row: (row[0].start_s, row[0].device))
    critical = [index for index, row in enumerate(drawn) if row[4]]
    label = f"one step of {timeline.requests} micro-batches, pass by pass"
    columns = _columns(
        timeline, label, [row[0] for row in drawn], [row[1] for row in drawn], critical
    )
    return {**columns, "passes": [row[2] for row in drawn], "about": [row[3] for row in drawn]}


def _columns(
    timeline: simulator.Timeline,
    label: str,
    events: Sequence[Event],
    refs: Sequence[int],
    critical: Sequence[int],
) -> Timeline:
    return Timeline(
        label=label,
        turn=timeline.turn,
        requests=timeline.requests,
        end_s=timeline.makespan_s,
        device=[event.device for event in events],
        kind=[int(event.kind == "comm") for event in events],
        ref=list(refs),
        request=[event.request for event in events],
        start_s=[_rounded(event.start_s) for event in events],
        duration_s=[_rounded(event.end_s - event.start_s) for event in events],
        critical=list(critical),
        passes=None,
        about=None,
    )


def _rounded(value: float) -> float:
    """To nine significant digits: enough to draw, and short as text."""
    return float(f"{value:.9g}")
