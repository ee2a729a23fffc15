"""The timeline of all devices as a picture of a column's width."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.cost_model.schedule.readings import Pass, passes
from partitioner.cost_model.schedule.simulate import Timeline, simulate
from partitioner.report.pictures.canvas import (
    BLUE,
    COMM,
    GREEN,
    IDLE,
    INK,
    PURPLE,
    SKY,
    YELLOW,
    draw_file,
    drawable,
    tint,
)
from partitioner.report.planned import Planned
from partitioner.report.stages import plan_sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES = ("compute", "comm")

_WIDTH_INCHES = 3.5  #: A column of a two-column page.
_LEFT, _ACROSS = 0.13, 0.83  #: Of the width: where the axes begin, and how wide they are.
_COLUMNS = 4  #: Of the legend.
_FONT = 7.0  #: In points.
_REQUESTS = (BLUE, GREEN, SKY, PURPLE, YELLOW)  #: Compute of request 0, 1, ..., in turn.
_SHARE = 0.55  #: Of a request's colour.
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_THIN = 1 / 150  #: Of the time axis; narrower bars that touch are drawn as one.
_MAX_HEIGHT_INCHES = 9.0


@dataclass(frozen=True)
class Bar:
    """An event, or a run of short events that touch; times count from the start of all devices."""

    device: int
    kind: str  #: Lane: "compute" or "comm".
    request: int
    start_s: float
    end_s: float
    names: tuple[str, ...]  #: Of the events.


def draw_timeline(result: Planned, path: str | Path, *, requests: int = 1) -> None:
    """Draw when each device computes, communicates and idles in a simulation of `requests`.

    A plan in stages is drawn pass by pass: "F2" is the forward pass of micro-batch 2. A CostError
    refuses several requests of a plan in stages, a PictureError another suffix than `FORMATS`.
    """
    timeline = simulate(result.schedule, requests)
    boxes = passes(result.schedule, timeline)
    draw_file(path, lambda: _figure(result, timeline, boxes))


def bars(timeline: Timeline, boxes: Sequence[Pass] = ()) -> tuple[Bar, ...]:
    """The bars to draw, by device and kind; passes stand for the nodes in them."""
    thin = timeline.makespan_s * _THIN
    lanes: dict[tuple[int, str], list[Bar]] = defaultdict(list)
    for box in boxes:
        bar = Bar(box.device, "compute", box.micro_batch, box.start_s, box.end_s, (box.label,))
        lanes[box.device, "compute"].append(bar)
    for event in timeline.events:
        start, end = event.start_s, event.end_s
        if end <= start or (boxes and event.kind == "compute"):
            continue
        lane = lanes[event.device, event.kind]
        names: tuple[str, ...] = (event.name,)
        if lane and end - start < thin:
            last = lane[-1]
            is_thin = len(last.names) > 1 or last.end_s - last.start_s < thin
            if is_thin and last.end_s == start and last.request == event.request:
                start, names = last.start_s, (*last.names, event.name)
                lane.pop()
        lane.append(Bar(event.device, event.kind, event.request, start, end, names))
    return tuple(bar for _, lane in sorted(lanes.items()) for bar in lane)


def _figure(result: Planned, timeline: Timeline, boxes: Sequence[Pass]) -> Figure:
    from matplotlib.figure import Figure

    devices = len(result.cluster.devices)
    lane = min(0.17, (_MAX_HEIGHT_INCHES - 1.2) / (2.5 * devices))
    inner = 2.5 * devices * lane
    entries = _legend_entries(timeline)
    below = 0.36 + 0.14 * math.ceil(len(entries) / _COLUMNS)
    title = f"{drawable(result.graph.name, 30)} on {drawable(result.cluster.name, 20)}"
    if sentence := plan_sentence(result.plan, result.evaluation):
        title = f"{title}\n{sentence}"
    elif timeline.requests > 1:
        title += f", {timeline.requests} requests"
    high = inner + below + (0.36 if sentence else 0.22)
    figure = Figure(figsize=(_WIDTH_INCHES, high))
    axes = figure.add_axes((_LEFT, below / high, _ACROSS, inner / high))
    fit = (unit for unit in _UNITS if timeline.makespan_s >= unit[1])
    unit, scale = next(fit, _UNITS[-1])
    end = timeline.makespan_s / scale or 1.0
    for device in range(devices):  # empty lanes show idle time where no bar covers them
        for kind in LANES:
            place = _top(device, kind) + 0.06, 0.88
            axes.broken_barh([(0, end)], place, facecolor=IDLE, linewidth=0)
    axes.set_xlim(0, end)
    axes.set_ylim(2.5 * devices, 0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    drawn = bars(timeline, boxes)
    for bar in drawn:
        _draw_bar(axes, bar, scale)
    _label_bars(axes, drawn, timeline.makespan_s, scale)
    axes.set_xlabel(f"time ({unit})", fontsize=_FONT, labelpad=1)
    axes.tick_params(labelsize=_FONT, length=2)
    labelled = range(0, devices, max(1, round(_FONT / 72 * 1.2 / (2.5 * lane))))
    axes.set_yticks([2.5 * device + 1.25 for device in labelled])
    axes.set_yticklabels([f"dev {device}" for device in labelled], fontsize=_FONT)
    axes.tick_params(axis="y", length=0)
    figure.text(0.5, 1 - 0.05 / high, title, ha="center", va="top", fontsize=_FONT + 1)
    figure.legend(
        handles=entries,
        loc="lower center",
        borderaxespad=0.1,
        labelspacing=0.3,
        ncols=min(len(entries), _COLUMNS),
        fontsize=_FONT,
        frameon=False,
        handlelength=1.4,
        columnspacing=1.0,
    )
    return figure


def _top(device: int, kind: str) -> float:
    """Upper edge of a lane; a device's two lanes fill 2 of 2.5 units, downwards."""
    return 2.5 * device + 0.25 + LANES.index(kind)


