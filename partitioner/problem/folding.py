"""Repeated blocks (the layers of a transformer): planned once, whatever their number.

A *run* is a stretch of the graph's order that repeats with a period: nodes one period apart have
equal rules, types and attributes and read from corresponding places: the same distance back, the
same value from before the run, or weights of their own. Runs that go together (the layers forward
and backward, see `repeated_blocks`) are folded together: one block is that of all.

The folded graph keeps a few blocks. One of them stands for all that are left out: its loads and
bytes count as often, and its kept neighbours take the same choices. What the folded problem says of
a choice is then what the whole one says of the choice unfolded.

Of a single run the first block, two of the middle and the last are kept; the first of the middle
ones stands for others, and the outer two are free. Of coupled runs three are kept, all alike, and
the middle one stands for others: a value may go either way between runs, so it needs neighbours
like itself on both sides. Where the first or last layers of a model are of other kinds they are
not in the runs, so they are free too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from partitioner.ir.graph import Graph, Node
from partitioner.ir.plan import PlacedNode
from partitioner.problem.build import Built
from partitioner.problem.repeated_blocks import Run, find_runs
from partitioner.solver.problem import Edge, Hold, Item
from partitioner.strategies.derive import Rules

#: Of the kept blocks, the one that stands for all that are left out.
STAND_IN = 1


def kept(runs: int) -> int:
    """Blocks that are kept of so many runs; shorter ones are not folded."""
    return 4 if runs == 1 else 3


@dataclass(frozen=True)
class Folded:
    """A graph with coupled runs shortened to a few blocks.

    Attributes:
        graph: The folded graph, or the whole one if nothing repeats.
        whole: The graph that it stands for.
        runs: The runs in the whole graph; empty if nothing is folded.
        short: The same runs in the folded graph.
        places: For each node of the whole graph the position of its stand-in in `graph`.
    """

    graph: Graph
    whole: Graph
    runs: tuple[Run, ...]
    short: tuple[Run, ...]
    places: tuple[int, ...]

    def __str__(self) -> str:
        """What was folded: ``"94 of 96 blocks of 46 nodes alike"``; ``""`` if nothing."""
        if not self.runs:
            return ""
        count = self.runs[0].count
        nodes = sum(run.period for run in self.runs)
        return f"{count - 2} of {count} blocks of {nodes} nodes alike"

    @property
    def tied(self) -> range:
        """The kept blocks that choose alike."""
        return range(1, 3) if len(self.runs) == 1 else range(3)

    def middle(self, run: Run) -> range:
        """Positions of these blocks of a run of the folded graph."""
        ends = [end for k in self.tied for end in (run.block(k).start, run.block(k).stop)]
        return range(min(ends), max(ends))

    @property
    def times(self) -> int:
        """How many blocks the one that stands for others stands for."""
        return self.runs[0].count - kept(len(self.runs)) + 1

    def tie(self, built: Built) -> Built:
        """The problem of the folded graph, with the middle blocks counted and kept alike."""
        if not self.runs:
            return built
        return _Tied(self, built).run()

    def unfold(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Choices of the whole graph's nodes."""
        return tuple(chosen[place] for place in self.places)


def fold(graph: Graph, rules: Rules) -> Folded:
    """Shorten the coupled runs that save most nodes; the graph itself if none can be."""
    runs = find_runs(graph, rules, kept)
    if not runs:
        return Folded(graph, graph, (), (), tuple(range(len(graph.nodes))))
    short_count = kept(len(runs))
    gone = {i for run in runs for k in range(short_count - 1, run.count - 1) for i in run.block(k)}
    left = [i for i in range(len(graph.nodes)) if i not in gone]
    new = {old: index for index, old in enumerate(left)}
    short = tuple(Run(new[run.start], run.period, short_count, run.reverse) for run in runs)
    places = [new.get(i, -1) for i in range(len(graph.nodes))]
    for run, own in zip(runs, short, strict=True):
        for k in range(short_count - 1, run.count - 1):
            for i, place in zip(run.block(k), own.block(STAND_IN), strict=True):
                places[i] = place
    names = _names(graph, runs, short_count)
    nodes = tuple(_renamed(graph.nodes[i], names.get(i, {})) for i in left)
    return Folded(_shortened(graph, nodes), graph, runs, short, tuple(places))


def _shortened(graph: Graph, nodes: tuple[Node, ...]) -> Graph:
    """The graph of these nodes only."""
    made = {value for node in nodes for value in node.writes}
    names = {node.name for node in nodes}
    used = made | {value for node in nodes for value in node.reads}
    return Graph(
        name=graph.name,
        inputs=graph.inputs,
        outputs=tuple(value for value in graph.outputs if value in made),
        nodes=nodes,
        types={v: t for v, t in graph.types.items() if v in used or v in graph.inputs},
        constants={v: c for v, c in graph.constants.items() if v in used},
        opsets=graph.opsets,
        backward=graph.backward & names,
        optional=graph.optional & names,
    )


