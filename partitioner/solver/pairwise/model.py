"""The problem laid out for search: floats, both directions of every edge, rows of memory.

Forbidden strategies are absent, forbidden pairs are infinite, parallel edges are one and no edge
touches a node that has one strategy left. Nodes keep their number; `labels` leads back from a
strategy that is left to the strategy of the problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.problem import FORBIDDEN, Ints, Pairwise
from partitioner.solver.pairwise.rows import Rows, memory_rows

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: What a forbidden pair counts while a choice still has some: far above all else.
CONFLICT = 1e16


class Graph(NamedTuple):
    """Strategies, and every edge as two arcs; the arcs of a node ascend by the other end.

    A named tuple, because compiled functions take one as it is.

    Attributes:
        offsets: First strategy of each node, and the number of all; (nodes + 1,).
        unary: Cost of each strategy, infinite only until `prune`; (strategies,).
        starts: First arc of each node, and the number of all; (nodes + 1,).
        heads: Node that the arc leads to; (arcs,).
        back: The arc of the other direction; (arcs,).
        tables: First entry of the arc's table, (strategies of tail, of head) row-major; (arcs,).
        entries: Cost of each pair; infinite where forbidden.
    """

    offsets: Ints
    unary: Floats
    starts: Ints
    heads: Ints
    back: Ints
    tables: Ints
    entries: Floats

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.offsets) - 1

    @property
    def edges(self) -> int:
        """How many pairs of nodes are joined."""
        return len(self.heads) // 2


@dataclass(frozen=True)
class Model:
    """A graph, what its strategies use, and where they came from.

    Attributes:
        graph: Costs.
        usage: What each strategy uses more than its node's least; (strategies,).
        rows: Times at which memory can bind.
        labels: Strategy of the problem that each strategy stands for; (strategies,).
    """

    graph: Graph
    usage: Floats
    rows: Rows
    labels: Ints

    def original(self, chosen: Ints) -> tuple[int, ...]:
        """The problem's strategies for strategies of the model, one a node."""
        return tuple(self.labels[self.graph.offsets[:-1] + chosen].tolist())

    def within(self, chosen: tuple[int, ...]) -> Ints:
        """The model's strategies for strategies of the problem, -1 where it has not; (nodes,)."""
        nodes = np.arange(self.graph.nodes)
        most = max(int(self.labels.max(initial=0)), max(chosen, default=0)) + 1
        known = np.repeat(nodes, np.diff(self.graph.offsets)) * most + self.labels
        asked = nodes * most + np.array(chosen, dtype=np.int64)
        place = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        return np.where(known[place] == asked, place - self.graph.offsets[:-1], -1)


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
    graph = _graph(problem, unary, np.flatnonzero(~loops))
    labels = np.arange(len(unary)) - np.repeat(problem.offsets[:-1], problem.sizes)
    usage = problem.usages.astype(np.float64)
    blank = Model(graph, usage, memory_rows(problem.intervals, problem.limit), labels)
    return restrict(blank, problem.costs < FORBIDDEN)


def _graph(problem: Pairwise, unary: Floats, edges: Ints) -> Graph:
    """Both directions of each edge, parallel edges added up."""
    low, high = problem.edges[edges].min(axis=1), problem.edges[edges].max(axis=1)
    keys, merged = np.unique(low * problem.nodes + high, return_inverse=True)
    low, high = keys // max(problem.nodes, 1), keys % max(problem.nodes, 1)
    tails, heads = np.concatenate([low, high]), np.concatenate([high, low])
    order = np.lexsort((heads, tails))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    tails, heads = tails[order], heads[order]
    areas = problem.sizes[tails] * problem.sizes[heads]
    tables = np.concatenate([[0], np.cumsum(areas)]).astype(np.int64)
    entries = np.zeros(tables[-1])
    there, count = rank[: len(keys)], len(keys)
    back = rank[(order + count) % (2 * count)] if count else order
    _fill(
        entries, tables, there[merged], rank[count:][merged], edges, problem.edges,
        problem.sizes, problem.edge_offsets, problem.edge_costs, float(FORBIDDEN),
    )  # fmt: skip
    starts = np.searchsorted(tails, np.arange(problem.nodes + 1))
    return Graph(problem.offsets, unary, starts, heads, back, tables[:-1], entries)


@jit
def _fill(
    entries: Floats, tables: Ints, there: Ints, back: Ints, edges: Ints, ends: Ints,
    sizes: Ints, first: Ints, costs: Ints, forbidden: float,
) -> None:  # fmt: skip
    for k in range(len(edges)):
        u, v = ends[edges[k]]
        rows, columns = sizes[u], sizes[v]
        forward = tables[there[k]] if u < v else tables[back[k]]
        reverse = tables[back[k]] if u < v else tables[there[k]]
        for p in range(rows):
            for q in range(columns):
                cost = float(costs[first[edges[k]] + p * columns + q])
                if cost >= forbidden:
                    cost = np.inf
                entries[forward + p * columns + q] += cost
                entries[reverse + q * rows + p] += cost


def restrict(model: Model, keep: Flags) -> Model:
    """The model with the flagged strategies only; single strategies fold into their neighbours.

    Args:
        model: The model.
        keep: One flag a strategy; at least one is set in each node.
    """
    graph = model.graph
    counts = np.add.reduceat(keep, graph.offsets[:-1], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tails = np.repeat(np.arange(graph.nodes), np.diff(graph.starts))
    arcs = (counts[tails] > 1) & (counts[graph.heads] > 1)
    number = np.cumsum(arcs) - 1
    kept = np.flatnonzero(arcs)
    areas = counts[tails[kept]] * counts[graph.heads[kept]]
    tables = np.concatenate([[0], np.cumsum(areas)]).astype(np.int64)
    picked = np.flatnonzero(keep)
    unary = graph.unary.copy()
    _fold(unary, keep, counts, graph)
    entries = np.empty(tables[-1])
    _copy(entries, tables, kept, tails, keep, graph)
    starts = np.concatenate([[0], np.cumsum(arcs)]).astype(np.int64)[graph.starts]
    small = Graph(
        offsets, unary[picked], starts, graph.heads[kept], number[graph.back[kept]], tables[:-1],
        entries,
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
