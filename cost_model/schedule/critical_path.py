"""The critical path of a timeline: the events that the last one waited for, back to the start."""

from __future__ import annotations

from collections import defaultdict

from partitioner.cost_model.schedule.simulate import Timeline

#: Times this close are the same instant, relative to the timeline's end.
TOLERANCE = 1e-9


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
        """Test whether the event began as soon as its device was free."""
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
