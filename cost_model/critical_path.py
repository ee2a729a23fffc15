"""The critical path of a timeline: the events that the last one waited for, back to the start."""

from __future__ import annotations

from collections import defaultdict

from partitioner.cost_model.simulate import Timeline

#: Times this close are the same instant, relative to the timeline's end.
TOLERANCE = 1e-9


def critical_path(timeline: Timeline) -> tuple[int, ...]:
    """Indices into `timeline.events`, in time order.

    Each event but the first waited for the one before it: its device's own, or another side of
    the same communication, which got there last.
    """
    events = timeline.events
    if not events:
        return ()
    walk = _Walk(timeline)
    at: int | None = max(range(len(events)), key=lambda index: (events[index].end_s, -index))
    path: dict[int, None] = {}
    while at is not None and at not in path:
        path[at] = None
        at = walk.cause(at)
    return tuple(reversed(path))


class _Walk:
    def __init__(self, timeline: Timeline) -> None:
        self.events = timeline.events
        self.slack = TOLERANCE * timeline.makespan_s
        self.before: list[int | None] = []
        self.sides: dict[tuple[int, int], list[int]] = defaultdict(list)
        last: dict[int, int] = {}
        for index, event in enumerate(self.events):
            self.before.append(last.get(event.device))
            last[event.device] = index
            self.sides[event.task, event.request].append(index)

    def cause(self, at: int) -> int | None:
        """What an event waited for; None at the start."""
        event = self.events[at]
        if self._came_straight(at):
            return self.before[at]
        for side in self.sides[event.task, event.request]:
            other = self.events[side]
            # one that started with it got there last; a sender's end is its receivers'
            together = abs(other.start_s - event.start_s) <= self.slack
            sent = abs(other.end_s - event.end_s) <= self.slack
            if side != at and (together or sent) and self._came_straight(side):
                return side
        return None

    def _came_straight(self, at: int) -> bool:
        """Whether the event began as soon as its device was free."""
        start, before = self.events[at].start_s, self.before[at]
        free = 0.0 if before is None else self.events[before].end_s
        return start - free <= self.slack
