"""Stretches of a graph's order that repeat, and which of their blocks belong together.

A model's layers are one run of blocks; its backward pass has them again, in the opposite order.
Runs are *coupled* where blocks read from each other: block k of a run reads from blocks k - 1, k
and k + 1 of the others only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from partitioner.ir.graph import Graph, Node
from partitioner.ir.sequence import MIN_BLOCKS, repetitions, stretches
from partitioner.strategies.derive import Rules

#: Shorter blocks are not worth it, unless they go with another run's.
MIN_PERIOD = 2

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """`count` blocks of `period` nodes each, the earliest at position `start` of the order.

    Blocks are numbered as those of the runs that this one goes with: where `reverse` is set, the
    last one comes first.
    """

    start: int
    period: int
    count: int
    reverse: bool = False

    @property
    def stop(self) -> int:
        """After the last node."""
        return self.start + self.period * self.count

    def block(self, index: int) -> range:
        """Positions of a block."""
        place = self.count - 1 - index if self.reverse else index
        return range(self.start + place * self.period, self.start + (place + 1) * self.period)


@dataclass(frozen=True)
class _Region:
    """Nodes `period` apart are of one kind within start .. stop.

    A node at position i is in block ``first + sign * ((i - phase) // period)``.
    """

    start: int
    stop: int
    period: int
    phase: int = 0
    sign: int = 1
    first: int = 0

    def block(self, position: npt.ArrayLike) -> Ints:
        """The blocks of positions."""
        steps = (np.asarray(position, np.int64) - self.phase) // self.period
        return self.first + self.sign * steps

    def whole(self) -> range:
        """Indices of the blocks that lie within it."""
        head = self.phase + -(-(self.start - self.phase) // self.period) * self.period
        count = max(0, (self.stop - head) // self.period)
        ends = int(self.block(head)), int(self.block(head)) + self.sign * (count - 1)
        return range(min(ends), max(ends) + 1) if count else range(0)

    def first_of(self, block: int) -> int:
        """Position of a block's first node."""
        return self.phase + self.sign * (block - self.first) * self.period


def find_runs(graph: Graph, rules: Rules, kept: Callable[[int], int]) -> tuple[Run, ...]:
    """The coupled runs that hide most nodes; empty if none do.

    Args:
        graph: The model.
        rules: Its rules.
        kept: Blocks that are kept, by the number of runs.
    """
    kinds = _kinds(graph, rules)
    found = repetitions(kinds, 0, len(kinds))
    ranked = sorted(found, key=lambda stretch: (-stretch.hidden, stretch.start))
    if not ranked or ranked[0].period < MIN_PERIOD:
        return ()
    first, *others = (_Region(own.start, own.stop, own.period) for own in ranked)
    reads = _Reads(graph)
    coupled = _coupled(reads, replace(first, phase=first.start), others)
    runs = [_runs(graph, reads, kinds, chosen) for chosen in (coupled, coupled[:1])]
    best = max(runs, key=lambda runs: _hidden(runs, kept))
    return best if _hidden(best, kept) > 0 else ()


def _hidden(runs: Sequence[Run], kept: Callable[[int], int]) -> int:
    return sum((run.count - kept(len(runs))) * run.period for run in runs)


def _kinds(graph: Graph, rules: Rules) -> Ints:
    """A number for each node, equal where operator, attributes, types and rule are."""
    known: dict[object, int] = {}
    return np.array(
        [known.setdefault(_kind(graph, rules, node), len(known)) for node in graph.nodes], np.int64
    )


def _kind(graph: Graph, rules: Rules, node: Node) -> object:
    rule = rules.rule(node)
    loops = (
        (str(rule), rule.flops_per_point, tuple(sorted(rule.addends)), rule.points)
        if rule is not None
        else rules.why_opaque(node)
    )
    reads = tuple(str(graph.types[v]) if v else "" for v in (*node.inputs, *node.captures))
    writes = tuple((str(graph.types[v]), v in graph.outputs) if v else "" for v in node.outputs)
    where = node.name in graph.backward, node.name in graph.optional
    return node.op, repr(sorted(node.attrs.items())), loops, reads, writes, where


class _Reads:
    """Who reads from whom, by position."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.slots: list[list[tuple[int, str]]] = []  # of each node: (producer or -1, value)
        pairs = []
        for position, node in enumerate(graph.nodes):
            own = []
            for value in (*node.inputs, *node.captures):
                producer = graph.producers.get(value)
                place = graph.order[producer.name] if producer is not None else -1
                own.append((place, value))
                if place >= 0:
                    pairs.append((place, position))
            self.slots.append(own)
        #: (producer, reader) of each operand that a node makes.
        self.pairs = np.array(pairs, np.int64).reshape(-1, 2)


def _coupled(reads: _Reads, first: _Region, others: Sequence[_Region]) -> list[_Region]:
    """The regions that read from the first one or are read by it, their blocks numbered like its.

    So are those that are coupled to one of these.
    """
    found, left = [first], list(others)
    while True:
        for region in left:
            numbered = _numbered(reads, region, found)
            if numbered is not None:
                found.append(numbered)
                left.remove(region)
                break
        else:
            return found


def _numbered(reads: _Reads, region: _Region, known: Sequence[_Region]) -> _Region | None:
    """The region with the phase and the numbers that bring most readers to their own block."""
    places, blocks = _partners(reads, region, known)
    sign = _sign(region, places, blocks)
    if sign == 0:
        return None
    best: tuple[tuple[int, int, int], _Region] | None = None
    for phase in range(region.start, region.start + region.period):
        offsets = blocks - sign * ((places - phase) // region.period)
        first = int(np.median(offsets))
        far, aside = (int(np.count_nonzero(abs(offsets - first) > step)) for step in (1, 0))
        tried = replace(region, phase=phase, sign=sign, first=first)
        rank = far, -len(_common([*known, tried])), aside
        if best is None or rank < best[0]:
            best = rank, tried
    assert best is not None
    return best[1]


def _partners(reads: _Reads, region: _Region, known: Sequence[_Region]) -> tuple[Ints, Ints]:
    """Positions in a region and the blocks of known regions that they read from or are read by."""
    places, blocks = [], []
    for own, partner in (reads.pairs.T, reads.pairs.T[::-1]):
        inside = (region.start <= own) & (own < region.stop)
        for other in known:
            both = inside & (other.start <= partner) & (partner < other.stop)
            places.append(own[both])
            blocks.append(other.block(partner[both]))
    return np.concatenate(places), np.concatenate(blocks)


def _sign(region: _Region, places: Ints, blocks: Ints) -> int:
    """1 if partners' blocks rise with the position, -1 if they fall, 0 if there are none."""
    steps = (places - region.start) // region.period
    if len(steps) < 2 or steps.min() == steps.max():
        return 0
    slope = np.polyfit(steps.astype(np.float64), blocks.astype(np.float64), 1)[0]
    return round(float(slope)) if abs(abs(slope) - 1) < 0.5 else 0


def _runs(graph: Graph, reads: _Reads, kinds: Ints, regions: Sequence[_Region]) -> tuple[Run, ...]:
    """The longest range of blocks that are alike and read by nobody else, as runs.

    The outer two need be of the same kinds only.
    """
    common = _common(regions)
    if len(common) < MIN_BLOCKS:
        return ()
    inner = common[1:-1]
    labels = _Labels(graph, reads, regions)
    marks = labels.marks(kinds)
    alike = np.ones(len(inner) - 1, np.bool_)
    for region in regions:
        rows = np.array([region.first_of(block) for block in inner])
        own = marks[rows[:, None] + np.arange(region.period)]
        alike &= (own[1:] == own[:-1]).all(axis=1)
    apart = labels.read_elsewhere()
    closed = np.array([block not in apart for block in inner])
    alike &= closed[1:] & closed[:-1]
    start, length = max(stretches(alike), key=lambda found: found[1], default=(0, 0))
    if length + 3 < MIN_BLOCKS:
        return ()
    return tuple(_run(region, common[start], length + 3) for region in regions)


def _common(regions: Sequence[_Region]) -> range:
    """The blocks that lie within all of them."""
    whole = [region.whole() for region in regions]
    low, high = max(own.start for own in whole), min(own.stop for own in whole)
    return range(low, max(low, high))


def _run(region: _Region, first: int, count: int) -> Run:
    reverse = region.sign < 0
    head = region.first_of(first + count - 1 if reverse else first)
    return Run(head, region.period, count, reverse)


class _Labels:
    """The region and block of every node."""

    def __init__(self, graph: Graph, reads: _Reads, regions: Sequence[_Region]) -> None:
        self.graph, self.reads = graph, reads
        count = len(graph.nodes)
        self.region = np.full(count, -1, np.int64)
        self.block = np.zeros(count, np.int64)
        self.offset = np.zeros(count, np.int64)
        for index, region in enumerate(regions):
            own = np.arange(region.start, region.stop)
            self.region[own] = index
            self.block[own] = region.block(own)
            self.offset[own] = (own - region.phase) % region.period

    def marks(self, kinds: Ints) -> Ints:
        """A number for each node, equal where kinds are and reads are from corresponding places."""
        known: dict[object, int] = {}
        return np.array(
            [
                known.setdefault(
                    (kinds[i], *(self._whence(i, place, value) for place, value in slots)),
                    len(known),
                )
                for i, slots in enumerate(self.reads.slots)
            ],
            np.int64,
        )

    def _whence(self, reader: int, place: int, value: str) -> object:
        if place >= 0 and self._near(place, reader):
            step = int(self.block[place] - self.block[reader])
            return int(self.region[place]), step, int(self.offset[place])
        if place < 0 and value and self._own(reader, value):
            return "own", value in self.graph.constants
        return value

    def _near(self, one: int, other: int) -> bool:
        """Whether two nodes are in the same or neighbouring blocks."""
        inside = self.region[one] >= 0 and self.region[other] >= 0
        return bool(inside and abs(self.block[one] - self.block[other]) <= 1)

    def _own(self, reader: int, value: str) -> bool:
        """Whether a weight or an input is read in one block only."""
        readers = [self.graph.order[node.name] for node in self.graph.consumers[value]]
        return all(self.region[r] >= 0 and self.block[r] == self.block[reader] for r in readers)

    def read_elsewhere(self) -> set[int]:
        """Blocks with a value that is read beyond their neighbours."""
        return {
            int(self.block[place])
            for place, reader in self.reads.pairs.tolist()
            if self.region[place] >= 0 and not self._near(place, reader)
        }
