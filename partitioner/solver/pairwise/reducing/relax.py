"""The problem with memory limited at a few times only, reduced and folded.

Leaving rows out is a relaxation: its bounds bound the problem. Most nodes are live in none of
the rows that matter, and without memory most of those go exactly. Rows that a choice breaks are
added later (Dantzig, Fulkerson and Johnson, "Solution of a large-scale traveling-salesman
problem", 1954, did so with cuts).

A node of at most two neighbours that no row sees takes its best strategy whatever these take, so
that its cost is one more cost of a neighbour, or of the edge between two (nonserial dynamic
programming: Bertele and Brioschi, 1972). An edge is only made where it has no more entries than
those it replaces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from partitioner.solver.pairwise.model import Model, joined
from partitioner.solver.pairwise.problem import Flags, Floats, Ints, offsets_of
from partitioner.solver.pairwise.reducing.reduce import reduce


@dataclass(frozen=True)
class Step:
    """The elimination of one node."""

    node: int
    unary: Floats  #: Cost of each of the node's strategies.
    #: For each neighbour of that moment, the costs of pairs; (node's, neighbour's).
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
    """Eliminate all nodes that can be; every strategy has an allowed pair on every edge."""
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
        pairs = [(u, v) for u, tables in enumerate(self.near) for v in sorted(tables)]
        tails, heads = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
        graph = joined(offsets, unary, tails, heads)
        if pairs:
            np.concatenate([self.near[u][v].ravel() for u, v in pairs], out=graph.entries)
        return Model(graph, usage, self.before.rows, self.before.labels[keep])


@dataclass(frozen=True)
class Relaxation:
    """A smaller model whose least cost is not above that of the whole."""

    whole: Model
    before: Model  #: The whole with the kept rows only, reduced.
    folded: Folded  #: That, nodes of few neighbours eliminated.
    model: Model  #: That, reduced once more: the model that is searched.

    def lift(self, chosen: Ints) -> Ints:
        """A choice of the whole model from one of the small one, of the same cost."""
        middle = self.folded.lift(self.before.within(self.model.original(chosen)))
        return self.whole.within(self.before.original(middle))

    def lower(self, chosen: Ints) -> Ints:
        """A choice of the small model; -1 where it has not the strategy; (nodes,)."""
        return self.model.within(self.whole.original(chosen))

    def price(self, price: Floats) -> Floats:
        """Prices of the small model's rows as prices of the whole model's; (whole rows,)."""
        full = np.zeros(len(self.whole.rows.capacity))
        full[np.searchsorted(self.whole.rows.number, self.model.rows.number)] = price
        return full


def relax(whole: Model, keep: Flags) -> Relaxation | None:
    """The relaxation to the flagged rows; None if even that has no choice."""
    before = reduce(replace(whole, rows=whole.rows.only(keep)))
    if before is None:
        return None
    folded = fold(before)
    model = reduce(folded.model)
    return None if model is None else Relaxation(whole, before, folded, model)
