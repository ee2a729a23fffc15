"""The timelines of a report: of one request, and of a stream whose stages overlap."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.cost_model.critical_path import critical_path
from partitioner.cost_model.schedule import Schedule
from partitioner.cost_model.simulate import simulate
from partitioner.report.page.schema import Timeline

STREAM = 4  #: Requests in flight in the second timeline.
MAX_EVENTS = 40_000  #: Of the second timeline.


def timelines(tasks: Schedule, refs: Sequence[int]) -> list[Timeline]:
    """One request; and several in flight, if stages of different requests run at once.

    Args:
        refs: Ref (see `schema`) of each task.
    """
    one = _timeline(tasks, refs, 1)
    staged = any(task.target_phase for task in tasks.tasks)
    if staged and len(one["ref"]) * STREAM <= MAX_EVENTS:
        return [one, _timeline(tasks, refs, STREAM)]
    return [one]


def _timeline(tasks: Schedule, refs: Sequence[int], requests: int) -> Timeline:
    timeline = simulate(tasks, requests)
    events = timeline.events
    return Timeline(
        label="one request" if requests == 1 else f"{requests} requests in flight",
        requests=requests,
        end_s=timeline.makespan_s,
        device=[event.device for event in events],
        kind=[int(event.kind == "comm") for event in events],
        ref=[refs[event.task] for event in events],
        request=[event.request for event in events],
        start_s=[_rounded(event.start_s) for event in events],
        duration_s=[_rounded(event.end_s - event.start_s) for event in events],
        critical=list(critical_path(timeline)),
    )


def _rounded(value: float) -> float:
    """To nine significant digits: enough to draw, and short as text."""
    return float(f"{value:.9g}")
