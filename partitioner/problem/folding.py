"""Repeated blocks (the layers of a transformer): planned once, whatever their number.

A *run* is a stretch of the graph's order that repeats with a period: nodes one period apart have
equal rules, types and attributes and read from corresponding places: the same distance back, the
same value from before the run, or weights of their own. Runs are *coupled* where their blocks read
from each other, as the layers forward and backward: block k of a run reads from blocks k - 1, k and
k + 1 of the other runs only. They are folded together: a block has its part in each of them.

The folded graph keeps a few blocks. One of them is the stand-in of all that are left out: its loads
and bytes count as often, and its kept neighbours take the same choices. So a choice costs in the
folded problem what it costs, unfolded, in the whole one.

Of a single run the first block, two of the middle and the last are kept; the first of the middle
ones is the stand-in, and the outer two are free. Of coupled runs three are kept, all tied to choose
alike, and the middle one is the stand-in: a value may go either way between runs, so the stand-in
needs equal neighbours on both sides. Where the first or last layers of a model differ from the
others they are not in the runs, so they are free too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

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
from partitioner.ir.plan import PlacedNode
from partitioner.problem.build import Built
from partitioner.rewrites.graph_writer import GraphWriter, reading
from partitioner.solver.problem import Edge, Item
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


#: Of the kept blocks, the one that stands for all that are left out.
STAND_IN = 1


def kept(runs: int) -> int:
    """Blocks that are kept of so many runs; shorter runs are not folded."""
    return 4 if runs == 1 else 3


@dataclass(frozen=True)
class Folded:
    """A graph with coupled runs shortened to a few blocks."""

    graph: Graph  #: The folded graph, or the whole one if nothing repeats.
    whole: Graph  #: The graph that it stands for.
    runs: tuple[Run, ...]  #: The runs in the whole graph; empty if nothing is folded.
    short: tuple[Run, ...]  #: The same runs in the folded graph.
    #: For each node of the whole graph the position of its stand-in in `graph`.
    places: tuple[int, ...]

    def __str__(self) -> str:
        """The folded blocks: ``"94 of 96 blocks of 46 nodes alike"``; ``""`` if nothing."""
        if not self.runs:
            return ""
        count = self.runs[0].count
        nodes = sum(run.period for run in self.runs)
        return f"{count - 2} of {count} blocks of {nodes} nodes alike"

    @property
    def tied(self) -> range:
        """The kept blocks that make equal choices."""
        return range(1, 3) if len(self.runs) == 1 else range(3)

    @property
    def times(self) -> int:
        """Blocks that the stand-in counts for, itself included."""
        return self.runs[0].count - kept(len(self.runs)) + 1

    @cached_property
    def _middles(self) -> tuple[tuple[range, int], ...]:
        """Find each short run's tied blocks, by their positions, and the end of the stand-in."""
        blocks = [[run.block(k) for k in self.tied] for run in self.short]
        return tuple(
            (range(min(b.start for b in tied), max(b.stop for b in tied)), run.block(STAND_IN).stop)
            for tied, run in zip(blocks, self.short, strict=True)
        )

    def tie(self, built: Built) -> Built:
        """The problem of the folded graph with all blocks counted and tied ones choosing alike.

        Where the stand-in is, the bytes are those of the first block in the order that it stands
        for; where the kept block after it is, those of the last one. Between them bytes change
        evenly, so the peak is at one of the two. The bytes of all other blocks are an item of their
        own: it is held from the end of the stand-in where the stand-in makes it, or to the end of
        the stand-in where it is last used.
        """
        if not self.runs:
            return built
        problem, times = built.problem, float(self.times)
        stand_in = {i for run in self.short for i in run.block(STAND_IN)}
        nodes = tuple(
            tuple(replace(choice, load_s=_scaled(choice.load_s, times)) for choice in choices)
            if position in stand_in
            else choices
            for position, choices in enumerate(problem.nodes)
        )
        inside = _values_of_block(self.graph, stand_in)
        items, rests = [], {}
        for index, (item, value) in enumerate(zip(problem.items, built.values, strict=True)):
            counted, rest = item, None
            if value in inside:
                counted, rest = self._counted(item, times, stays=index in built.resident)
            items.append(counted)
            if rest is not None:
                rests[index] = rest
        others = {index: len(items) + position for position, index in enumerate(rests)}

        def with_others(indices: tuple[int, ...]) -> tuple[int, ...]:
            if others.keys().isdisjoint(indices):
                return indices
            return (*indices, *(others[i] for i in indices if i in others))

        edges = (
            replace(edge, items={pair: with_others(paid) for pair, paid in edge.items.items()})
            for edge in problem.edges
        )
        tied = replace(
            problem,
            nodes=nodes,
            items=(*items, *rests.values()),
            edges=(*edges, *self._ties(built)),
            holds=tuple(replace(h, items=tuple(map(with_others, h.items))) for h in problem.holds),
        )
        values = (*built.values, *(built.values[index] for index in rests))
        return replace(built, problem=tied, values=values)

    def _counted(self, item: Item, times: float, *, stays: bool) -> tuple[Item, Item | None]:
        """An item of the stand-in, paid so many times; what the other blocks hold apart from it.

        If it `stays`, all blocks hold it throughout.
        """
        paid = replace(item, load_s=_scaled(item.load_s, times))
        first, last = item.first, item.last  # when all other blocks hold theirs
        for middle, end in () if stays else self._middles:
            first = end if item.first in middle else first
            last = end - 1 if item.last in middle else last
        if first > last or not any(item.bytes) or times == 1:
            return paid, None
        if (first, last) == (item.first, item.last):
            return replace(paid, bytes=_scaled(item.bytes, times)), None
        free = (0.0,) * len(item.load_s)
        return paid, Item(free, _scaled(item.bytes, times - 1), first, last)

    def _ties(self, built: Built) -> Iterator[Edge]:
        """Edges that make corresponding nodes of neighbouring tied blocks choose alike."""
        for run in self.short:
            blocks = sorted(map(run.block, self.tied), key=lambda block: block.start)
            for before, after in pairwise(blocks):
                for u, v in zip(before, after, strict=True):
                    numbers: dict[Hashable, int] = {}
                    ours, theirs = (
                        tuple(
                            numbers.setdefault(_choice(placed), len(numbers))
                            for placed in built.candidates[self.graph.nodes[position].name]
                        )
                        for position in (u, v)
                    )
                    apart = frozenset((a, b) for a in ours for b in theirs if a != b)
                    yield Edge(u, v, ours, theirs, {}, apart)