def _draw_bar(axes: Axes, bar: Bar, scale: float) -> None:
    look: dict[str, Any] = {"facecolor": _colour(bar.request), "edgecolor": "white"}
    if bar.kind == "comm":
        look = {"facecolor": tint(COMM, 0.45), "edgecolor": COMM, "hatch": "//////"}
    axes.broken_barh(
        [(bar.start_s / scale, (bar.end_s - bar.start_s) / scale)],
        (_top(bar.device, bar.kind) + 0.06, 0.88),
        linewidth=0.25,
        gid=f"{bar.kind}-{bar.device}-{bar.request}",
        **look,
    )


def _colour(request: int) -> str:
    return tint(_REQUESTS[request % len(_REQUESTS)], _SHARE)


def _label_bars(axes: Axes, drawn: Iterable[Bar], span_s: float, scale: float) -> None:
    points = _ACROSS * _WIDTH_INCHES * 72
    for bar in drawn:
        room = int(points * (bar.end_s - bar.start_s) / span_s / (0.62 * (_FONT - 2.5)))
        if len(bar.names) > 1 or room < min(4, len(bar.names[0])):
            continue
        axes.text(
            (bar.start_s + bar.end_s) / 2 / scale,
            _top(bar.device, bar.kind) + 0.52,
            drawable(bar.names[0], room),
            fontsize=_FONT - 2.5,
            color=INK,
            ha="center",
            va="center",
        )


def _legend_entries(timeline: Timeline) -> list[Any]:
    from matplotlib.patches import Patch

    requests, turn = timeline.requests, timeline.turn
    names = ["compute"] if requests == 1 else [f"{turn} {i}" for i in range(min(requests, 5))]
    entries: list[Any] = [Patch(facecolor=_colour(i), label=name) for i, name in enumerate(names)]
    entries.append(
        Patch(facecolor=tint(COMM, 0.45), edgecolor=COMM, hatch="//////", label="communication")
    )
    entries.append(Patch(facecolor=IDLE, label="idle"))
    return entries
