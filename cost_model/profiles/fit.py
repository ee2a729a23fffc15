"""Seconds of operators that were not measured, from those of others that were.

Kernels are compared by the share of a roofline that they attain, whose rates are those that the
device's own measurements show at that size: a product of a matrix and a vector, which is bound by
memory, tells much of another such product and little of a square one, though each has two FLOPs an
element; and a tensor that leaves the caches, or whose memory the system hands out anew, tells
little of a small one. The roofline has three arms, each with rates by its own size: FLOPs, bytes
that are moved, and bytes of them that are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.profiles.entries import Entry, Estimate
from partitioner.cost_model.profiles.forms import Form
from partitioner.ir.types import dense_bytes

Numbers = npt.NDArray[np.float64]

#: Entries that an estimate takes: those nearest in FLOPs and bytes.
_NEIGHBOURS = 8
#: How much farther entries of other operators and of other element types are, as a logarithm of
#: FLOPs or bytes.
_OTHER_OPERATOR, _OTHER_TYPE = 2.0, 1.0
#: How far an entry of another operator or type may be, as a logarithm of FLOPs or bytes.
_FARTHEST = math.log(10.0)
#: Share of the measurements that attain less than what counts as the device's rate at a size.
_RATE_QUANTILE = 0.9
#: A rate at a size is that of entries whose sizes are at most this much apart, as a logarithm.
_LIKE_SIZE = 1.5
#: What an operator takes at least where a fit takes its logarithm.
_LEAST_S = 1e-9
#: How far an entry of the same FLOPs and bytes counts as, as a logarithm of FLOPs or bytes.
_LEAST_DISTANCE = 0.1


class Fit:
    """Measurements of one device, of which there are some."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        entries = sorted(entries, key=lambda entry: entry.form)
        self._families = np.array([entry.op for entry in entries])
        self._dtypes = np.array([entry.dtype for entry in entries])
        self._are_behind = np.array([" behind " in entry.op for entry in entries], dtype=bool)
        self._seconds = np.array([entry.seconds for entry in entries], dtype=float)
        self._spreads = np.array([entry.spread for entry in entries], dtype=float)
        self._work = np.array(
            [(entry.flops, entry.moved_bytes, _written_bytes(entry.form)) for entry in entries],
            dtype=float,
        )
        alone = ~self._are_behind & (self._seconds > _LEAST_S)
        self._rates = [_Rates.of(sizes[alone], self._seconds[alone]) for sizes in self._work.T]
        self._roofline_s = self._by_rates(self._work)
        self._known: dict[tuple[str, str, float, int], Estimate | None] = {}

    def estimate(self, form: Form, dtype: str, flops: float, moved_bytes: int) -> Estimate | None:
        """Seconds of a form: the mean of the nearest entries, in logarithms, by nearness.

        The entries are of its operator and type, and of others of like FLOPs and bytes, which count
        as farther; of a form behind others they are behind some, too, or of its operator alone.
        Each gives the share of the roofline that it attains. The error is their spread. None if
        there are no such entries.
        """
        key = form.key, dtype, flops, moved_bytes
        if key not in self._known:
            self._known[key] = self._estimate(form, dtype, flops, moved_bytes)
        return self._known[key]

    def _estimate(self, form: Form, dtype: str, flops: float, moved_bytes: int) -> Estimate | None:
        same_operator = self._families == form.family
        if not same_operator.any():
            same_operator = self._families == form.alone.family
        same_type = self._dtypes == dtype
        work = np.array([(flops, moved_bytes, _results_bytes(form.results))], dtype=float)
        apart = np.log((work + 1) / (self._work + 1))
        distances = np.sqrt((apart**2).sum(axis=1))
        like_work = (self._are_behind == bool(form.behind)) & (distances <= _FARTHEST)
        distances += np.where(same_operator, 0.0, _OTHER_OPERATOR)
        distances += np.where(same_type, 0.0, _OTHER_TYPE)
        chosen = np.flatnonzero((same_operator & same_type) | like_work)
        if not len(chosen):
            return None
        nearest = chosen[np.argsort(distances[chosen], kind="stable")[:_NEIGHBOURS]]
        weights = 1 / (_LEAST_DISTANCE + distances[nearest])
        # A kernel has a fixed part: a much smaller one does not scale to nothing.
        least_s = max(_LEAST_S, 0.25 * self._seconds[nearest].min())
        scales = self._by_rates(work)[0] / self._roofline_s[nearest]
        logs = np.log(np.maximum(self._seconds[nearest] * scales, least_s))
        mean = np.average(logs, weights=weights)
        variance = np.average((logs - mean) ** 2 + self._spreads[nearest] ** 2, weights=weights)
        return Estimate(math.exp(mean), "fitted", math.sqrt(variance))

    def _by_rates(self, work: Numbers) -> Numbers:
        arms = [rates.seconds(sizes) for rates, sizes in zip(self._rates, work.T, strict=True)]
        slowest: Numbers = np.max(arms, axis=0)
        return np.maximum(slowest, _LEAST_S)


@dataclass(frozen=True)
class _Rates:
    """The most that a device attains of a kind of work in a second, by the size of the work."""

    log_sizes: Numbers  #: Logarithms of the sizes of measurements, ascending.
    #: Logarithms of the rates there; larger and smaller work has that of the nearest.
    log_rates: Numbers

    @classmethod
    def of(cls, sizes: Numbers, seconds: Numbers) -> _Rates:
        counts = sizes > 0
        logs = np.log(sizes[counts])
        attained = logs - np.log(seconds[counts])
        log_sizes = np.unique(logs)
        near = [attained[np.abs(logs - size) <= _LIKE_SIZE] for size in log_sizes]
        return cls(log_sizes, np.array([np.quantile(some, _RATE_QUANTILE) for some in near]))

    def seconds(self, sizes: Numbers) -> Numbers:
        """Seconds of work of some sizes; 0 of none, and if there are no measurements."""
        if not len(self.log_sizes):
            return np.zeros_like(sizes)
        logs = np.log(np.maximum(sizes, 1.0))
        seconds = np.exp(logs - np.interp(logs, self.log_sizes, self.log_rates))
        return np.where(sizes > 0, seconds, 0.0)


def _written_bytes(form: str) -> int:
    """Bytes of the results of a form, by its key; 0 of a key that tells nothing of them."""
    try:
        _, _, _, results, *_ = json.loads(form)
        return _results_bytes(results)
    except (TypeError, ValueError):
        return 0


def _results_bytes(results: Sequence[tuple[str, Sequence[int]] | None]) -> int:
    return sum(dense_bytes(math.prod(part[1]), part[0]) for part in results if part is not None)
