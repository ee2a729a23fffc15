"""The stages of a compilation by the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from partitioner.search.request import Say
from partitioner.solver.work import COMPILATION, now_s


@dataclass(frozen=True)
class StageClock:
    """Announces the stages of a compilation and keeps their seconds."""

    say: Say  #: Receives the name of each stage as it begins.
    #: Seconds of each finished stage, without those of stages inside of it.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Second of the solver's clock at which the first began.
    begun_s: float = field(default_factory=now_s)
    _inside: list[float] = field(default_factory=list)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block as a stage, or as one more part of it."""
        self.say(stage)
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            with COMPILATION.told_to(self.say):
                yield
        finally:
            spent = time.perf_counter() - start
            own = spent - self._inside.pop()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + own
            if self._inside:
                self._inside[-1] += spent
