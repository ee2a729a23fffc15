"""Repeated blocks (the layers of a transformer): planned once, whatever their number.

A *run* is a stretch of the graph's order that repeats with a period: nodes one period apart have
equal rules, types and attributes and read from corresponding places: the same distance back, the
same value from before the run, or weights of their own. The folded graph keeps the first block,
two from the middle and the last; in the folded problem the first of the middle ones stands for
all but one, so that its loads and bytes count as often, and the other takes the same choices. What
the folded problem says of a choice is then what the whole one says of the choice unfolded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from partitioner.build import Built
from partitioner.ir.graph import Graph, Node
from partitioner.solver.problem import Edge, Item, Problem
from partitioner.strategies import Rules

#: Blocks that are kept of a run; shorter runs are not folded.
KEPT = 4
#: Periods that are tried, the most frequent distances between like nodes first.
PERIODS = 12
#: Shorter blocks are not worth it.
MIN_PERIOD = 2

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """`count` blocks of `period` nodes each, the first at position `start` of the order."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """After the last node."""
        return self.start + self.period * self.count

    def block(self, index: int) -> range:
        """Positions of a block."""
        return range(self.start + index * self.period, self.start + (index + 1) * self.period)


@dataclass(frozen=True)
class Folded:
    """A graph with one run shortened to four blocks.

    Attributes:
        graph: The folded graph, or the whole one if nothing repeats.
        whole: The graph that it stands for.
        run: The run in the whole graph; None if nothing is folded.
        places: For each node of the whole graph the position of its stand-in in `graph`.
    """

    graph: Graph
    whole: Graph
    run: Run | None
    places: tuple[int, ...]

    def __str__(self) -> str:
        """What was folded: ``"94 of 96 blocks of 46 nodes alike"``; ``""`` if nothing."""
        if self.run is None:
            return ""
        count = self.run.count
        return f"{count - 2} of {count} blocks of {self.run.period} nodes alike"

    def tie(self, built: Built) -> Built:
        """The problem of the folded graph, with the middle blocks counted and kept alike."""
        if self.run is None:
            return built
        return replace(built, problem=_tied(self.graph, self.run, built))

    def unfold(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Choices of the whole graph's nodes."""
        return tuple(chosen[place] for place in self.places)


def fold(graph: Graph, rules: Rules) -> Folded:
    """Shorten the run that saves most nodes; the graph itself if none can be."""
    run = find_run(graph, rules)
    if run is None:
        return Folded(graph, graph, None, tuple(range(len(graph.nodes))))
    cut = (run.count - KEPT) * run.period
    first = run.start + 3 * run.period  # of the folded run's last block
    last = run.block(run.count - 1).start
    kept = [*range(first), *range(last, len(graph.nodes))]
    places = [*range(first)]
    places += [run.start + run.period + (i - first) % run.period for i in range(first, last)]
    places += [i - cut for i in range(last, len(graph.nodes))]
    moved = _moved(graph, run)
    nodes = tuple(_renamed(graph.nodes[i], moved if i >= last else {}) for i in kept)
    made = {value for node in nodes for value in node.writes}
    used = made | {value for node in nodes for value in node.reads}
    small = Graph(
        name=graph.name,
        inputs=graph.inputs,
        outputs=tuple(value for value in graph.outputs if value in made),
        nodes=nodes,
        types={v: t for v, t in graph.types.items() if v in used or v in graph.inputs},
        constants={v: c for v, c in graph.constants.items() if v in used},
        opsets=graph.opsets,
    )
    return Folded(small, graph, run, tuple(places))


def _moved(graph: Graph, run: Run) -> Mapping[str, str]:
    """For each value of the last block but one, the value of the kept block that stands for it."""
    pairs = zip(run.block(run.count - 2), run.block(2), strict=True)
    return {
        old: new
        for far, near in pairs
        for old, new in zip(graph.nodes[far].outputs, graph.nodes[near].outputs, strict=True)
        if old
    }


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if not any(value in names for value in (*node.inputs, *node.captures)):
        return node
    inputs = tuple(names.get(value, value) for value in node.inputs)
    captures = tuple(names.get(value, value) for value in node.captures)
    return replace(node, inputs=inputs, captures=captures)


def find_run(graph: Graph, rules: Rules) -> Run | None:
    """The run that hides most nodes; None if there is none of more than `KEPT` blocks."""
    kinds = _kinds(graph, rules)
    best: Run | None = None
    for period in _periods(kinds):
        alike = kinds[:-period] == kinds[period:]
        for start, length in _stretches(alike):
            if length + period <= KEPT * period:
                continue
            run = _longest(graph, start, length, period)
            if run is not None and (best is None or _hidden(run) > _hidden(best)):
                best = run
    return best


def _hidden(run: Run) -> int:
    return (run.count - KEPT) * run.period


def _kinds(graph: Graph, rules: Rules) -> npt.NDArray[np.int64]:
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
    return node.op, repr(sorted(node.attrs.items())), loops, reads, writes


