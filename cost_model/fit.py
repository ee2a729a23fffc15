"""Seconds of operators that were not measured, from those of others that were.

Kernels are compared by the share of a roofline that they attain, whose peaks are those that the
device's own measurements show: a product of a matrix and a vector, which is bound by memory, tells
much of another such product and little of a square one, though each has two FLOPs an element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from partitioner.cost_model.entries import Entry, Estimate
from partitioner.cost_model.forms import Form

#: Entries that an estimate takes: those nearest in FLOPs and bytes.
_NEIGHBOURS = 8
#: How much farther the entries of other operators are, as a logarithm of FLOPs or bytes.
_OTHER_OPERATOR = 2.0
#: How far an entry of another operator may be, as a logarithm of FLOPs or bytes.
_FARTHEST = math.log(10.0)
#: Share of the measurements that attain less than what counts as the device's peak.
_PEAK_QUANTILE = 0.9
#: Bytes of a kernel from which on it shows the bandwidth of memory rather than of caches.
_LARGE_BYTES = 2**20
#: What an operator takes at least where a fit takes its logarithm.
_LEAST_S = 1e-9
#: How far an entry of the same FLOPs and bytes counts as, as a logarithm of FLOPs or bytes.
_LEAST_DISTANCE = 0.1


class Fit:
    """Measurements of one device in one element type."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        entries = sorted(entries, key=lambda entry: entry.form)
        self._families = np.array([entry.op for entry in entries])
        self._are_behind = np.array([_stands_behind(entry.op) for entry in entries])
        self._flops = np.array([entry.flops for entry in entries], dtype=float)
        self._moved_bytes = np.array([entry.moved_bytes for entry in entries], dtype=float)
        self._seconds = np.array([entry.seconds for entry in entries], dtype=float)
        self._spreads = np.array([entry.spread for entry in entries], dtype=float)
        timed_s = np.maximum(self._seconds, _LEAST_S)
        took_time = self._seconds > _LEAST_S
        is_large = took_time & (self._moved_bytes >= _LARGE_BYTES)
        shows_memory = is_large if is_large.any() else took_time
        self._flops_per_s = _peak((self._flops / timed_s)[took_time])
        self._bytes_per_s = _peak((self._moved_bytes / timed_s)[shows_memory])
        self._roofline_s = self._by_peaks(self._flops, self._moved_bytes)

    def estimate(self, form: Form, flops: float, moved_bytes: int) -> Estimate | None:
        """Seconds of a form: the mean of the nearest entries, in logarithms, by nearness.

        The entries are of its operator and of others of like FLOPs and bytes, which count as
        farther; of a form that stands behind others they stand behind some, too, or are of its
        operator alone. Each gives the share of the roofline that it attains. The error is their
        spread. None if there are no such entries.

        Args:
            form: The form.
            flops: Its FLOPs.
            moved_bytes: Bytes that it reads and writes.
        """
        same_operator = self._families == form.family
        if not same_operator.any():
            same_operator = self._families == form.alone.family
        by_flops = np.log((flops + 1) / (self._flops + 1))
        by_bytes = np.log((moved_bytes + 1) / (self._moved_bytes + 1))
        distances = np.hypot(by_flops, by_bytes)
        like_work = (self._are_behind == bool(form.behind)) & (distances <= _FARTHEST)
        distances = distances + np.where(same_operator, 0.0, _OTHER_OPERATOR)
        chosen = np.flatnonzero(same_operator | like_work)
        if not len(chosen):
            return None
        nearest = chosen[np.argsort(distances[chosen], kind="stable")[:_NEIGHBOURS]]
        weights = 1 / (_LEAST_DISTANCE + distances[nearest])
        # A kernel has a fixed part: a much smaller one does not scale to nothing.
        least_s = max(_LEAST_S, 0.25 * self._seconds[nearest].min())
        scales = self._by_peaks(flops, moved_bytes) / self._roofline_s[nearest]
        logs = np.log(np.maximum(self._seconds[nearest] * scales, least_s))
        mean = np.average(logs, weights=weights)
        variance = np.average((logs - mean) ** 2 + self._spreads[nearest] ** 2, weights=weights)
        return Estimate(math.exp(mean), "fitted", math.sqrt(variance))

    def _by_peaks(self, flops: np.ndarray | float, moved_bytes: np.ndarray | float) -> np.ndarray:
        """Seconds by the roofline."""
        seconds = np.maximum(flops / self._flops_per_s, moved_bytes / self._bytes_per_s)
        return np.maximum(seconds, _LEAST_S)


def _peak(rates: np.ndarray) -> float:
    """What counts as a peak of attained rates; infinite if none was attained."""
    rates = rates[rates > 0]
    return float(np.quantile(rates, _PEAK_QUANTILE)) if len(rates) else math.inf


def _stands_behind(family: str) -> bool:
    """Whether a family is one of forms behind others; see `Form.family`."""
    return " behind " in family
