"""Clocks that mark points of a pass: the processor's, or events in the stream of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks points in time while a pass runs, and tells them afterwards."""

    def begin(self) -> float:
        """Forget all marks; returns the second that it is now."""

    def mark(self) -> None:
        """Mark this point of the pass."""

    def marks(self) -> list[float]:
        """The second of each mark, once all of them have passed."""


@dataclass
class HostClock:
    """The clock of the processor, which runs a pass itself."""

    now: Callable[[], float] = time.perf_counter
    _marks: list[float] = field(default_factory=list)

    def begin(self) -> float:
        """See `Clock`."""
        self._marks = []
        return self.now()

    def mark(self) -> None:
        """See `Clock`."""
        self._marks.append(self.now())

    def marks(self) -> list[float]:
        """See `Clock`."""
        return self._marks


@dataclass
class StreamClock:
    """Events in the current stream of a GPU, which runs behind the processor.

    The second of an event counts from `begin`, at which the stream is empty.

    Attributes:
        event: Makes an event like `torch.cuda.Event` with timing: `record()` puts it into the
            current stream, `elapsed_time(later)` gives milliseconds.
        synchronize: Waits until the stream is empty.
        now: The clock of the processor.
    """

    event: Callable[[], Any]
    synchronize: Callable[[], object]
    now: Callable[[], float] = time.perf_counter
    _origin_s: float = 0.0
    _events: list[Any] = field(default_factory=list)

    @classmethod
    def cuda(cls) -> StreamClock:
        """The clock of the current CUDA device."""
        return cls(partial(torch.cuda.Event, enable_timing=True), torch.cuda.synchronize)

    def begin(self) -> float:
        """See `Clock`."""
        self.synchronize()
        self._events = [self.event()]
        self._origin_s = self.now()
        self._events[0].record()
        return self._origin_s

    def mark(self) -> None:
        """See `Clock`."""
        event = self.event()
        event.record()
        self._events.append(event)

    def marks(self) -> list[float]:
        """See `Clock`."""
        self.synchronize()
        first, *others = self._events
        return [self._origin_s + first.elapsed_time(event) / 1000 for event in others]


def clock_of(device: torch.device) -> Clock:
    """The clock of the passes that run on a device."""
    return StreamClock.cuda() if device.type == "cuda" else HostClock()


def timed_run(clock: Clock, run: Callable[[], object]) -> float:
    """Seconds of a run by a clock: on a GPU until the last kernel that it started has ended."""
    begin_s = clock.begin()
    run()
    clock.mark()
    (end_s,) = clock.marks()
    return end_s - begin_s
