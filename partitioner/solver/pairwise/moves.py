"""Moves on a choice of strategies that keep within memory.

Two kinds of move. All nodes but a few that stay are set to their best (`wide`). And two choices are
crossed: the nodes in which they differ fall into connected parts that do not touch, so that each
part can be taken over on its own (partition crossover: Whitley, Hains and Howe, "A hybrid genetic
algorithm for the traveling salesman problem using generalized partition crossover", PPSN 2010).

The price of memory enters the node costs, so that a move may pay for room that another one needs.
Memory in use is kept in a segment tree with range addition and a global maximum: an addition to
consecutive rows costs O(log rows), the maximum is read in O(1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partitioner.solver.pairwise.jit import jit, seeded
from partitioner.solver.pairwise.model import CONFLICT, Graph, Model
from partitioner.solver.pairwise.problem import Floats, Ints
from partitioner.solver.pairwise.wide import best_given_cutset


class Ledger(NamedTuple):
    """Usage less capacity of the memory rows."""

    first: Ints  #: First row in which each node is live; (nodes,).
    last: Ints  #: One past its last row; (nodes,).
    #: Largest excess below each tree node; the root is entry 1, the leaves are the second half.
    tree: Floats
    pending: Floats  #: Sum of the additions to all rows below each tree node.


def ledger(model: Model, chosen: Ints) -> Ledger:
    """The ledger of a choice; the root is -inf where there is no row."""
    excess = model.over(chosen)
    leaves = 1 << max(0, len(excess) - 1).bit_length()
    tree, pending = np.full(2 * leaves, -np.inf), np.zeros(2 * leaves)
    tree[leaves : leaves + len(excess)] = excess
    _fill(tree)
    return Ledger(model.rows.first, model.rows.last, tree, pending)


@jit
def _fill(tree: Floats) -> None:
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])


@jit
def add(book: Ledger, node: int, value: float) -> None:
    """Add a value to the rows in which a node is live."""
    leaves = len(book.tree) // 2
    low, high = book.first[node] + leaves, book.last[node] + leaves
    if value == 0.0 or low >= high:
        return
    ends = (low >> 1, (high - 1) >> 1)
    while low < high:
        if low & 1:
            book.tree[low] += value
            book.pending[low] += value
            low += 1
        if high & 1:
            high -= 1
            book.tree[high] += value
            book.pending[high] += value
        low >>= 1
        high >>= 1
    for start in ends:
        above = start
        while above >= 1:
            below = max(book.tree[2 * above], book.tree[2 * above + 1])
            book.tree[above] = below + book.pending[above]
            above >>= 1


class Space(NamedTuple):
    """Working space, one entry a node; flags are -1 between calls."""

    order: Ints  #: Nodes of the part in hand.
    choice: Ints  #: Strategies proposed.
    near: Ints  #: Flags of a search.


class Mover:
    """A choice of strategies, `chosen`, one a node, and moves that change it in place.

    Moves take the cost of each strategy with the price of memory, `priced`; (strategies,). With
    `free` memory may become short; its price alone speaks for it.
    """

    def __init__(self, model: Model, chosen: Ints, seed: int) -> None:
        self.model = model
        self.chosen, self._ledger = chosen.copy(), ledger(model, chosen)
        self._random = seeded(seed)
        self._space = Space(*np.full((3, model.graph.nodes), -1, dtype=np.int64))

    def restart(self, chosen: Ints) -> None:
        """Go on from another choice."""
        self.chosen, self._ledger = chosen.copy(), ledger(self.model, chosen)

    @property
    def excess(self) -> float:
        """Largest usage above capacity; not positive if memory suffices."""
        return float(self._ledger.tree[1])

    def cost(self) -> float:
        """Cost of the choice; each forbidden pair counts `CONFLICT`."""
        return _cost(self.chosen, self.model.graph)

    @property
    def feasible(self) -> bool:
        """Tell whether memory suffices and no pair is forbidden."""
        return self.excess <= 0 and self.cost() < CONFLICT

    def widen(self, priced: Floats, tournament: int, *, free: bool = False) -> None:
        """Set all nodes to their best but a random few, which stay; parts that gain are taken.

        For each node that stays, the one with most neighbours of `tournament` drawn ones does.
        """
        best = best_given_cutset(self.chosen, priced, tournament, self._random, self.model.graph)
        if free:
            self.restart(best)
        else:
            self.cross(best, priced)

    def cross(self, other: Ints, priced: Floats) -> None:
        """Take over the parts of another choice that gain."""
        _cross(
            other, self.chosen, priced, self.model.usage, self._ledger, self._space,
            self.model.graph,
        )  # fmt: skip


@jit
def _cost(chosen: Ints, g: Graph) -> float:
    total = 0.0
    for v in range(len(chosen)):
        total += g.unary[g.offsets[v] + chosen[v]]
        for arc in range(g.starts[v], g.starts[v + 1]):
            w = g.heads[arc]
            if w > v:
                width = g.offsets[w + 1] - g.offsets[w]
                total += min(g.entries[g.tables[arc] + chosen[v] * width + chosen[w]], CONFLICT)
    return total


@jit
def _take(
    size: int, free: bool, chosen: Ints, usage: Floats, book: Ledger, s: Space, g: Graph
) -> None:
    """Move the nodes in order to their proposed strategies, unless memory is then shorter."""
    allowed = max(0.0, book.tree[1])
    for k in range(size):
        v = s.order[k]
        add(book, v, usage[g.offsets[v] + s.choice[v]] - usage[g.offsets[v] + chosen[v]])
    fits = free or book.tree[1] <= allowed
    for k in range(size):
        v = s.order[k]
        if fits:
            chosen[v] = s.choice[v]
        else:
            add(book, v, usage[g.offsets[v] + chosen[v]] - usage[g.offsets[v] + s.choice[v]])


@jit
def _cross(
    other: Ints, chosen: Ints, priced: Floats, usage: Floats, book: Ledger, s: Space, g: Graph
) -> None:
    for v in range(len(chosen)):
        s.choice[v] = other[v]
        s.near[v] = 1 if other[v] != chosen[v] else -1
    for v in range(len(chosen)):
        if s.near[v] != 1:
            continue
        s.order[0], s.near[v] = v, 2
        size, done = 1, 0
        gain = 0.0
        while done < size:
            u = s.order[done]
            done += 1
            gain += priced[g.offsets[u] + chosen[u]] - priced[g.offsets[u] + other[u]]
            for arc in range(g.starts[u], g.starts[u + 1]):
                w = g.heads[arc]
                if s.near[w] == 1:
                    s.order[size], s.near[w] = w, 2
                    size += 1
                if s.near[w] != 2 or u < w:
                    target = other[w] if s.near[w] == 2 else chosen[w]
                    gain += _pair(arc, chosen[u], chosen[w], g) - _pair(arc, other[u], target, g)
        for k in range(size):
            s.near[s.order[k]] = -1
        if gain > 0:
            _take(size, False, chosen, usage, book, s, g)


@jit
def _pair(arc: int, p: int, q: int, g: Graph) -> float:
    width = g.offsets[g.heads[arc] + 1] - g.offsets[g.heads[arc]]
    return float(min(g.entries[g.tables[arc] + p * width + q], CONFLICT))