def _scaled(values: Sequence[float], times: float) -> tuple[float, ...]:
    return tuple(times * value for value in values)


def _choice(placed: PlacedNode) -> Hashable:
    """A key: the mesh and cuts of a node, its presence, and the operands that it reads."""
    read = tuple(at is not None for at in placed.ins)
    return placed.mesh, tuple(sorted(placed.layouts.items())), placed.absent, read


def _values_of_block(graph: Graph, block: set[int]) -> frozenset[str]:
    """Values that a block's nodes make, and weights and inputs that they alone read."""
    values: set[str] = set()
    for position in block:
        node = graph.nodes[position]
        values.update(node.writes)
        values.update(
            value
            for value in node.reads
            if value not in graph.producers
            and all(graph.order[reader.name] in block for reader in graph.consumers[value])
        )
    return frozenset(values)


def fold(graph: Graph, rules: Rules, demands: Mapping[str, Hashable] = NO_DEMANDS) -> Folded:
    """Shorten the coupled runs that save most nodes; the graph itself if none can be.

    Blocks of which `demands` asks unlike things are unlike, see `find_runs`.
    """
    runs = find_runs(graph, rules, kept, demands)
    if not runs:
        return Folded(graph, graph, (), (), tuple(range(len(graph.nodes))))
    count = kept(len(runs))
    dropped = range(count - 1, runs[0].count - 1)  # blocks
    gone = {i for run in runs for block in dropped for i in run.block(block)}
    left = [i for i in range(len(graph.nodes)) if i not in gone]
    places = {old: new for new, old in enumerate(left)}
    short = tuple(Run(places[run.start], run.period, count, run.reverse) for run in runs)
    for run, shortened in zip(runs, short, strict=True):
        for block in dropped:
            places.update(zip(run.block(block), shortened.block(STAND_IN), strict=True))
    # new names of operands, by position of the reader, where kept blocks meet that were apart
    last = runs[0].count - 1
    names: dict[int, Mapping[str, str]] = {}
    for block, neighbour, instead in ((count - 2, count - 1, last), (last, last - 1, count - 2)):
        values = {
            old: new
            for run in runs
            for far, near in zip(run.block(neighbour), run.block(instead), strict=True)
            for old, new in zip(graph.nodes[far].outputs, graph.nodes[near].outputs, strict=True)
            if old
        }
        names.update((i, values) for run in runs for i in run.block(block))
    nodes = [reading(graph.nodes[i], names.get(i, {})) for i in left]
    ordered = tuple(places[i] for i in range(len(graph.nodes)))
    results = {value for node in nodes for value in node.writes}
    outputs = tuple(value for value in graph.outputs if value in results)
    writer = GraphWriter(source=graph, nodes=nodes)
    folded = writer.graph({node.name for node in nodes}, outputs=outputs)
    return Folded(folded, graph, runs, short, ordered)
