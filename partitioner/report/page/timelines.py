"""The timelines of a report: one request, and a stream of them where stages overlap."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.cost_model.critical_path import critical_path
from partitioner.cost_model.schedule import Schedule
from partitioner.cost_model.simulate import simulate
from partitioner.report.page.schema import Timeline

#: Requests in flight in the second timeline, and the most events that it may have.
STREAM = 4
MAX_EVENTS = 40_000


def timelines(tasks: Schedule, refs: Sequence[int]) -> list[Timeline]:
    """One request; and several in flight, if stages of different requests run at once.

    Args:
        tasks: The schedule.
        refs: Ref (see `schema`) of each task.
    """
    found = [_timeline(tasks, refs, 1)]
    staged = any(task.target_phase for task in tasks.tasks)
    if staged and len(found[0]["ref"]) * STREAM <= MAX_EVENTS:
        found.append(_timeline(tasks, refs, STREAM))
    return found


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
        start_s=[digits(event.start_s) for event in events],
        duration_s=[digits(event.end_s - event.start_s) for event in events],
        critical=list(critical_path(timeline)),
    )


def digits(value: float) -> float:
    """Nine significant digits: enough to draw, and short as text."""
    return float(f"{value:.9g}")
