"""The problem reduced exactly, and relaxed: with memory limited at a few times only, and folded.

A strategy goes if a neighbour leaves it no allowed pair (arc consistency), if it does not fit
beside the least usage of all other nodes, or if another one of its node is never worse and uses no
more: for strategies p and q of node v

    cost_v[q] - cost_v[p] + sum over neighbours w of min_r (cost_vw[q, r] - cost_vw[p, r])  >=  0

(Goldstein's criterion of dead-end elimination, Biophysical Journal 66, 1994; Pareto dominance is
the special case in which every term is at least 0).

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

import math
from dataclasses import dataclass, replace

import numpy as np

from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.model import Graph, Model, joined, restrict
from partitioner.solver.pairwise.problem import Flags, Floats, Ints, offsets_of

#: Comparisons of two strategies of one node on all tables are not tried above this many entries.
MAX_COMPARED = 200_000_000


def reduce(model: Model) -> Model | None:
    """The model without strategies that are not needed; None if a node has none left."""
    while (consistent := prune(model)) is not None:
        model = consistent
        inside = (model.rows.last > model.rows.first).astype(np.float64)
        usage = model.usage * np.repeat(inside, model.graph.sizes)
        keep = np.ones(len(usage), dtype=np.bool_)
        _dominated(keep, usage, float(MAX_COMPARED), model.graph)
        if keep.all():
            return model
        model = restrict(model, keep)
    return None


def prune(model: Model) -> Model | None:
    """The model without strategies that forbidden pairs, or memory, rule out; None if too few."""
    while True:
        room = np.maximum(model.rows.room(), 0.0)  # short rows are for the caller to see
        keep = np.isfinite(model.graph.unary)
        keep &= model.usage <= np.repeat(room, model.graph.sizes)
        if not _consistent(keep, model.graph):
            return None
        if keep.all():
            return model
        model = restrict(model, keep)


@jit
def _consistent(keep: Flags, g: Graph) -> bool:
    """Clear the flags of strategies that an edge allows no pair; false if a node loses all."""
    changed = True
    while changed:
        changed = False
        for v in range(len(g.offsets) - 1):
            left = 0
            for p in range(g.offsets[v], g.offsets[v + 1]):
                if keep[p] and not _supported(keep, v, p - g.offsets[v], g):
                    keep[p] = False
                    changed = True
                left += keep[p]
            if left == 0:
                return False
    return True


@jit
def _supported(keep: Flags, v: int, p: int, g: Graph) -> bool:
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        width = g.offsets[w + 1] - g.offsets[w]
        row = g.tables[arc] + p * width
        allowed = False
        for r in range(width):
            if keep[g.offsets[w] + r] and g.entries[row + r] < np.inf:
                allowed = True
                break
        if not allowed:
            return False
    return True


@jit
def _dominated(keep: Flags, usage: Floats, most: float, g: Graph) -> None:
    for v in range(len(g.offsets) - 1):
        first, count = g.offsets[v], g.offsets[v + 1] - g.offsets[v]
        area = 0
        for arc in range(g.starts[v], g.starts[v + 1]):
            area += g.offsets[g.heads[arc] + 1] - g.offsets[g.heads[arc]]
        if float(area) * count * count > most:
            continue
        for q in range(count):
            for p in range(count):
                if p == q or not keep[first + p] or usage[first + p] > usage[first + q]:
                    continue
                if _never_worse(keep, v, p, q, g):
                    keep[first + q] = False
                    break


@jit
def _never_worse(keep: Flags, v: int, p: int, q: int, g: Graph) -> bool:
    slack = g.unary[g.offsets[v] + q] - g.unary[g.offsets[v] + p]
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        width = g.offsets[w + 1] - g.offsets[w]
        least = math.inf
        for r in range(width):
            other = g.entries[g.tables[arc] + q * width + r]
            if keep[g.offsets[w] + r] and other < np.inf:
                least = min(least, other - g.entries[g.tables[arc] + p * width + r])
        slack += least
        if slack == -np.inf:
            return False
    return bool(slack >= 0)


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
        if len(ends) == 2:  # they are joined, unless that takes more entries than it saves
            (a, left), (b, right) = ends
            known = self.near[a].get(b)
            if known is None and left.shape[1] * right.shape[1] > left.size + right.size:
                return ()
            costs = np.full((left.shape[1], right.shape[1]), np.inf)
            for cost, first, second in zip(self.unary[v], left, right, strict=True):
                np.minimum(costs, (cost + first)[:, None] + second, out=costs)
            self._join(a, b, costs if known is None else known + costs)
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

    def model(self) -> Model:
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
