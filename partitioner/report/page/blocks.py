"""Ranges of nodes that a picture shows as one: repeated blocks, then chunks that keep it small.

A run of ranges that are equal node by node (`ir.repeats`) is a repeat: the layers of a transformer,
the blocks of a ResNet stage. A range of the graph's order is convex, so folding it makes no cycle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from partitioner.ir.graph import Graph, Node
from partitioner.ir.repeats import (
    Floats,
    Ints,
    Stretch,
    crossing,
    numbered,
    repetitions,
    signature,
)

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


@dataclass(frozen=True)
class Block:
    """Nodes first .. last, folded.

    Attributes:
        first: Index of the first node in graph order.
        last: Index of the last, inclusive.
        kind: Equal for blocks of equal structure; -1 for chunks.
        index: 0 .. count - 1 among consecutive repeats.
        count: How many repeats stand in a row; 1 for chunks.
    """

    first: int
    last: int
    kind: int = -1
    index: int = 0
    count: int = 1
    inner: Sequence[Block] = ()

    def __len__(self) -> int:
        return self.last - self.first + 1


def blocks(graph: Graph, groups: Sequence[int]) -> list[Block]:
    """The outermost blocks, in order, with blocks inside them.

    Args:
        groups: Device group of each node: chunks end where it changes, if they can.
    """

    def kind(node: Node) -> object:
        return signature(node, graph.types), tuple(v in graph.constants for v in node.inputs)

    kinds = numbered(kind(node) for node in graph.nodes)
    return _Folder(kinds, crossing(graph, lambda _: 1), groups).level(0, len(graph.nodes))


def repeats(kinds: Ints, crossing: Floats) -> list[Stretch]:
    """Whole repeated blocks of a sequence, in order; those that hide most are taken first.

    Args:
        kinds: Equal numbers where nodes are equal.
        crossing: Values that cross the point before each node: where blocks may begin at several
            places, they begin where fewest do.
    """

    def periods(part: Ints) -> Iterable[int]:
        return range(MIN_BLOCK, len(part) // 2 + 1)

    stretches = repetitions(kinds, periods, fewest=2, shown=1, hidden=MIN_HIDDEN, crossing=crossing)
    return sorted(stretches, key=lambda stretch: stretch.start)


@dataclass(frozen=True)
class _Folder:
    kinds: Ints
    crossing: Floats
    groups: Sequence[int]
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)  # of blocks, by their kinds

    def level(self, first: int, stop: int, most: int = MAX_ENTRIES) -> list[Block]:
        """Blocks of one level: of the nodes first .. stop - 1, in at most so many entries."""
        repeated = repeats(self.kinds[first:stop], self.crossing[first:stop])
        inside = [
            block
            for s in repeated
            for block in self._parts(Stretch(first + s.start, first + s.stop, s.period))
        ]
        if len(_entries(first, stop, inside)) > most:
            inside = self._between(first, stop, inside)
        if len(_entries(first, stop, inside)) > most:
            inside = self._chunks(first, stop, inside)
        return inside

    def _between(self, first: int, stop: int, inside: Sequence[Block]) -> list[Block]:
        """Fold the stretches of nodes between repeats."""
        folded: list[Block] = []
        at = first
        for block in [*inside, Block(stop, stop)]:
            if inside and block.first - at >= MIN_HIDDEN:
                folded += self._chunks(at, block.first, [])
            folded.append(block)
            at = block.last + 1
        return folded[:-1]

    def _parts(self, stretch: Stretch) -> Iterator[Block]:
        """The blocks of a repeat."""
        key = tuple(self.kinds[stretch.start : stretch.start + stretch.period].tolist())
        number = self.numbers.setdefault(key, len(self.numbers))
        for index, first in enumerate(range(stretch.start, stretch.stop, stretch.period)):
            stop = first + stretch.period
            if stretch.period <= MAX_NESTED:
                inner = self.level(first, stop, MAX_INSIDE)
            else:
                inner = self._chunks(first, stop, [])
            yield Block(first, stop - 1, number, index, stretch.count, inner)

    def _chunks(self, first: int, stop: int, inside: Sequence[Block]) -> list[Block]:
        """Fold a crowded level into ranges of about equal numbers of entries."""
        starts = _entries(first, stop, inside)
        size = math.ceil(len(starts) / min(math.sqrt(len(starts)), MAX_ENTRIES / 2))
        chunks: list[Block] = []
        position = 0
        while position < len(starts):
            end = self._end(starts, position, size)
            after = starts[end] if end < len(starts) else stop
            within = [b for b in inside if starts[position] <= b.first and b.last < after]
            if end - position > MAX_INSIDE:
                within = self._chunks(starts[position], after, within)
            if end - position > 1:
                chunks.append(Block(starts[position], after - 1, inner=within))
            else:
                chunks += within
            position = end
        return chunks

    def _end(self, starts: Sequence[int], position: int, size: int) -> int:
        """After about `size` entries: where the group changes, if it does nearby."""
        least, most = position + max(2, size // 2), min(len(starts), position + size * 3 // 2)
        changes = (
            end
            for end in range(least, most)
            if self.groups[starts[end - 1]] != self.groups[starts[end]]
        )
        target = min(len(starts), position + size)
        return min(changes, key=lambda end: abs(end - target), default=target)


def _entries(first: int, stop: int, inside: Sequence[Block]) -> list[int]:
    """First node of each entry of a level: of its blocks, and the nodes outside them."""
    lasts = {block.first: block.last for block in inside}
    starts = []
    at = first
    while at < stop:
        starts.append(at)
        at = lasts.get(at, at) + 1
    return starts
