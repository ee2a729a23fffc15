"""Exact elimination of nodes with at most two neighbours that no memory row sees.

Such a node takes its best strategy whatever its neighbours take, so that its cost is one more cost
of a neighbour, or of the edge between two (nonserial dynamic programming: Bertele and Brioschi,
1972). An edge is only made where it has no more entries than those it replaces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partitioner.solver.pairwise.model import Graph, Model, joined
from partitioner.solver.pairwise.problem import Floats, Ints, offsets_of


@dataclass(frozen=True)
class Step:
    """The elimination of one node.

    Attributes:
        unary: Cost of each of the node's strategies.
        tables: For each neighbour of that moment, the costs of pairs; (node's, neighbour's).
    """

    node: int
    unary: Floats
    tables: tuple[tuple[int, Floats], ...]


@dataclass(frozen=True)
class Folded:
    """A model with fewer nodes open, and the way back."""

    model: Model  #: Eliminated nodes have one strategy left, without meaning.
    steps: tuple[Step, ...]  #: The eliminations, in order.

    def lift(self, chosen: Ints) -> Ints:
        """The best choice of the model before that agrees on the nodes that are left."""
        full = chosen.copy()
        for step in reversed(self.steps):
            cost = step.unary.copy()
            for other, table in step.tables:
                cost += table[:, full[other]]
            full[step.node] = cost.argmin()
        return full


def fold(model: Model) -> Folded:
    """Eliminate all nodes that can be.

    Every strategy of the model has an allowed pair on every edge.
    """
    work = _Work(model)
    todo = [v for v, tables in enumerate(work.near) if work.free[v] and len(tables) <= 2]
    while todo:
        v = todo.pop()
        if work.free[v]:
            todo.extend(w for w in work.eliminate(v) if len(work.near[w]) <= 2)
    return Folded(work.model(), tuple(work.steps))


class _Work:
    """The graph as dictionaries of tables while nodes go."""

    def __init__(self, model: Model) -> None:
        g, sizes = model.graph, model.graph.sizes.tolist()
        self.before = model
        self.unary = np.split(g.unary, g.offsets[1:-1])
        self.near: list[dict[int, Floats]] = [{} for _ in range(g.nodes)]
        for u, v, at in zip(g.tails.tolist(), g.heads.tolist(), g.tables.tolist(), strict=True):
            if u < v:
                table = g.entries[at : at + sizes[u] * sizes[v]].reshape(sizes[u], sizes[v])
                self._join(u, v, table)
        used = np.maximum.reduceat(model.usage, g.offsets[:-1]) > 0
        limited = used & (model.rows.last > model.rows.first)
        self.free = ((g.sizes > 1) & ~limited).tolist()
        self.steps: list[Step] = []
        self.constant = 0.0

    def _join(self, u: int, v: int, table: Floats) -> None:
        self.near[u][v], self.near[v][u] = table, table.T

    def eliminate(self, v: int) -> tuple[int, ...]:
        """Take a node out; its former neighbours that may follow, none if it has to stay."""
        ends = tuple(self.near[v].items())
        if len(ends) == 2 and not self._bridge(v, *ends):
            return ()
        if len(ends) == 1:
            ((w, table),) = ends
            self.unary[w] = self.unary[w] + (self.unary[v][:, None] + table).min(axis=0)
        if not ends:
            self.constant += float(self.unary[v].min())
        for w, _ in ends:
            del self.near[w][v]
        self.steps.append(Step(v, self.unary[v], ends))
        self.near[v], self.free[v] = {}, False
        return tuple(w for w, _ in ends if self.free[w])

    def _bridge(
        self, v: int, first_end: tuple[int, Floats], second_end: tuple[int, Floats]
    ) -> bool:
        """Join the two neighbours of a node, unless that takes more entries than it saves."""
        (a, left), (b, right) = first_end, second_end
        known = self.near[a].get(b)
        if known is None and left.shape[1] * right.shape[1] > left.size + right.size:
            return False
        costs = np.full((left.shape[1], right.shape[1]), np.inf)
        for cost, first, second in zip(self.unary[v], left, right, strict=True):
            np.minimum(costs, (cost + first)[:, None] + second, out=costs)
        self._join(a, b, costs if known is None else known + costs)
        return True

    def model(self) -> Model:
        """The model of the remaining nodes."""
        if not self.steps:
            return self.before
        g, gone = self.before.graph, np.zeros(len(self.free), dtype=np.bool_)
        gone[[step.node for step in self.steps]] = True
        sizes = np.where(gone, 1, g.sizes)
        offsets = offsets_of(sizes)
        keep = np.repeat(~gone, g.sizes)
        keep[g.offsets[:-1]] = True
        unary = np.concatenate(
            [np.zeros(1) if out else costs for out, costs in zip(gone, self.unary, strict=True)]
        )
        unary[offsets[np.flatnonzero(gone)[0]]] = self.constant
        usage = np.where(np.repeat(gone, sizes), 0.0, self.before.usage[keep])
        graph = self._graph(offsets, unary)
        return Model(graph, usage, self.before.rows, self.before.labels[keep])

    def _graph(self, offsets: Ints, unary: Floats) -> Graph:
        pairs = [(u, v) for u, tables in enumerate(self.near) for v in sorted(tables)]
        tails, heads = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
        graph = joined(offsets, unary, tails, heads)
        if pairs:
            np.concatenate([self.near[u][v].ravel() for u, v in pairs], out=graph.entries)
        return graph
