"""Repeated blocks of a sequence of nodes: the layers of a model, by the signatures of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.types import TensorType

#: Periods that are tried, the most frequent distances between like numbers first.
PERIODS = 12
#: Fewer blocks are no repetition.
MIN_BLOCKS = 4

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Stretch:
    """Numbers `period` apart are equal within start .. stop."""

    start: int
    stop: int
    period: int

    @property
    def count(self) -> int:
        """Whole blocks."""
        return (self.stop - self.start) // self.period

    def beyond(self, blocks: int) -> int:
        """Numbers that follow so many blocks; negative if there are fewer."""
        return self.stop - self.start - blocks * self.period


def signature(node: Node, types: Mapping[str, TensorType]) -> Hashable:
    """Operator, attributes and the types of operands and results: equal in equal blocks.

    Which of a graph's random numbers a node draws does not tell it apart.
    """
    sides, draw = ((*node.inputs, *node.captures), node.outputs), row_of(node).draw
    attrs = repr(sorted(entry for entry in node.attrs.items() if entry[0] != draw))
    return node.op, attrs, *(tuple(str(types[v]) if v else "" for v in side) for side in sides)


def numbered(keys: Iterable[Hashable]) -> Ints:
    """A number for each key, equal where keys are."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def crossing(graph: Graph, weight: Callable[[str], float]) -> Floats:
    """Add up, before each node, the weights of values made before it and read from there on."""
    spans = (
        (graph.order[producer.name], max(graph.order[node.name] for node in readers), weight(value))
        for value, producer in graph.producers.items()
        if (readers := graph.consumers[value])
    )
    return held(spans, len(graph.nodes))[:-1]


def held(spans: Iterable[tuple[int, int, float]], count: int) -> Floats:
    """Add up the weights of (maker, last reader, weight) at each of `count` nodes, and behind."""
    change = np.zeros(count + 2)
    for first, last, weight in spans:
        change[first + 1] += weight
        change[last + 1] -= weight
    return np.cumsum(change)[:-1]


def frequent_periods(kinds: Ints) -> list[int]:
    """The most frequent distances between neighbours of one kind, at most `PERIODS` of them."""
    order = np.argsort(kinds, kind="stable")
    steps = np.diff(order)[np.diff(kinds[order]) == 0]
    counts = Counter(int(step) for step in steps)
    ranked = sorted(counts.items(), key=lambda entry: (-entry[0] * entry[1], entry[0]))
    return [period for period, _ in ranked[:PERIODS]]


def repetitions(
    kinds: Ints,
    periods: Callable[[Ints], Iterable[int]] = frequent_periods,
    *,
    fewest: int = MIN_BLOCKS,
    shown: int = MIN_BLOCKS,
    hidden: int = 0,
    crossing: Floats | None = None,
) -> Iterator[Stretch]:
    """The stretch that hides most, then those on its left and on its right.

    `kinds` have one number a node, as `numbered` gives; a stretch has at least the `fewest` blocks,
    of which `shown` ones do not count as hidden, and as many `hidden` numbers. With `crossing` it
    is of whole blocks and begins where this is least, at the last such place.

    >>> [(s.start, s.stop, s.period) for s in repetitions(np.array([9, 1, 2] + [3, 4] * 5))]
    [(3, 13, 2)]
    """

    @cache
    def of_period(period: int) -> list[Stretch]:
        runs = flagged(kinds[:-period] == kinds[period:], (fewest - 1) * period)
        return [Stretch(start, start + length + period, period) for start, length in runs]

    ranges = [(0, len(kinds))]
    while ranges:
        start, stop = ranges.pop()
        parts = (
            Stretch(max(start, whole.start), min(stop, whole.stop), period)
            for period in periods(kinds[start:stop])
            for whole in of_period(period)
        )
        stretches = [part for part in parts if part.beyond(fewest) >= 0]
        if crossing is not None:
            stretches = [_whole_blocks(stretch, crossing) for stretch in stretches]
        best = max(stretches, key=lambda s: (s.beyond(shown), -s.period), default=None)
        if best is not None and best.beyond(shown) >= hidden:
            yield best
            ranges += (best.stop, stop), (start, best.start)


def _whole_blocks(stretch: Stretch, crossing: Floats) -> Stretch:
    spare = stretch.beyond(stretch.count)
    places = crossing[stretch.start : stretch.start + spare + 1]
    start = stretch.start + int(np.flatnonzero(places == places.min())[-1])
    return Stretch(start, start + stretch.count * stretch.period, stretch.period)


def flagged(flags: Bools, shortest: int = 1) -> list[tuple[int, int]]:
    """(start, length) of the runs of set flags that are not too short."""
    ends = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    long = ends[ends[:, 1] - ends[:, 0] >= shortest]
    return [(start, stop - start) for start, stop in long.tolist()]