def _periods(kinds: npt.NDArray[np.int64]) -> list[int]:
    """Distances between neighbouring nodes of one kind, the most frequent first."""
    order = np.argsort(kinds, kind="stable")
    steps = np.diff(order)[np.diff(kinds[order]) == 0]
    counted = Counter(int(step) for step in steps if step >= MIN_PERIOD)
    ranked = sorted(counted.items(), key=lambda entry: (-entry[0] * entry[1], entry[0]))
    return [period for period, _ in ranked[:PERIODS]]


def _stretches(flags: Bools) -> list[tuple[int, int]]:
    """(start, length) of the stretches of set flags."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def _longest(graph: Graph, start: int, length: int, period: int) -> Run | None:
    """The longest run within a stretch whose nodes also read from corresponding places."""
    reads = [_reads(graph, i) for i in range(start, start + length + period)]
    good = np.array(
        [_correspond(reads[i], reads[i + period], period) for i in range(length)], np.bool_
    )
    found = max(_stretches(good), key=lambda stretch: stretch[1], default=(0, 0))
    run = Run(start + found[0], period, found[1] // period + 1)
    while run.count > KEPT:
        if _closed(graph, run):
            return run
        run = replace(run, count=run.count - 1)
        if run.count < found[1] // period:  # one block less, where the tail reads into the last
            break
    return None


Read = tuple[str, int, str]  #: (kind of source, position of its node or -1, value).


def _reads(graph: Graph, position: int) -> tuple[int, list[Read]]:
    """Whence a node reads, slot by slot."""
    found: list[Read] = []
    for value in (*graph.nodes[position].inputs, *graph.nodes[position].captures):
        producer = graph.producers.get(value)
        if producer is not None:
            found.append(("node", graph.order[producer.name], value))
        else:
            found.append(("constant" if value in graph.constants else "input", -1, value))
    return position, found


def _correspond(one: tuple[int, list[Read]], other: tuple[int, list[Read]], period: int) -> bool:
    """Whether two nodes, one period apart, read from corresponding places."""
    (here, mine), (there, theirs) = one, other
    for (kind, place, value), (their_kind, their_place, their_value) in zip(
        mine, theirs, strict=True
    ):
        if kind != their_kind:
            return False
        near = there - their_place == here - place and here - place < 2 * period
        if kind == "node" and value != their_value and not near:
            return False
    return True


def _closed(graph: Graph, run: Run) -> bool:
    """Whether no block reads past the one before it, and later nodes read of the last one only."""
    block = {}
    for index in range(run.count):
        for position in run.block(index):
            block.update(dict.fromkeys(graph.nodes[position].writes, index))
    shared = [
        {v for i in run.block(k) for v in graph.nodes[i].reads if v not in block} for k in (1, 2)
    ]
    common = shared[0] & shared[1]
    for index in range(run.count):
        for position in run.block(index):
            reads = graph.nodes[position].reads
            if any(index - block[value] > 1 for value in reads if value in block):
                return False
            own = {value for value in reads if value not in block and value not in common}
            if index > 0 and any(_elsewhere(graph, value, run.block(index)) for value in own):
                return False
    return not any(
        block.get(value, run.count - 1) < run.count - 1
        for node in graph.nodes[run.stop :]
        for value in node.reads
    )


def _elsewhere(graph: Graph, value: str, block: range) -> bool:
    """Whether a value is read outside its block."""
    return any(graph.order[node.name] not in block for node in graph.consumers[value])


def _tied(graph: Graph, run: Run, built: Built) -> Problem:
    problem = built.problem
    times = float(run.count - KEPT + 1)
    middle, twin = run.block(1), run.block(2)
    nodes = tuple(
        tuple(replace(c, load_s=tuple(times * s for s in c.load_s)) for c in choices)
        if position in middle
        else choices
        for position, choices in enumerate(problem.nodes)
    )
    own = _own_values(graph, middle)
    items = tuple(
        _counted(item, times, twin.stop) if value in own else item
        for item, value in zip(problem.items, built.values, strict=True)
    )
    ties = (
        _alike(position, position + run.period, len(problem.nodes[position]))
        for position in middle
        if len(problem.nodes[position]) > 1
    )
    return replace(problem, nodes=nodes, items=items, edges=(*problem.edges, *ties))


def _own_values(graph: Graph, block: range) -> frozenset[str]:
    """Values that a block makes, and weights and inputs that it alone reads."""
    found: set[str] = set()
    for position in block:
        node = graph.nodes[position]
        found.update(node.writes)
        found.update(
            value
            for value in node.reads
            if value not in graph.producers and not _elsewhere(graph, value, block)
        )
    return frozenset(found)


def _counted(item: Item, times: float, stop: int) -> Item:
    """An item of each of so many blocks; bytes add up if they are held beyond the next block."""
    lasting = item.last >= stop
    held = tuple(times * size for size in item.bytes) if lasting else item.bytes
    return replace(item, load_s=tuple(times * s for s in item.load_s), bytes=held)


def _alike(u: int, v: int, choices: int) -> Edge:
    every = tuple(range(choices))
    apart = frozenset((p, q) for p in every for q in every if p != q)
    return Edge(u, v, every, every, {}, apart)
