"""A placement-and-sharding problem as a pairwise one, and answers carried both ways.

An item is paid once however many consumers trigger it, which no sum over pairs says. An auxiliary
node makes it one. All edges that trigger an item share a node, its hub (the producer of the
value), and which consumers would trigger it follows from the hub's choice alone. So items that the
same choices of the same consumers trigger, each under other choices of the hub, become one node:

    off       nothing is triggered           allowed where the hub's choice offers items
    on with   these items are paid and held  allowed where it offers just these
    free      there is nothing to trigger    allowed where it offers none

"off" is forbidden beside every choice of a consumer that triggers. Items of several holds have no
hub. An item that one node alone triggers is a cost of its choices, and one that a single edge
triggers without holding bytes is a cost of its pairs. A node of the format has one interval: bytes
that a node holds at other times stand on auxiliary nodes that repeat its choice.

Costs are whole picoseconds, usages whole bytes. A pairwise sum has no maximum over devices: where
they differ, the largest over devices is taken of every cost and size, and the smallest limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product

import numpy as np

from partitioner.solver.pairwise.problem import FORBIDDEN, Ints, Pairwise
from partitioner.solver.presolve.simplify import simplify_edges
from partitioner.solver.problem import Problem, Site, SolverError, item_sites
from partitioner.solver.referee import triggered

Span = tuple[int, int]  #: First and last position at which something is held, inclusive.
Wanted = tuple[tuple[int, frozenset[int]], ...]  #: (node, its choices that trigger), by node.


@dataclass(frozen=True)
class Offer:
    """Items that the same choices of the same nodes trigger, each under other choices of a hub."""

    hub: int | None  #: The node whose choice decides which items are offered; None if nothing does.
    #: The items offered under each choice of the hub, () where none are; one entry without a hub.
    items: tuple[tuple[int, ...], ...]
    wanted: Wanted  #: The choices of other nodes, any of which triggers the offered items.
    span: Span | None  #: Interval in which the bytes of the items are held; None if none count.


def span_of(problem: Problem, item: int) -> Span | None:
    """Interval in which an item's bytes are held; None where they do not count."""
    held = problem.items[item]
    return (held.first, held.last) if problem.limited and any(held.bytes) else None


def triggers(problem: Problem) -> tuple[list[list[list[int]]], list[set[int]], list[Offer]]:
    """The items that cost something, or whose bytes count, by what triggers them.

    By node and choice those that it alone brings about; by edge those without bytes that it alone
    triggers; all others. The problem has no parallel edges.

    Raises:
        SolverError: Edges without a common node trigger one item.
    """
    private: list[list[list[int]]] = [[[] for _ in choices] for choices in problem.nodes]
    on_edge: list[set[int]] = [set() for _ in problem.edges]
    offers: dict[tuple[int | None, Wanted, Span | None], list[list[int]]] = {}
    counted = {
        index
        for index, item in enumerate(problem.items)
        if any(item.load_s) or (problem.limited and any(item.bytes))
    }
    for item, sites in enumerate(item_sites(problem, counted)):
        edges = [site.edge for site in sites if site.edge is not None]
        span = span_of(problem, item)
        if len(sites) == 1 and edges and span is None:
            on_edge[edges[0]].add(item)
            continue
        for hub, choice, wanted in _terms(problem, item, sites):
            if not wanted:
                assert hub is not None
                private[hub][choice].append(item)
                continue
            width = 1 if hub is None else len(problem.nodes[hub])
            offered = offers.setdefault((hub, wanted, span), [[] for _ in range(width)])
            offered[choice].append(item)
    return (
        private,
        on_edge,
        [
            Offer(hub, tuple(map(tuple, offered)), wanted, span)
            for (hub, wanted, span), offered in offers.items()
        ],
    )


def _terms(
    problem: Problem, item: int, sites: Sequence[Site]
) -> Iterator[tuple[int | None, int, Wanted]]:
    """(hub, choice of it, choices of others that trigger the item then); () if it alone does."""
    alone: dict[int, set[int]] = {}
    for site in sites:
        if site.hold is not None:
            alone.setdefault(problem.holds[site.hold].node, set()).update(site.choices)
    edges = [site for site in sites if site.edge is not None]
    if len(alone) > 1 and not edges:
        yield None, 0, _by_node(alone)
        return
    hub = _hub(problem, item, edges) if edges else next(iter(alone), None)
    if hub is None:
        return  # nothing triggers it
    choices_of_hub = alone.pop(hub, set())
    for choice in range(len(problem.nodes[hub])):
        if choice in choices_of_hub:
            yield hub, choice, ()
            continue
        wanted = {node: set(choices) for node, choices in alone.items()}
        for other, choices in _triggering(problem, edges, hub, choice):
            wanted.setdefault(other, set()).update(choices)
        if wanted := {node: choices for node, choices in wanted.items() if choices}:
            yield hub, choice, _by_node(wanted)


