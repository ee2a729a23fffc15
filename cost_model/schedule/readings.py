"""What is read from a timeline: its critical path, the passes of a step, and trace events.

Trace events are the JSON that Perfetto and Chrome show:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from partitioner.cost_model.schedule.simulate import Event, Timeline
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.ir.phases import Part

#: Times this close are the same instant, relative to the timeline's end.
TOLERANCE = 1e-9
#: Letters of the passes of a stage, as in `ir.pipeline`; B is the half of a split backward pass,
#: too, that other stages wait for.
LETTERS = {Part.FORWARD: "F", Part.BACKWARD: "B", Part.WEIGHT: "W", Part.DELIVER: "D"}


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """Indices into `timeline.events`, in time order.

    Each event but the first waited for the one before it: the previous one of its device, or the
    last side of the same communication to arrive.
    """
    events, slack = timeline.events, TOLERANCE * timeline.makespan_s
    previous: list[int | None] = []
    sides: dict[tuple[int, int], list[int]] = defaultdict(list)
    last: dict[int, int] = {}
    for index, event in enumerate(events):
        previous.append(last.get(event.device))
        last[event.device] = index
        sides[event.task, event.request].append(index)

    def is_unblocked(index: int) -> bool:
        before = previous[index]
        free_s = 0.0 if before is None else events[before].end_s
        return events[index].start_s - free_s <= slack

    def cause(index: int) -> int | None:
        """The event that this one waited for; None at the start."""
        if is_unblocked(index):
            return previous[index]
        event = events[index]
        for side in sides[event.task, event.request]:
            other = events[side]
            # a side that started at the same time arrived last; a sender ends with its receivers
            together = abs(other.start_s - event.start_s) <= slack
            sent = abs(other.end_s - event.end_s) <= slack
            if side != index and (together or sent) and is_unblocked(side):
                return side
        return None

    at = max(range(len(events)), key=lambda i: (events[i].end_s, -i), default=None)
    path: dict[int, None] = {}
    while at is not None and at not in path:
        path[at] = None
        at = cause(at)
    return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class Pass:
    """A phase of a micro-batch on a device, without what it sends and receives."""

    device: int
    part: Part
    stage: int  #: 0 for the parts of no stage.
    micro_batch: int  #: 0 for the parts that run once a step.
    label: str  #: "F2"; "1F2" where the device runs several stages; "setup", "reduce".
    start_s: float
    end_s: float
    events: tuple[int, ...]  #: Its events, as indices into `Timeline.events`.


def passes(schedule: Schedule, timeline: Timeline) -> tuple[Pass, ...]:
    """The passes of a step by device and start; none of a whole batch."""
    order = schedule.order
    if order.is_whole:
        return ()
    inside: dict[tuple[int, int, int], list[int]] = {}
    for index, event in enumerate(timeline.events):
        task = schedule.tasks[event.task]
        if task.phase == task.target_phase and event.end_s > event.start_s:
            inside.setdefault((event.device, task.phase, event.request), []).append(index)
    several = Counter(order.table.lane_of)
    lane_of = {device: lane for lane, devices in enumerate(order.lanes) for device in devices}
    boxes = []
    for (device, phase, micro_batch), indices in inside.items():
        part, stage = order.phases.of(phase)
        name = LETTERS.get(part, part.value)
        label = name if order.phases.is_once(phase) else f"{name}{micro_batch}"
        if part is not Part.DELIVER and part in LETTERS and several[lane_of[device]] > 1:
            label = f"{stage}{label}"
        span = timeline.events[indices[0]].start_s, timeline.events[indices[-1]].end_s
        boxes.append(Pass(device, part, stage, micro_batch, label, *span, tuple(indices)))
    return tuple(sorted(boxes, key=lambda box: (box.device, box.start_s, box.end_s)))


def pass_text(box: Pass) -> str:
    """A pass in words: ``"forward pass of stage 1, micro-batch 2"``."""
    if box.part in (Part.SETUP, Part.REDUCE):
        return f"{box.part}, once a step"
    if box.part is Part.DELIVER:
        return f"results of micro-batch {box.micro_batch}"
    return f"{box.part} pass of stage {box.stage}, micro-batch {box.micro_batch}"


_MICROSECONDS = 1e6  #: Trace-event times are in microseconds.
_LANES = ("compute", "comm", "beside", "passes")


def timeline_json(timeline: Timeline, passes: Sequence[Pass] = ()) -> str:
    """The events of a timeline as trace events: a process per device, a lane per kind of task.

    Lane "beside" has the hidden parts of communications, one after the other; lane "passes" the
    passes of a step of micro-batches.
    """
    hidden: list[Event] = []
    free: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.hidden_s:
            start = max(free[event.device], event.end_s)
            free[event.device] = start + event.hidden_s
            hidden.append(replace(event, kind="beside", start_s=start, end_s=free[event.device]))
    lanes = [*_LANES[:2], *(_LANES[2:3] if hidden else ()), *(_LANES[3:] if passes else ())]
    events: list[dict[str, Any]] = []
    for device in sorted({event.device for event in timeline.events}):
        about: dict[str, Any] = {"ph": "M", "pid": device}
        events.append({**about, "name": "process_name", "args": {"name": f"device {device}"}})
        for lane in lanes:
            named = {"tid": _LANES.index(lane), "name": "thread_name", "args": {"name": lane}}
            events.append({**about, **named})
    for e in (*timeline.events, *hidden):
        span = _span(e.name, e.kind, e.device, e.kind, e)
        events.append({**span, "args": {timeline.turn: e.request}})
    for p in passes:
        span = _span(p.label, p.part, p.device, "passes", p)
        events.append({**span, "args": {"pass": pass_text(p)}})
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(data, allow_nan=False) + "\n"


def _span(name: str, category: str, device: int, lane: str, during: Event | Pass) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": str(category),
        "pid": device,
        "tid": _LANES.index(lane),
        "ts": during.start_s * _MICROSECONDS,
        "dur": (during.end_s - during.start_s) * _MICROSECONDS,
    }
