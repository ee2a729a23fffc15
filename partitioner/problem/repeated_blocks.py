"""The repeated blocks of a graph, and which of them belong together.

The layers of a model are one run of blocks; its backward pass has them again in the opposite
order. Runs are *coupled* where their blocks read from each other: block k of a run reads from
blocks k - 1, k and k + 1 of the other runs only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from partitioner.ir.graph import Graph
from partitioner.ir.pieces.repeats import (
    MIN_BLOCKS,
    Ints,
    flagged,
    numbered,
    repetitions,
    signature,
)
from partitioner.strategies.derive import Rules

#: Shorter blocks are folded only if they are coupled to those of another run.
MIN_PERIOD = 2
#: Nothing is demanded of any node.
NO_DEMANDS: Mapping[str, Hashable] = {}


@dataclass(frozen=True)
class Run:
    """`count` blocks of `period` nodes each, from position `start` of the order on.

    Blocks have the numbers of the blocks of the coupled runs: where `reverse` is set, the last
    block comes first.
    """

    start: int
    period: int
    count: int
    reverse: bool = False

    def block(self, index: int) -> range:
        """Positions of a block's nodes."""
        place = self.count - 1 - index if self.reverse else index
        return range(self.start + place * self.period, self.start + (place + 1) * self.period)


