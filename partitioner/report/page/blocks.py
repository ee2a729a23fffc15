"""Ranges of nodes that a picture shows as one: repeated blocks, then chunks that keep it small.

Nodes are compared by operator, attributes and the types of what they read and write, in graph
order; a run of ranges that are equal node by node is a repeat (the layers of a transformer, the
blocks of a ResNet stage). A range of the graph's order is convex, so folding it makes no cycle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from partitioner.ir.graph import Graph, Node

#: Shorter blocks are not worth folding, nor are repeats that hide fewer nodes.
MIN_BLOCK = 3
MIN_HIDDEN = 8
#: A level with more entries than this is folded into about as many chunks as their root: what
#: fits a screen and can be read there.
MAX_ENTRIES = 40
#: The same for what is inside a block, which somebody chose to open.
MAX_INSIDE = 90
#: Ranges up to this long are searched for repeats inside.
MAX_NESTED = 400

Ints = npt.NDArray[np.int64]


@dataclass
class Block:
    """Nodes first .. last, folded.

    Attributes:
        first: Index of the first node in graph order.
        last: Index of the last, inclusive.
        kind: Equal for blocks of equal structure; -1 for chunks.
        index: 0 .. count - 1 among consecutive repeats.
        count: How many repeats stand in a row; 1 for chunks.
        inner: Blocks inside.
    """

    first: int
    last: int
    kind: int = -1
    index: int = 0
    count: int = 1
    inner: list[Block] = field(default_factory=list)

    def __len__(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Repeat:
    """`count` equal ranges of `period` nodes, the first at `start`."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """After the last node."""
        return self.start + self.period * self.count

    @property
    def hidden(self) -> int:
        """Nodes that need not be shown if one range stands for all."""
        return self.period * (self.count - 1)


def blocks(graph: Graph, groups: Sequence[int]) -> list[Block]:
    """The outermost blocks, in order, with blocks inside them.

    Args:
        graph: The graph.
        groups: Device group of each node: chunks end where it changes, if they can.
    """
    kinds: dict[tuple[int, ...], int] = {}
    folder = _Folder(signatures(graph), widths(graph), groups, kinds)
    return folder.level(0, len(graph.nodes))


def signatures(graph: Graph) -> Ints:
    """A number for each node, equal where operator, attributes and types are."""
    known: dict[object, int] = {}
    return np.array(
        [known.setdefault(_signature(graph, node), len(known)) for node in graph.nodes], np.int64
    )


def widths(graph: Graph) -> Ints:
    """For each node how many values, made before it, it and later nodes read: where to cut."""
    count = len(graph.nodes)
    change = np.zeros(count + 1, np.int64)
    for value, producer in graph.producers.items():
        readers = [graph.order[node.name] for node in graph.consumers[value]]
        if readers:
            change[graph.order[producer.name] + 1] += 1
            change[max(readers) + 1] -= 1
    return np.cumsum(change)[:count]


def repeats(row: Ints, width: Ints) -> list[Repeat]:
    """Non-overlapping repeats of a sequence, in order; those that hide most are taken first.

    Where a repeat may begin at several places (its ranges rotated), it begins where `width` is
    least, the last such place.
    """
    found: list[Repeat] = []
    for period in range(MIN_BLOCK, len(row) // 2 + 1):
        equal = row[:-period] == row[period:]
        for start, length in _runs(equal):
            if length >= period:
                room = width[start : start + length % period + 1]
                start += int(np.flatnonzero(room == room.min())[-1])
                found.append(Repeat(start, period, length // period + 1))
    found.sort(key=lambda repeat: (-repeat.hidden, repeat.period, repeat.start))
    taken = np.zeros(len(row), bool)
    kept = []
    for repeat in found:
        if repeat.hidden >= MIN_HIDDEN and not taken[repeat.start : repeat.stop].any():
            taken[repeat.start : repeat.stop] = True
            kept.append(repeat)
    return sorted(kept, key=lambda repeat: repeat.start)


@dataclass
class _Folder:
    row: Ints
    width: Ints
    groups: Sequence[int]
    kinds: dict[tuple[int, ...], int]

    def level(self, first: int, stop: int, most: int = MAX_ENTRIES) -> list[Block]:
        """Blocks of one level: of the nodes first .. stop - 1, in at most so many entries."""
        found = [block for repeat in self._repeats(first, stop) for block in self._parts(repeat)]
        if len(_entries(first, stop, found)) > most:
            found = self._between(first, stop, found)
        if len(_entries(first, stop, found)) > most:
            found = self._chunks(first, stop, found)
        return found

    def _between(self, first: int, stop: int, found: Sequence[Block]) -> list[Block]:
        """Fold the stretches of nodes between repeats."""
        folded: list[Block] = []
        at = first
        for block in [*found, Block(stop, stop)]:
            if found and block.first - at >= MIN_HIDDEN:
                folded += self._chunks(at, block.first, [])
            folded.append(block)
            at = block.last + 1
        return folded[:-1]

    def _repeats(self, first: int, stop: int) -> Iterator[Repeat]:
        for repeat in repeats(self.row[first:stop], self.width[first:stop]):
            yield Repeat(first + repeat.start, repeat.period, repeat.count)

    def _parts(self, repeat: Repeat) -> Iterator[Block]:
        key = tuple(self.row[repeat.start : repeat.start + repeat.period].tolist())
        kind = self.kinds.setdefault(key, len(self.kinds))
        for index in range(repeat.count):
            first = repeat.start + index * repeat.period
            last = first + repeat.period - 1
            if repeat.period <= MAX_NESTED:
                inner = self.level(first, last + 1, MAX_INSIDE)
            else:
                inner = self._chunks(first, last + 1, [])
            yield Block(first, last, kind, index, repeat.count, inner)

    def _chunks(self, first: int, stop: int, found: Sequence[Block]) -> list[Block]:
        """Fold a crowded level into ranges of about equal numbers of entries."""
        starts = _entries(first, stop, found)
        size = math.ceil(len(starts) / min(math.sqrt(len(starts)), MAX_ENTRIES / 2))
        chunks = []
        position = 0
        while position < len(starts):
            end = self._end(starts, position, size)
            after = starts[end] if end < len(starts) else stop
            inside = [b for b in found if starts[position] <= b.first and b.last < after]
            if end - position > MAX_INSIDE:
                inside = self._chunks(starts[position], after, inside)
            if end - position > 1:
                chunks.append(Block(starts[position], after - 1, inner=inside))
            else:
                chunks += inside
            position = end
        return chunks

    def _end(self, starts: Sequence[int], position: int, size: int) -> int:
        """After about `size` entries: where the group changes, if it does nearby."""
        least, most = position + max(2, size // 2), min(len(starts), position + size * 3 // 2)
        changes = (
            end
            for end in range(least, most)
            if self._group(starts, end - 1) != self._group(starts, end)
        )
        target = min(len(starts), position + size)
        return min(changes, key=lambda end: abs(end - target), default=target)

    def _group(self, starts: Sequence[int], entry: int) -> int:
        return self.groups[starts[entry]]


def _entries(first: int, stop: int, found: Sequence[Block]) -> list[int]:
    """First node of each entry of a level: of its blocks, and the nodes outside them."""
    lasts = {block.first: block.last for block in found}
    starts = []
    at = first
    while at < stop:
        starts.append(at)
        at = lasts.get(at, at) + 1
    return starts


def _runs(equal: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(start, length) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield start, stop - start


def _signature(graph: Graph, node: Node) -> object:
    ins = tuple(str(graph.types[value]) if value else "" for value in node.inputs)
    outs = tuple(str(graph.types[value]) if value else "" for value in node.outputs)
    fixed = tuple(value in graph.constants for value in node.inputs)
    return node.op, _plain(node.attrs), ins, outs, fixed


def _plain(attrs: Mapping[str, object]) -> str:
    return repr(sorted((name, repr(value)) for name, value in attrs.items()))
