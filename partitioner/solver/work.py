"""The work of a search: counted steps decide what is tried, the clock only stops it.

A step is a count that depends on the input alone: a plan that is priced, an entry of a table, a
node of a branch-and-bound tree, each times its usual microseconds. So two searches of the same
input do the same, however busy the machine is, unless the clock stops one of them, which says so.
No clock counts the seconds in which the solver's functions are compiled: they are kept on disk
(`solver.pairwise.jit`), and the first search on a machine must not end before it has begun.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


#: A step is about a microsecond of one core of the machine of `docs/performance.md`.
STEPS_PER_S = 1e6


def now_s() -> float:
    """Seconds of the clock that stops searches; it stands while the solver is compiled."""
    return time.monotonic() - COMPILATION.seconds


@dataclass
class Work:
    """The steps that a search may still do, and the second at which the clock stops it."""

    deadline: float = math.inf  #: Second of `now_s` at which the clock stops the search.
    steps: float = math.inf  #: Steps that the search may do in all.
    parent: Work | None = None  #: The work that this one is a share of: it pays for the steps.
    spent: float = 0.0  #: Steps done so far.
    stopped: bool = False  #: Whether the clock has cut something off.

    @classmethod
    def within(cls, seconds: float, steps: float = math.inf) -> Work:
        """Allow so many steps, within so many seconds from now."""
        return cls(now_s() + seconds, steps)

    def share(self, parts: float) -> Work:
        """Set aside one of so many equal shares of the steps that are left."""
        return Work(self.deadline, self.left / parts, self)

    def beyond(self, steps: float) -> Work:
        """Allow so many steps, however few are left, until the clock stops them."""
        return Work(self.deadline, steps, self)

    def of_the_clock(self, parts: float) -> Work:
        """The steps that are left, in one of so many equal shares of the seconds that are."""
        return Work(now_s() + self.left_s / parts, self.left, self)

    def spend(self, steps: float) -> None:
        """Count steps as done."""
        self.spent += steps
        if self.parent is not None:
            self.parent.spend(steps)

    def stop(self) -> None:
        """Note that the clock has cut something off, also of a parent without seconds left."""
        self.stopped = True
        if self.parent is not None and self.parent.left_s <= 0:
            self.parent.stop()

    def cut_off(self) -> None:
        """Note that the clock of a share has cut something off that nobody goes on with."""
        self.stopped = True
        if self.parent is not None:
            self.parent.cut_off()

    @property
    def left(self) -> float:
        """Steps that may still be done; 0 once all are."""
        return max(0.0, self.steps - self.spent)

    @property
    def left_s(self) -> float:
        """Seconds until the clock stops the search; 0 afterwards."""
        return max(0.0, self.deadline - now_s())

    @property
    def late(self) -> bool:
        """Tell whether the clock has stopped the search; to ask is to be stopped by it."""
        if self.left_s > 0:
            return False
        self.stop()
        return True

    @property
    def over(self) -> bool:
        """Tell whether no steps are left, or the clock has stopped the search."""
        return not self.left or self.late
