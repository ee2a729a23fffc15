"""A placement-and-sharding problem as a pairwise one, and answers carried both ways.

An item is paid once however many consumers trigger it, which no sum over pairs says. An auxiliary
node makes it one. All edges that trigger an item share a node, its hub (the producer of the
value), and which consumers would trigger it follows from the hub's choice alone. So items that the
same choices of the same consumers trigger, each under other choices of the hub, become one node:

    off       nothing is triggered           allowed where the hub's choice offers items
    on with   these items are paid and held  allowed where it offers just these
    free      there is nothing to trigger    allowed where it offers none

"off" is forbidden beside every choice of a consumer that triggers. Items of several holds have no
hub. What one node alone triggers is a cost of its choices, and what one edge alone triggers without
holding bytes is a cost of its pairs. A node of the format has one interval: bytes that a node holds
at other times stand on auxiliary nodes that repeat its choice.

Costs are whole picoseconds, usages whole bytes. A pairwise sum has no maximum over devices: where
they differ, the largest over devices is taken of every cost and size, and the smallest limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from partitioner.solver.pairwise.problem import FORBIDDEN, Ints, Pairwise
from partitioner.solver.pairwise.triggers import Offer, Span, Triggers, span_of, triggers
from partitioner.solver.presolve import simplify_edges
from partitioner.solver.problem import Edge, Pair, Problem, SolverError
from partitioner.solver.referee import triggered

#: Units of cost in a second.
PER_SECOND = 10**12


@dataclass(frozen=True)
class Follower:
    """How an auxiliary node's strategy follows from a plan.

    Attributes:
        hub: The node whose choice decides; None if nothing does.
        ways: For each choice of the hub (one entry without a hub): an item, the strategy if the
            plan pays it, the strategy if not. The item is None where both are the same.
    """

    hub: int | None
    ways: tuple[tuple[int | None, int, int], ...]

    def strategy(self, chosen: Sequence[int], paid: set[int]) -> int:
        """The strategy in a plan that pays these items."""
        item, on, off = self.ways[0 if self.hub is None else chosen[self.hub]]
        return on if item in paid else off


@dataclass(frozen=True)
class Converted:
    """A pairwise problem with the way back. Its first nodes are the problem's, in order.

    Attributes:
        problem: What was converted.
        pairwise: The same as costs of nodes and pairs.
        followers: Of each auxiliary node.
        uneven: Costs and sizes of choices and items that differ by device. Of these the largest
            counts, so a plan's cost and usage are upper estimates unless this is 0.
        figures: How many costs and sizes there are.
    """

    problem: Problem
    pairwise: Pairwise
    followers: tuple[Follower, ...]
    uneven: int
    figures: int

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

    Raises:
        SolverError: A cost is so large that the format takes it for forbidden, or edges without a
            common node trigger one item.
    """
    simple = simplify_edges(problem)
    writer = _Writer(simple, triggers(simple))
    writer.nodes()
    writer.edges()
    for offer in writer.triggers.offers:
        writer.offer(offer)
    vectors = [c.load_s for choices in problem.nodes for c in choices]
    vectors += [item.load_s for item in problem.items]
    vectors += [item.bytes for item in problem.items] if problem.limited else []
    uneven = sum(len(set(vector)) > 1 for vector in vectors)
    return Converted(problem, writer.build(), tuple(writer.followers), uneven, len(vectors))