@dataclass(frozen=True)
class _Region:
    """Positions start .. stop, whose nodes `period` apart are of one kind, with block numbers.

    The node at position i is in block ``first + sign * ((i - phase) // period)``.
    """

    start: int
    stop: int
    period: int
    phase: int
    sign: int = 1
    first: int = 0

    def block(self, position: npt.ArrayLike) -> Ints:
        steps = (np.asarray(position, np.int64) - self.phase) // self.period
        return self.first + self.sign * steps

    def whole(self) -> range:
        """Numbers of the blocks that lie within it."""
        head = self.phase + -(-(self.start - self.phase) // self.period) * self.period
        count = max(0, (self.stop - head) // self.period)
        ends = int(self.block(head)), int(self.block(head)) + self.sign * (count - 1)
        return range(min(ends), max(ends) + 1) if count else range(0)

    def first_of(self, block: int) -> int:
        return self.phase + self.sign * (block - self.first) * self.period


def find_runs(
    graph: Graph,
    rules: Rules,
    kept: Callable[[int], int],
    demands: Mapping[str, Hashable] = NO_DEMANDS,
) -> tuple[Run, ...]:
    """The coupled runs that hide most nodes; empty if none hide any.

    Args:
        kept: Blocks that stay in a folded graph, by the number of its runs.
        demands: What is demanded of nodes beside, by their names: it is equal in equal blocks.
    """

    def hidden(runs: Sequence[Run]) -> int:
        return sum((run.count - kept(len(runs))) * run.period for run in runs)

    # a number for each node, equal for those of equal signature, rule, pass and results returned
    loops: dict[int, Hashable] = {}  # of each rule object: equal rules are few objects
    keys: list[Hashable] = []
    returned, types = frozenset(graph.outputs), graph.types
    for node in graph.nodes:
        rule = rules.rule(node)
        if rule is not None and id(rule) not in loops:
            addends = tuple(sorted(rule.addends))
            loops[id(rule)] = str(rule), rule.flops_per_point, addends, rule.points
        iterated = loops[id(rule)] if rule is not None else rules.why_opaque(node)
        given = tuple(value in returned for value in node.outputs)
        passes = node.name in graph.backward, node.name in graph.optional
        demanded = demands.get(node.name)
        keys.append((signature(node, types), iterated, given, passes, demanded))
    kinds = numbered(keys)
    stretches = sorted(repetitions(kinds), key=lambda s: (-s.beyond(MIN_BLOCKS), s.start))
    if not stretches or stretches[0].period < MIN_PERIOD:
        return ()
    pairs = np.array(
        [
            (place, reader)
            for reader, operands in enumerate(_operands(graph))
            for place, _ in operands
            if place >= 0
        ],
        np.int64,
    ).reshape(-1, 2)
    regions = _coupled(pairs, [_Region(s.start, s.stop, s.period, s.start) for s in stretches])
    best = max((_runs(graph, pairs, kinds, part) for part in (regions, regions[:1])), key=hidden)
    return best if hidden(best) > 0 else ()


def _operands(graph: Graph) -> list[list[tuple[int, str]]]:
    """List each node's operands, by position: the producer's position (-1 if none), the value."""
    places = {value: graph.order[node.name] for value, node in graph.producers.items()}
    return [
        [(places.get(value, -1), value) for value in (*node.inputs, *node.captures)]
        for node in graph.nodes
    ]


def _coupled(pairs: Ints, regions: Sequence[_Region]) -> list[_Region]:
    """The first region and those coupled to it, directly or through others, numbered like it."""
    coupled, left = list(regions[:1]), list(regions[1:])
    while True:
        for region in left:
            renumbered = _renumbered(pairs, region, coupled)
            if renumbered is not None:
                coupled.append(renumbered)
                left.remove(region)
                break
        else:
            return coupled


def _renumbered(pairs: Ints, region: _Region, known: Sequence[_Region]) -> _Region | None:
    """The region with the phase and the numbers that bring most readers to their own block.

    None if it is not coupled to the known regions.
    """
    places, blocks = _partners(pairs, region, known)
    sign = _sign(region, places, blocks)
    if sign == 0:
        return None
    ranked = []
    for phase in range(region.start, region.start + region.period):
        offsets = blocks - sign * ((places - phase) // region.period)
        first = int(np.median(offsets))
        far, aside = (int(np.count_nonzero(abs(offsets - first) > step)) for step in (1, 0))
        option = replace(region, phase=phase, sign=sign, first=first)
        ranked.append(((far, -len(_common([*known, option])), aside), option))
    return min(ranked, key=lambda entry: entry[0])[1]


def _partners(pairs: Ints, region: _Region, known: Sequence[_Region]) -> tuple[Ints, Ints]:
    """Positions in a region, and for each the block of a known region that it reads or feeds."""
    places, blocks = [], []
    for here, there in (pairs.T, pairs.T[::-1]):
        inside = (region.start <= here) & (here < region.stop)
        for other in known:
            both = inside & (other.start <= there) & (there < other.stop)
            places.append(here[both])
            blocks.append(other.block(there[both]))
    return np.concatenate(places), np.concatenate(blocks)


def _sign(region: _Region, places: Ints, blocks: Ints) -> int:
    """1 if partners' blocks rise with the position, -1 if they fall, 0 if they do neither."""
    steps = (places - region.start) // region.period
    if len(steps) < 2 or steps.min() == steps.max():
        return 0
    slope = np.polyfit(steps.astype(np.float64), blocks.astype(np.float64), 1)[0]
    return round(float(slope)) if abs(abs(slope) - 1) < 0.5 else 0


def _runs(graph: Graph, pairs: Ints, kinds: Ints, regions: Sequence[_Region]) -> tuple[Run, ...]:
    """The longest range of equal blocks that only their neighbours read from, as runs.

    The outermost two blocks need have nodes of the same kinds only.
    """
    common = _common(regions)
    if len(common) < MIN_BLOCKS:
        return ()
    inner = common[1:-1]
    labels = _Labels.of(graph, regions)
    marks = numbered(
        (kinds[reader], *(labels.origin(reader, place, value) for place, value in operands))
        for reader, operands in enumerate(_operands(graph))
    )
    equal = np.ones(len(inner) - 1, np.bool_)
    for region in regions:
        heads = np.array([region.first_of(block) for block in inner])
        rows = marks[heads[:, None] + np.arange(region.period)]
        equal &= (rows[1:] == rows[:-1]).all(axis=1)
    open_blocks = labels.read_from_afar(pairs)
    closed = np.array([block not in open_blocks for block in inner])
    equal &= closed[1:] & closed[:-1]
    start, length = max(flagged(equal), key=lambda entry: entry[1], default=(0, 0))
    if length + 3 < MIN_BLOCKS:
        return ()
    first, last = common[start], common[start + length + 2]
    return tuple(
        Run(
            region.first_of(first if region.sign > 0 else last),
            region.period,
            length + 3,
            reverse=region.sign < 0,
        )
        for region in regions
    )


def _common(regions: Sequence[_Region]) -> range:
    whole = [region.whole() for region in regions]
    low, high = max(blocks.start for blocks in whole), min(blocks.stop for blocks in whole)
    return range(low, max(low, high))


@dataclass(frozen=True)
class _Labels:
    """Region, block and place in the block of every node, by position; region -1 outside."""

    graph: Graph
    region: Ints
    block: Ints
    offset: Ints

    @classmethod
    def of(cls, graph: Graph, regions: Sequence[_Region]) -> _Labels:
        count = len(graph.nodes)
        region, block, offset = np.full(count, -1), np.zeros(count, int), np.zeros(count, int)
        for index, one in enumerate(regions):
            places = np.arange(one.start, one.stop)
            region[places], block[places] = index, one.block(places)
            offset[places] = (places - one.phase) % one.period
        return cls(graph, region, block, offset)

    def origin(self, reader: int, producer: int, value: str) -> Hashable:
        """Equal for operands that two blocks read from corresponding places.

        Nodes are positions; the producer is -1 if there is none, the value "" if it is absent.
        """
        if producer >= 0 and self._adjacent(producer, reader):
            step = int(self.block[producer] - self.block[reader])
            return int(self.region[producer]), step, int(self.offset[producer])
        if producer < 0 and value and self._read_in_its_block(reader, value):
            return "own", value in self.graph.constants
        return value

    def _adjacent(self, one: int, other: int) -> bool:
        inside = self.region[one] >= 0 and self.region[other] >= 0
        return bool(inside and abs(self.block[one] - self.block[other]) <= 1)

    def _read_in_its_block(self, reader: int, value: str) -> bool:
        readers = [self.graph.order[node.name] for node in self.graph.consumers[value]]
        return all(self.region[r] >= 0 and self.block[r] == self.block[reader] for r in readers)

    def read_from_afar(self, pairs: Ints) -> set[int]:
        """Blocks with a value that is read beyond their neighbours."""
        return {
            int(self.block[producer])
            for producer, reader in pairs.tolist()
            if self.region[producer] >= 0 and not self._adjacent(producer, reader)
        }