def _names(graph: Graph, runs: Sequence[Run], count: int) -> Mapping[int, Mapping[str, str]]:
    """At the seam two kept blocks meet that were apart: what each reads of the other instead.

    By position of the reader: the last kept block of the middle reads from the last one what it
    read from its neighbour, and the last one from it.
    """
    last = runs[0].count - 1
    found: dict[int, Mapping[str, str]] = {}
    for block, neighbour, instead in ((count - 2, count - 1, last), (last, last - 1, count - 2)):
        values = {
            old: new
            for run in runs
            for far, near in zip(run.block(neighbour), run.block(instead), strict=True)
            for old, new in zip(graph.nodes[far].outputs, graph.nodes[near].outputs, strict=True)
            if old
        }
        found.update((i, values) for run in runs for i in run.block(block))
    return found


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if not any(value in names for value in (*node.inputs, *node.captures)):
        return node
    inputs = tuple(names.get(value, value) for value in node.inputs)
    captures = tuple(names.get(value, value) for value in node.captures)
    return replace(node, inputs=inputs, captures=captures)


@dataclass
class _Tied:
    """Counts the block that stands for others as often, and ties the others to it.

    Where the stand-in is, the bytes are those of the first block in the order that it stands for;
    where the kept block after it is, those of the last one. Between them bytes change evenly, so
    the peak is at one of the two. What all others hold is an item of its own: it is held from the
    end of the stand-in where the stand-in makes it, or to the end of the stand-in where it is
    last used.
    """

    folded: Folded
    built: Built
    extra: list[Item] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    others: dict[int, int] = field(default_factory=dict)  # item of the others, by the stand-in's

    def run(self) -> Built:
        """The problem with everything counted."""
        folded, problem = self.folded, self.built.problem
        self.times = float(folded.times)
        self.middles = [(folded.middle(run), run.block(STAND_IN).stop) for run in folded.short]
        sample = {i for run in folded.short for i in run.block(STAND_IN)}
        nodes = tuple(
            tuple(replace(c, load_s=tuple(self.times * s for s in c.load_s)) for c in choices)
            if position in sample
            else choices
            for position, choices in enumerate(problem.nodes)
        )
        own = _own_values(folded.graph, sample)
        items = tuple(
            self._counted(index, item, value) if value in own else item
            for index, (item, value) in enumerate(
                zip(problem.items, self.built.values, strict=True)
            )
        )
        tied = replace(
            problem,
            nodes=nodes,
            items=(*items, *self.extra),
            edges=(*map(self._edge, problem.edges), *self._ties()),
            holds=tuple(map(self._hold, problem.holds)),
        )
        return replace(self.built, problem=tied, values=(*self.built.values, *self.values))

    def _counted(self, index: int, item: Item, value: str) -> Item:
        """An item of each of so many blocks."""
        paid = replace(item, load_s=tuple(self.times * s for s in item.load_s))
        first, last = self._span(item)
        if first > last or not any(item.bytes) or self.times == 1:
            return paid
        if (first, last) == (item.first, item.last):
            return replace(paid, bytes=tuple(self.times * size for size in item.bytes))
        self.others[index] = len(self.built.problem.items) + len(self.extra)
        rest = tuple((self.times - 1) * size for size in item.bytes)
        self.extra.append(Item((0.0,) * len(item.load_s), rest, first, last))
        self.values.append(value)
        return paid

    def _span(self, item: Item) -> tuple[int, int]:
        """When all other blocks that the stand-in stands for hold theirs."""
        first, last = item.first, item.last
        for middle, end in self.middles:
            first = end if item.first in middle else first
            last = end - 1 if item.last in middle else last
        return first, last

    def _with_others(self, items: tuple[int, ...]) -> tuple[int, ...]:
        if self.others.keys().isdisjoint(items):
            return items
        return (*items, *(self.others[i] for i in items if i in self.others))

    def _edge(self, edge: Edge) -> Edge:
        items = {pair: self._with_others(found) for pair, found in edge.items.items()}
        return replace(edge, items=items)

    def _hold(self, hold: Hold) -> Hold:
        return replace(hold, items=tuple(map(self._with_others, hold.items)))

    def _ties(self) -> Iterator[Edge]:
        """Middle blocks choose as the first of them does."""
        for run in self.folded.short:
            blocks = sorted(map(run.block, self.folded.tied), key=lambda block: block.start)
            for one, other in pairwise(blocks):
                yield from map(self._alike, one, other)

    def _alike(self, u: int, v: int) -> Edge:
        """Two nodes are cut alike, are both there, and read the same operands."""
        nodes, candidates = self.folded.graph.nodes, self.built.candidates
        kinds: dict[object, int] = {}
        ours, theirs = (
            tuple(
                kinds.setdefault(_choice(placed), len(kinds))
                for placed in candidates[nodes[position].name]
            )
            for position in (u, v)
        )
        apart = frozenset((a, b) for a in ours for b in theirs if a != b)
        return Edge(u, v, ours, theirs, {}, apart)


def _choice(placed: PlacedNode) -> object:
    """What two nodes of one kind do alike."""
    read = tuple(at is not None for at in placed.ins)
    return placed.mesh, tuple(sorted(placed.layouts.items())), placed.absent, read


def _own_values(graph: Graph, sample: set[int]) -> frozenset[str]:
    """Values that a block makes, and weights and inputs that it alone reads."""
    found: set[str] = set()
    for position in sample:
        node = graph.nodes[position]
        found.update(node.writes)
        found.update(
            value
            for value in node.reads
            if value not in graph.producers
            and all(graph.order[reader.name] in sample for reader in graph.consumers[value])
        )
    return frozenset(found)