@dataclass
class _Writer:
    problem: Problem
    triggers: Triggers
    costs: list[list[int]] = field(default_factory=list)
    usages: list[list[int]] = field(default_factory=list)
    spans: list[Span | None] = field(default_factory=list)
    ends: list[tuple[int, int]] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)

    def nodes(self) -> None:
        """Nodes with what each alone brings about; then those that repeat choices."""
        repeated: list[tuple[int, Span, list[int]]] = []
        for node, choices in enumerate(self.problem.nodes):
            own = self.triggers.private[node]
            loads = [
                self._load([c.load_s, *(self.problem.items[i].load_s for i in items)], node)
                for c, items in zip(choices, own, strict=True)
            ]
            held = self._held(own)
            main = max(held, key=lambda span: (len(set(held[span])), span), default=None)
            self._node(loads, held.pop(main) if main else [0] * len(loads), main)
            repeated += [(node, span, sizes) for span, sizes in held.items()]
        for node, span, sizes in repeated:
            self._repeat(node, span, sizes)

    def _held(self, own: Sequence[Sequence[int]]) -> dict[Span, list[int]]:
        """Bytes of each choice by interval."""
        spans = {i: span_of(self.problem, i) for items in own for i in items}
        return {
            span: [self._size(i for i in items if spans[i] == span) for items in own]
            for span in sorted({span for span in spans.values() if span is not None})
        }

    def _repeat(self, node: int, span: Span, sizes: Sequence[int]) -> None:
        levels = sorted(set(sizes))
        strategy = [levels.index(size) for size in sizes]
        index = self._node([0] * len(levels), levels, span)
        self.followers.append(Follower(node, tuple((None, s, s) for s in strategy)))
        self._allow(node, index, [{s} for s in strategy])

    def edges(self) -> None:
        """Forbidden pairs, and costs that one edge alone brings about."""
        for edge, alone in zip(self.problem.edges, self.triggers.on_edge, strict=True):
            outs, ins = set(edge.out_class), set(edge.in_class)
            cells = {(o, i): self._cell(edge, (o, i), alone) for o in outs for i in ins}
            if any(cells.values()):
                table = [[cells[o, i] for i in edge.in_class] for o in edge.out_class]
                self._edge(edge.u, edge.v, table)

    def _cell(self, edge: Edge, pair: Pair, alone: frozenset[int]) -> int:
        if pair in edge.forbidden:
            return FORBIDDEN
        paid = [self.problem.items[i].load_s for i in edge.items.get(pair, ()) if i in alone]
        return self._load(paid, edge.v)

    def offer(self, offer: Offer) -> None:
        """One auxiliary node: off, each set of items, free."""
        sets: list[tuple[int, ...]] = [(), *sorted({items for items in offer.items if items})]
        free = len(sets)
        if () in offer.items:
            sets.append(())
        named = offer.wanted[0][0] if offer.hub is None else offer.hub
        items = self.problem.items
        index = self._node(
            [self._load([items[i].load_s for i in own], named) for own in sets],
            [self._size(own) for own in sets],
            offer.span,
        )
        on = {own: strategy for strategy, own in enumerate(sets) if own}
        self.followers.append(
            Follower(
                offer.hub,
                tuple((own[0], on[own], 0) if own else (None, free, free) for own in offer.items),
            )
        )
        if offer.hub is not None:
            fits = [{0, on[own]} if own else {free} for own in offer.items]
            self._allow(offer.hub, index, fits)
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

    def _node(self, costs: list[int], usages: list[int], span: Span | None) -> int:
        self.costs.append(costs)
        self.usages.append(usages)
        self.spans.append(span)
        return len(self.costs) - 1

    def _edge(self, u: int, v: int, table: list[list[int]]) -> None:
        self.ends.append((u, v))
        self.tables.append([cost for row in table for cost in row])

    def _allow(self, node: int, auxiliary: int, fits: Sequence[set[int]]) -> None:
        """Beside each choice of a node only these strategies of an auxiliary one."""
        count = len(self.costs[auxiliary])
        table = [[0 if s in own else FORBIDDEN for s in range(count)] for own in fits]
        if any(map(any, table)):
            self._edge(node, auxiliary, table)

    def build(self) -> Pairwise:
        """The problem so far."""
        spans = [(0, 0) if span is None else (span[0], span[1] + 1) for span in self.spans]
        limit = min(self.problem.limit_bytes)
        costs, offsets = _flat(self.costs)
        pairs, edge_offsets = _flat(self.tables)
        return Pairwise(
            offsets,
            costs,
            _flat(self.usages)[0],
            np.array(spans, dtype=np.int64).reshape(-1, 2),
            np.array(self.ends, dtype=np.int64).reshape(-1, 2),
            edge_offsets,
            pairs,
            math.floor(limit) if math.isfinite(limit) else None,
        )


def _largest(vectors: Sequence[Sequence[float]]) -> float:
    """The largest of the sums by device."""
    if len(vectors) == 1:
        return max(vectors[0], default=0.0)
    return max(map(math.fsum, zip(*vectors, strict=True)), default=0.0)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    flat = [value for own in lists for value in own]
    offsets = [0, *accumulate(map(len, lists))]
    return np.array(flat, dtype=np.int64), np.array(offsets, dtype=np.int64)