def _hub(problem: Problem, item: int, edges: Iterable[Site]) -> int:
    """The node that all edges of an item share; of a single edge its producer."""
    ends = [problem.edges[site.edge] for site in edges if site.edge is not None]
    common = set.intersection(*({edge.u, edge.v} for edge in ends))
    if not common:
        names = ", ".join(f"{problem.names[e.u]!r} - {problem.names[e.v]!r}" for e in ends[:3])
        raise SolverError(f"item {item} is triggered by edges without a common node: {names}")
    return ends[0].u if ends[0].u in common else ends[0].v


def _triggering(
    problem: Problem, edges: Iterable[Site], hub: int, choice: int
) -> Iterator[tuple[int, set[int]]]:
    """Other end of each edge, and its choices that trigger beside this one of the hub."""
    for site in edges:
        assert site.edge is not None
        edge, pairs = problem.edges[site.edge], set(site.pairs)
        if hub == edge.u:
            left = edge.out_class[choice]
            yield edge.v, {q for q, wanted in enumerate(edge.in_class) if (left, wanted) in pairs}
        else:
            wanted = edge.in_class[choice]
            yield edge.u, {p for p, left in enumerate(edge.out_class) if (left, wanted) in pairs}


def _by_node(wanted: dict[int, set[int]]) -> Wanted:
    return tuple((node, frozenset(choices)) for node, choices in sorted(wanted.items()))


#: Units of cost in a second.
PER_SECOND = 10**12


@dataclass(frozen=True)
class Follower:
    """The rule by which an auxiliary node's strategy follows from a plan."""

    hub: int | None  #: The node whose choice decides; None if nothing does.
    #: For each choice of the hub (one entry without a hub): an item, the strategy if the plan pays
    #: it, the strategy if not. The item is None where both are the same.
    ways: tuple[tuple[int | None, int, int], ...]

    def strategy(self, chosen: Sequence[int], paid: set[int]) -> int:
        """The strategy in a plan that pays these items."""
        item, on, off = self.ways[0 if self.hub is None else chosen[self.hub]]
        return on if item in paid else off


