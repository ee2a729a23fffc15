"""Measurements of operators and communications, and estimates of seconds with their sources."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

#: What a communication takes at least: measured differences may be nothing, which has no logarithm.
_LEAST_S = 1e-9


@dataclass(frozen=True)
class Entry:
    """A measurement of a form."""

    form: str  #: `Form.key`, or `whole_key` of a model.
    op: str  #: `Form.family`; of a model "whole model".
    dtype: str  #: Element type that it computes in.
    flops: float  #: FLOPs of the form.
    moved_bytes: int  #: Bytes that it reads and writes.
    seconds: float  #: Median of the repeats.
    spread: float  #: Half the distance of the quartiles, as a share of the median.
    repeats: int  #: Number of timed runs.
    backend: str  #: What ran it, with its version: "onnxruntime 1.31.0".
    measured_at: str  #: Date and time, ISO 8601, UTC.
    #: Number of processes that ran the form at once, each with its own operands: they share the
    #: memory's bandwidth and the caches.
    processes: int = 1


@dataclass(frozen=True)
class LinkEntry:
    """A measurement of a communication."""

    #: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all" or "send": one that
    #: is waited for at once; with " beside" behind it, one that passes beside compute. Of ranks of
    #: several groups of the level below, see `in_groups` and `over` of
    #: `cost_model.profiles.database`; "border" of what a communication takes beside, in ONNX
    #: Runtime.
    kind: str
    ranks: int  #: Number of ranks that take part, all at once.
    #: Bytes of the whole tensor of a gather, of the local tensor of a reduction or an all-to-all,
    #: and of a message or broadcast.
    nbytes: int
    seconds: float  #: Median over the repeats of what it adds to the compute of the slowest rank.
    spread: float  #: As of an `Entry`.
    repeats: int  #: Number of timed runs.
    backend: str  #: "gloo, torch 2.13.0"; of a border that of operators.
    measured_at: str  #: Date and time, ISO 8601, UTC.


@dataclass(frozen=True)
class Estimate:
    """Seconds of an operator, and where they come from."""

    seconds: float  #: On one device.
    source: str  #: "measured", "fitted", "published" (by others, on such a device) or "datasheet".
    #: Spread of the measurements behind them, as a share; 0 for "published" and "datasheet", which
    #: have none.
    error: float = 0.0


@dataclass(frozen=True)
class LinkTable:
    """Measured or published seconds of communications at some sizes and numbers of ranks."""

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
        """Sizes, and seconds that never fall and are above zero."""
        curves = {}
        for key, points in self.points.items():
            sizes, seconds = zip(*points, strict=True)
            rising = itertools.accumulate((max(_LEAST_S, one) for one in seconds), max)
            curves[key] = [*sizes], [*rising]
        return curves
