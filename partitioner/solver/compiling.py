"""Seconds in which the solver's functions are compiled: no search's clock counts them.

Compiled functions are kept on disk (`solver.pairwise.jit`), so only the first search on a machine
waits for them, and its time limit must not end before it has begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: What a user is told when functions are compiled.
NOTICE = "compiling the solver, once on this machine (half a minute that no time limit counts)"


class Compilation:
    """The seconds of a process in which at least one of its threads compiles."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since_s = self._before_s = 0.0
        self._told: list[Callable[[str], None]] = []

    @property
    def seconds(self) -> float:
        """The seconds so far, with those of a compilation that runs."""
        with self._lock:
            return self._before_s + (time.monotonic() - self._since_s if self._running else 0.0)

    def begin(self) -> None:
        """Note that a thread begins to compile a function, maybe within another one."""
        with self._lock:
            if not self._running:
                self._since_s = time.monotonic()
            self._running += 1
            told, self._told = self._told, []
        for say in told:
            say(NOTICE)

    def end(self) -> None:
        """Note that a thread has compiled a function."""
        with self._lock:
            self._running -= 1
            if not self._running:
                self._before_s += time.monotonic() - self._since_s

    @contextmanager
    def told_to(self, say: Callable[[str], None]) -> Iterator[None]:
        """Say so, once, if anything is compiled within this context."""
        with self._lock:
            self._told.append(say)
        try:
            yield
        finally:
            with self._lock:
                if say in self._told:
                    self._told.remove(say)


COMPILATION = Compilation()
