"""A timeline as trace events, the JSON that Perfetto and Chrome show.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from partitioner.cost_model.schedule.passes import Pass, pass_text
from partitioner.cost_model.schedule.simulate import Event, Timeline

_MICROSECONDS = 1e6  #: Trace-event times are in microseconds.
_LANES = ("compute", "comm", "beside", "passes")


def timeline_json(timeline: Timeline, passes: Sequence[Pass] = ()) -> str:
    """The events of a timeline: a process per device, a lane per kind of task.

    Lane "beside" has the hidden parts of communications, one after the other; lane "passes" the
    passes of a step of micro-batches.
    """
    devices = sorted({event.device for event in timeline.events})
    hidden = list(_hidden_parts(timeline.events))
    lanes = [*_LANES[:2], *(_LANES[2:3] if hidden else ()), *(_LANES[3:] if passes else ())]
    events = [
        *_names(devices, lanes),
        *(
            {**_span(e.name, e.kind, e.device, e.kind, e), "args": {timeline.turn: e.request}}
            for e in (*timeline.events, *hidden)
        ),
        *(
            {**_span(p.label, p.part, p.device, "passes", p), "args": {"pass": pass_text(p)}}
            for p in passes
        ),
    ]
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(data, allow_nan=False) + "\n"


def _hidden_parts(events: Iterable[Event]) -> Iterator[Event]:
    free: dict[int, float] = defaultdict(float)
    for event in events:
        if event.hidden_s:
            start = max(free[event.device], event.end_s)
            free[event.device] = start + event.hidden_s
            yield replace(event, kind="beside", start_s=start, end_s=free[event.device])


def _names(devices: Iterable[int], lanes: Sequence[str]) -> Iterator[dict[str, Any]]:
    for device in devices:
        about: dict[str, Any] = {"ph": "M", "pid": device}
        yield {**about, "name": "process_name", "args": {"name": f"device {device}"}}
        for kind in lanes:
            lane = _LANES.index(kind)
            yield {**about, "tid": lane, "name": "thread_name", "args": {"name": kind}}


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
