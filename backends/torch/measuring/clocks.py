"""Clocks that mark points of a pass: the processor's, or events in the stream of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Clock:
    """Marks points in time while a pass runs, by the processor's clock: the processor runs it."""

    now: Callable[[], float] = time.perf_counter
    _marks: list[Any] = field(default_factory=list)

    def begin(self) -> float:
        """Forget all marks; returns the second that it is now."""
        self._marks = []
        return self.now()

    def mark(self) -> None:
        """Mark this point of the pass."""
        self._marks.append(self.now())

    def marks(self) -> list[float]:
        """The second of each mark, once all of them have passed."""
        return self._marks


@dataclass(kw_only=True)
class StreamClock(Clock):
    """Events in the current stream of a GPU, behind the processor: seconds from `begin` on."""

    #: Makes an event like `torch.cuda.Event` with timing: `record()` puts it into the current
    #: stream, `elapsed_time(later)` gives milliseconds.
    event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    synchronize: Callable[[], object] = torch.cuda.synchronize  #: Waits for an empty stream.
    _origin_s: float = 0.0

    def begin(self) -> float:
        """See `Clock`."""
        self.synchronize()
        self._marks = [self.event()]
        self._origin_s = self.now()
        self._marks[0].record()
        return self._origin_s

    def mark(self) -> None:
        """See `Clock`."""
        event = self.event()
        event.record()
        self._marks.append(event)

    def marks(self) -> list[float]:
        """See `Clock`."""
        self.synchronize()
        first, *others = self._marks
        return [self._origin_s + first.elapsed_time(event) / 1000 for event in others]


def clock_of(device: torch.device) -> Clock:
    """The clock of the passes that run on a device."""
    return StreamClock() if device.type == "cuda" else Clock()


def timed_run(clock: Clock, run: Callable[[], object]) -> float:
    """Seconds of a run by a clock: on a GPU until the last kernel that it started has ended."""
    begin_s = clock.begin()
    run()
    clock.mark()
    (end_s,) = clock.marks()
    return end_s - begin_s