@dataclass(frozen=True)
class Converted:
    """A pairwise problem with the way back. Its first nodes are the problem's, in order."""

    problem: Problem
    pairwise: Pairwise
    followers: tuple[Follower, ...]  #: Of each auxiliary node.
    #: Costs and sizes of choices and items that differ by device. Of these the largest counts, so a
    #: plan's cost and usage are upper estimates unless this is 0.
    uneven: int
    figures: int  #: Number of all costs and sizes.

    def restore(self, strategies: Sequence[int]) -> tuple[int, ...]:
        """The plan in an answer to the pairwise problem."""
        return tuple(strategies[: len(self.problem.nodes)])

    def assign(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """A plan as an answer: every item that it triggers is paid, no other is."""
        paid = triggered(self.problem, chosen)
        return (*chosen, *(follower.strategy(chosen, paid) for follower in self.followers))


def convert(problem: Problem) -> Converted:
    """The problem as costs of nodes and pairs.

    Memory counts only where some device has a limit; otherwise all usages are 0.
    """
    simple = simplify_edges(problem)
    private, on_edge, offers = triggers(simple)
    builder = _Builder(simple)
    builder.add_nodes(private)
    builder.add_edges(on_edge)
    for offer in offers:
        builder.add_offer(offer)
    vectors = [c.load_s for choices in problem.nodes for c in choices]
    vectors += [item.load_s for item in problem.items]
    vectors += [item.bytes for item in problem.items] if problem.limited else []
    uneven = sum(len(set(vector)) > 1 for vector in vectors)
    return Converted(problem, builder.build(), tuple(builder.followers), uneven, len(vectors))


@dataclass
class _Builder:
    problem: Problem
    #: Costs and usages of each node's strategies, and when it is live.
    nodes: list[tuple[list[int], list[int], Span | None]] = field(default_factory=list)
    #: Both ends of each edge, and its costs, row-major.
    edges: list[tuple[int, int, list[int]]] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)

    def add_nodes(self, private: Sequence[Sequence[Sequence[int]]]) -> None:
        """Nodes with the items that one choice brings about; then those that repeat choices."""
        items = self.problem.items
        repeated: list[tuple[int, Span, list[int]]] = []
        for node, (choices, sets) in enumerate(zip(self.problem.nodes, private, strict=True)):
            loads = [
                self._load([choice.load_s, *(items[i].load_s for i in held)], node)
                for choice, held in zip(choices, sets, strict=True)
            ]
            # bytes of each set of items by the interval in which they are held
            spans = {i: span_of(self.problem, i) for items in sets for i in items}
            usages = {
                span: [self._size(i for i in items if spans[i] == span) for items in sets]
                for span in sorted({span for span in spans.values() if span is not None})
            }
            main = max(usages, key=lambda span: (len(set(usages[span])), span), default=None)
            self.nodes.append((loads, usages.pop(main) if main else [0] * len(loads), main))
            repeated += [(node, span, sizes) for span, sizes in usages.items()]
        for node, span, sizes in repeated:
            levels = sorted(set(sizes))
            strategy = [levels.index(size) for size in sizes]
            self.nodes.append(([0] * len(levels), levels, span))
            self.followers.append(Follower(node, tuple((None, s, s) for s in strategy)))
            self._allow(node, len(self.nodes) - 1, [{s} for s in strategy])

    def add_edges(self, on_edge: Sequence[set[int]]) -> None:
        """Forbidden pairs, and costs that one edge alone brings about."""
        items = self.problem.items
        for edge, alone in zip(self.problem.edges, on_edge, strict=True):
            cells = {}
            for pair in product(set(edge.out_class), set(edge.in_class)):
                paid = [items[i].load_s for i in edge.items.get(pair, ()) if i in alone]
                cells[pair] = FORBIDDEN if pair in edge.forbidden else self._load(paid, edge.v)
            if any(cells.values()):
                table = [cells[pair] for pair in product(edge.out_class, edge.in_class)]
                self.edges.append((edge.u, edge.v, table))

    def add_offer(self, offer: Offer) -> None:
        """Add an auxiliary node whose choices are: off, each set of items, free."""
        sets: list[tuple[int, ...]] = [(), *sorted({items for items in offer.items if items})]
        free = len(sets)
        if () in offer.items:
            sets.append(())
        named = offer.wanted[0][0] if offer.hub is None else offer.hub
        items = self.problem.items
        loads = [self._load([items[i].load_s for i in paid], named) for paid in sets]
        self.nodes.append((loads, [self._size(paid) for paid in sets], offer.span))
        index = len(self.nodes) - 1
        on = {paid: strategy for strategy, paid in enumerate(sets) if paid}
        ways = ((p[0], on[p], 0) if p else (None, free, free) for p in offer.items)
        self.followers.append(Follower(offer.hub, tuple(ways)))
        if offer.hub is not None:
            self._allow(offer.hub, index, [{0, on[p]} if p else {free} for p in offer.items])
        every = set(range(len(sets)))
        for node, choices in offer.wanted:
            count = len(self.problem.nodes[node])
            self._allow(node, index, [every - {0} if p in choices else every for p in range(count)])

    def _load(self, vectors: Sequence[Sequence[float]], node: int) -> int:
        """Picoseconds of the busiest device, items paid together."""
        largest = _largest(vectors)
        cost = round(largest * PER_SECOND)
        if cost >= FORBIDDEN:
            raise SolverError(
                f"{self.problem.names[node]!r} takes {largest:g} s: costs are picoseconds, and "
                f"{FORBIDDEN / PER_SECOND:g} s and more would mean forbidden"
            )
        return cost

    def _size(self, items: Iterable[int]) -> int:
        """Bytes of the fullest device, items held together; 0 where memory does not count."""
        sizes = [self.problem.items[i].bytes for i in items] if self.problem.limited else []
        return math.ceil(_largest(sizes))

    def _allow(self, node: int, auxiliary: int, fits: Sequence[set[int]]) -> None:
        """Beside each choice of a node only these strategies of an auxiliary one."""
        strategies = range(len(self.nodes[auxiliary][0]))
        table = [0 if s in allowed else FORBIDDEN for allowed in fits for s in strategies]
        if any(table):
            self.edges.append((node, auxiliary, table))

    def build(self) -> Pairwise:
        spans = [(0, 0) if span is None else (span[0], span[1] + 1) for _, _, span in self.nodes]
        ends = [(u, v) for u, v, _ in self.edges]
        limit = min(self.problem.limit_bytes)
        costs, offsets = _flat([costs for costs, _, _ in self.nodes])
        usages, _ = _flat([usages for _, usages, _ in self.nodes])
        edge_costs, edge_offsets = _flat([table for _, _, table in self.edges])
        return Pairwise(
            offsets,
            costs,
            usages,
            np.array(spans, dtype=np.int64).reshape(-1, 2),
            np.array(ends, dtype=np.int64).reshape(-1, 2),
            edge_offsets,
            edge_costs,
            math.floor(limit) if math.isfinite(limit) else None,
        )


def _largest(vectors: Sequence[Sequence[float]]) -> float:
    if len(vectors) == 1:
        return max(vectors[0], default=0.0)
    return max(map(math.fsum, zip(*vectors, strict=True)), default=0.0)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    flat = [value for values in lists for value in values]
    offsets = [0, *accumulate(map(len, lists))]
    return np.array(flat, dtype=np.int64), np.array(offsets, dtype=np.int64)
