"""The problem laid out for search: floats, both directions of every edge, rows of memory.

Forbidden strategies are absent, forbidden pairs are infinite, parallel edges are one and no edge
touches a node that has one strategy left. Nodes keep their number; `labels` leads back from a
strategy that is left to the strategy of the problem.

Memory can bind at the maximal cliques of the interval graph: between two times at which a node dies
nothing is gained by looking at any time but the last one at which a node is born, as all that is
live before is live then. A node is live in consecutive ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.problem import (
    FORBIDDEN,
    Flags,
    Floats,
    Ints,
    Pairwise,
    index_in_group,
    offsets_of,
)
from partitioner.solver.problem import clique_positions


@dataclass(frozen=True)
class Rows:
    """Memory rows: sum of usage over the nodes live in a row is at most its capacity."""

    first: Ints  #: First row in which each node is live; (nodes,).
    last: Ints  #: One past its last row; not above `first` where it is in none; (nodes,).
    capacity: Floats  #: Room for usages above each node's least; (rows,).
    number: Ints  #: Index of each row among the problem's maximal cliques, ascending; (rows,).

    def only(self, keep: Flags) -> Rows:
        """The flagged rows: a relaxation, as if memory were unlimited at all other times."""
        place = offsets_of(keep)
        return Rows(place[self.first], place[self.last], self.capacity[keep], self.number[keep])

    def load(self, usage: Floats) -> Floats:
        """Usage in each row, of one usage a node."""
        change = np.zeros(len(self.capacity) + 1)
        live = self.last > self.first
        np.add.at(change, self.first[live], usage[live])
        np.add.at(change, self.last[live], -usage[live])
        return np.cumsum(change)[:-1]

    def less(self, least: Floats, usage: Floats, offsets: Ints) -> Rows:
        """The rows once each node's least usage is set aside; rows that cannot bind are gone."""
        if not len(self.capacity):
            return self
        capacity = self.capacity - self.load(least)
        binds = self.load(np.maximum.reduceat(usage, offsets[:-1])) > capacity
        return replace(self, capacity=capacity).only(binds)

    def room(self) -> Floats:
        """The least capacity of the rows of each node; infinite where it is in none; (nodes,)."""
        table = [self.capacity]  # table[k][r]: the least of the 2^k rows from r on
        while 2 ** len(table) <= len(self.capacity):
            half = 2 ** (len(table) - 1)
            table.append(np.minimum(table[-1][:-half], table[-1][half:]))
        span = self.last - self.first
        room = np.full(len(span), np.inf)
        for power, least in enumerate(table):
            v = np.flatnonzero((span >= 2**power) & (span < 2 ** (power + 1)))
            room[v] = np.minimum(least[self.first[v]], least[self.last[v] - 2**power])
        return room

    def prices(self, price: Floats) -> Floats:
        """Sum of the rows' prices over the rows of each node; (nodes,)."""
        total = np.concatenate([[0.0], np.cumsum(price)])
        live = self.last > self.first
        return np.where(live, total[self.last] - total[self.first], 0.0)


def memory_rows(intervals: Ints, limit: int | None) -> Rows:
    """Make a row for each maximal clique; none without a limit."""
    live = intervals[:, 1] > intervals[:, 0]
    if limit is None or not live.any():
        none = np.zeros(len(intervals), dtype=np.int64)
        return Rows(none, none, np.zeros(0), none[:0])
    times = clique_positions(intervals[live] - (0, 1))
    first, last = (np.where(live, np.searchsorted(times, ends), 0) for ends in intervals.T)
    return Rows(first, last, np.full(len(times), float(limit)), np.arange(len(times)))


def peaks(over: Floats) -> Ints:
    """The worst row of each run of rows in which usage is above capacity."""
    short = np.concatenate([[False], over > 0, [False]])
    bounds = np.flatnonzero(short[1:] != short[:-1]).reshape(-1, 2)
    return np.array([a + int(over[a:b].argmax()) for a, b in bounds], dtype=np.int64)


#: Cost of a forbidden pair while a choice still has some: far above all others.
CONFLICT = 1e16


