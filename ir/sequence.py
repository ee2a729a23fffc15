"""Where a sequence of numbers repeats: the layers of a model, by the kinds of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Periods that are tried, the most frequent distances between like numbers first.
PERIODS = 12
#: Fewer blocks are no repetition.
MIN_BLOCKS = 4

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stretch:
    """Numbers `period` apart are equal within start .. stop."""

    start: int
    stop: int
    period: int

    @property
    def hidden(self) -> int:
        """Numbers beyond those of the fewest blocks."""
        return self.stop - self.start - MIN_BLOCKS * self.period


def repetitions(kinds: Ints, start: int, stop: int) -> Iterator[Stretch]:
    """The stretch within these positions that hides most, then those beside it.

    >>> [(s.start, s.stop, s.period) for s in repetitions(np.array([9, 1, 2] + [3, 4] * 5), 0, 13)]
    [(3, 13, 2)]
    """
    own = kinds[start:stop]
    found = [
        Stretch(start + first, start + first + length + period, period)
        for period in _periods(own)
        for first, length in stretches(own[:-period] == own[period:])
    ]
    best = max(found, key=lambda stretch: (stretch.hidden, -stretch.period), default=None)
    if best is None or best.hidden < 0:
        return
    yield best
    yield from repetitions(kinds, start, best.start)
    yield from repetitions(kinds, best.stop, stop)


def _periods(kinds: Ints) -> list[int]:
    """Distances between neighbours of one kind, the most frequent first."""
    order = np.argsort(kinds, kind="stable")
    steps = np.diff(order)[np.diff(kinds[order]) == 0]
    counted = Counter(int(step) for step in steps)
    ranked = sorted(counted.items(), key=lambda entry: (-entry[0] * entry[1], entry[0]))
    return [period for period, _ in ranked[:PERIODS]]


def stretches(flags: Bools) -> list[tuple[int, int]]:
    """(start, length) of the stretches of set flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]
