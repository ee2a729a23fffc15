"""Tables of communications: seconds by kind, number of ranks and bytes.

Measured links and published measurements are read by the same table.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: What a communication takes at least: measured differences may be nothing, which has no logarithm.
_LEAST_S = 1e-9


@dataclass(frozen=True)
class LinkTable:
    """Seconds of communications at some sizes and numbers of ranks."""

    #: (bytes, seconds) in ascending order of bytes, by kind and number of ranks. Bytes are those of
    #: the whole tensor of a gather or all-to-all, of the local tensor of a reduction, and of a
    #: message or broadcast.
    points: Mapping[tuple[str, int], tuple[tuple[float, float], ...]] = field(repr=False)

    def seconds(self, kind: str, ranks: int, nbytes: float) -> float | None:
        """Seconds of a communication; None if its kind, or so many ranks, are not known.

        Between sizes, seconds are interpolated in logarithms, and never fall as the size grows;
        below the smallest they are its own, above the largest they grow in proportion. Between
        numbers of ranks, they are interpolated in logarithms too.
        """
        known = self._ranks.get(kind, ())
        at = bisect.bisect_left(known, ranks)
        if at == len(known) or (at == 0 and known[0] != ranks):
            return None
        above_s = self._at(kind, known[at], nbytes)
        if known[at] == ranks:
            return above_s
        fewer, more = known[at - 1], known[at]
        share = math.log(ranks / fewer) / math.log(more / fewer)
        below_s = self._at(kind, fewer, nbytes)
        return below_s * math.exp(share * math.log(above_s / below_s))

    def _at(self, kind: str, ranks: int, nbytes: float) -> float:
        sizes, rising = self._curves[kind, ranks]
        if nbytes >= sizes[-1]:
            return rising[-1] * nbytes / sizes[-1]
        above = bisect.bisect_right(sizes, nbytes)
        if above == 0:
            return rising[0]
        (low, high), (low_s, high_s) = sizes[above - 1 : above + 1], rising[above - 1 : above + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return min(high_s, low_s * math.exp(share * math.log(high_s / low_s)))

    @cached_property
    def sizes(self) -> frozenset[float]:
        """Bytes at which seconds are known, of any kind and number of ranks."""
        return frozenset(nbytes for points in self.points.values() for nbytes, _ in points)

    @cached_property
    def _ranks(self) -> Mapping[str, tuple[int, ...]]:
        kinds = {kind for kind, _ in self.points}
        return {kind: tuple(sorted(n for k, n in self.points if k == kind)) for kind in kinds}

    @cached_property
    def _curves(self) -> Mapping[tuple[str, int], tuple[list[float], list[float]]]:
        return {key: _curve(points) for key, points in self.points.items()}


def _curve(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Sizes, and seconds that never fall and are above zero."""
    sizes, seconds = zip(*points, strict=True)
    return [*sizes], [*itertools.accumulate((max(_LEAST_S, one) for one in seconds), max)]