class Graph(NamedTuple):
    """Strategies, and every edge as two arcs; the arcs of a node ascend by the other end.

    A named tuple, because compiled functions take one as it is.
    """

    offsets: Ints  #: First strategy of each node, and the number of all; (nodes + 1,).
    unary: Floats  #: Cost of each strategy, infinite only until `prune`; (strategies,).
    starts: Ints  #: First arc of each node, and the number of all; (nodes + 1,).
    heads: Ints  #: Node that the arc leads to; (arcs,).
    back: Ints  #: The arc of the other direction; (arcs,).
    tables: Ints  #: First entry of the arc's table, (of tail, of head) row-major; (arcs,).
    entries: Floats  #: Cost of each pair; infinite where forbidden.

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """Number of strategies of each node; (nodes,)."""
        return np.diff(self.offsets)

    @property
    def tails(self) -> Ints:
        """Node that each arc leaves; (arcs,)."""
        return np.repeat(np.arange(self.nodes), np.diff(self.starts))


@dataclass(frozen=True)
class Model:
    """A graph with the usage and the origin of its strategies."""

    graph: Graph
    usage: Floats  #: Usage of each strategy above its node's least; (strategies,).
    rows: Rows  #: Times at which memory can bind.
    labels: Ints  #: Strategy of the problem that each strategy stands for; (strategies,).

    def original(self, chosen: Ints) -> tuple[int, ...]:
        """The problem's strategies for strategies of the model, one a node."""
        return tuple(self.labels[self.graph.offsets[:-1] + chosen].tolist())

    def within(self, chosen: tuple[int, ...]) -> Ints:
        """The model's strategies for strategies of the problem, -1 where it has not; (nodes,)."""
        nodes = np.arange(self.graph.nodes)
        most = max(int(self.labels.max(initial=0)), max(chosen, default=0)) + 1
        known = np.repeat(nodes, self.graph.sizes) * most + self.labels
        place = positions(known, nodes * most + np.array(chosen, dtype=np.int64))
        return np.where(place >= 0, place - self.graph.offsets[:-1], -1)

    def priced(self, price: Floats) -> Floats:
        """Cost of each strategy with what it uses at these prices of the rows; (strategies,)."""
        priced: Floats = self.graph.unary + self.usage * np.repeat(
            self.rows.prices(price), self.graph.sizes
        )
        return priced

    def over(self, chosen: Ints) -> Floats:
        """Usage of a choice above capacity, negative where there is room; (rows,)."""
        return self.rows.load(self.usage[self.graph.offsets[:-1] + chosen]) - self.rows.capacity


def positions(known: Ints, wanted: Ints) -> Ints:
    """Index of each number among ascending ones; -1 where it is not among them."""
    if not len(known):
        return np.full(len(wanted), -1)
    place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[place] == wanted, place, -1)


def build(problem: Pairwise) -> Model:
    """Lay a problem out; it has nodes, each with a strategy that is not forbidden."""
    ends = problem.edges.copy()
    loops = ends[:, 0] == ends[:, 1]
    unary = problem.costs.astype(np.float64)
    for edge in np.flatnonzero(loops):
        node, start = ends[edge, 0], problem.edge_offsets[edge]
        first, size = problem.offsets[node], problem.sizes[node]
        diagonal = problem.edge_costs[start : start + size * size : size + 1]
        unary[first : first + size] += np.where(diagonal >= FORBIDDEN, np.inf, diagonal)
    unary[problem.costs >= FORBIDDEN] = np.inf
    # lay out both directions of each edge, parallel edges added up
    edges = np.flatnonzero(~loops)
    tails, heads = problem.edges[edges].T
    keys = np.unique(
        np.concatenate([tails, heads]) * problem.nodes + np.concatenate([heads, tails])
    )
    graph = joined(problem.offsets, unary, *np.divmod(keys, problem.nodes))
    arcs = np.searchsorted(keys, tails * problem.nodes + heads)
    _fill(arcs, edges, problem.edge_offsets, problem.edge_costs, float(FORBIDDEN), graph)
    usage = problem.usages.astype(np.float64)
    rows = memory_rows(problem.intervals, problem.limit)
    blank = Model(graph, usage, rows, index_in_group(problem.sizes))
    return restrict(blank, problem.costs < FORBIDDEN)


def joined(offsets: Ints, unary: Floats, tails: Ints, heads: Ints) -> Graph:
    """The graph of all arcs, sorted by tail, then head; the costs of pairs are 0."""
    back = np.empty(len(tails), dtype=np.int64)
    back[np.lexsort((tails, heads))] = np.arange(len(tails))  # in this order the arcs turned around
    sizes = np.diff(offsets)
    tables = offsets_of(sizes[tails] * sizes[heads])
    starts = np.searchsorted(tails, np.arange(len(offsets)))
    return Graph(offsets, unary, starts, heads, back, tables[:-1], np.zeros(tables[-1]))


@jit
def _fill(arcs: Ints, edges: Ints, first: Ints, costs: Ints, forbidden: float, g: Graph) -> None:
    for k in range(len(edges)):
        arc = arcs[k]
        columns = g.offsets[g.heads[arc] + 1] - g.offsets[g.heads[arc]]
        v = g.heads[g.back[arc]]
        rows = g.offsets[v + 1] - g.offsets[v]
        forward, reverse = g.tables[arc], g.tables[g.back[arc]]
        for p in range(rows):
            for q in range(columns):
                cost = float(costs[first[edges[k]] + p * columns + q])
                if cost >= forbidden:
                    cost = np.inf
                g.entries[forward + p * columns + q] += cost
                g.entries[reverse + q * rows + p] += cost


def restrict(model: Model, keep: Flags) -> Model:
    """The model with the flagged strategies only, at least one a node.

    Nodes with a single strategy left fold into their neighbours.
    """
    graph, tails = model.graph, model.graph.tails
    counts = np.add.reduceat(keep, graph.offsets[:-1], dtype=np.int64)
    offsets = offsets_of(counts)
    arcs = (counts[tails] > 1) & (counts[graph.heads] > 1)
    number = offsets_of(arcs)
    kept = np.flatnonzero(arcs)
    tables = offsets_of(counts[tails[kept]] * counts[graph.heads[kept]])
    picked = np.flatnonzero(keep)
    unary = graph.unary.copy()
    _fold(unary, keep, counts, graph)
    entries = np.empty(tables[-1])
    _copy(entries, tables, kept, tails, keep, graph)
    small = Graph(
        offsets, unary[picked], number[graph.starts], graph.heads[kept], number[graph.back[kept]],
        tables[:-1], entries,
    )  # fmt: skip
    usage, rows = model.usage[picked], model.rows
    least = np.minimum.reduceat(usage, offsets[:-1])
    usage = usage - np.repeat(least, counts)
    return Model(small, usage, rows.less(least, usage, offsets), model.labels[picked])


@jit
def _fold(unary: Floats, keep: Flags, counts: Ints, g: Graph) -> None:
    """Add the tables of nodes with one strategy left to their neighbours' costs.

    A cost between two such nodes goes to the later one.
    """
    for tail in range(len(counts)):
        size = g.offsets[tail + 1] - g.offsets[tail]
        for arc in range(g.starts[tail], g.starts[tail + 1]):
            head = g.heads[arc]
            if counts[head] != 1 or (counts[tail] == 1 and head > tail):
                continue
            width = g.offsets[head + 1] - g.offsets[head]
            single = 0
            while not keep[g.offsets[head] + single]:
                single += 1
            for p in range(size):
                if keep[g.offsets[tail] + p]:
                    unary[g.offsets[tail] + p] += g.entries[g.tables[arc] + p * width + single]


@jit
def _copy(target: Floats, places: Ints, kept: Ints, tails: Ints, keep: Flags, g: Graph) -> None:
    for k in range(len(kept)):
        arc = kept[k]
        u, v = tails[arc], g.heads[arc]
        at = places[k]
        width = g.offsets[v + 1] - g.offsets[v]
        for p in range(g.offsets[u + 1] - g.offsets[u]):
            if not keep[g.offsets[u] + p]:
                continue
            for q in range(width):
                if keep[g.offsets[v] + q]:
                    target[at] = g.entries[g.tables[arc] + p * width + q]
                    at += 1
