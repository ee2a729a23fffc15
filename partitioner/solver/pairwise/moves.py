"""Moves on a choice of strategies that keep within memory.

Two kinds of move. All nodes but a few that stay are set to their best (`wide`). And two choices are
crossed: the nodes in which they differ fall into connected parts that do not touch, so that each
part can be taken over on its own (partition crossover: Whitley, Hains and Howe, "A hybrid genetic
algorithm for the traveling salesman problem using generalized partition crossover", PPSN 2010).

The price of memory enters the node costs, so that a move may pay for room that another one needs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partitioner.solver.pairwise.jit import jit, seeded
from partitioner.solver.pairwise.model import CONFLICT, Graph, Model
from partitioner.solver.pairwise.problem import Floats, Ints
from partitioner.solver.pairwise.wide import best_given_cutset


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
        self.restart(chosen)
        self._random = seeded(seed)
        self._space = Space(*np.full((3, model.graph.nodes), -1, dtype=np.int64))

    def restart(self, chosen: Ints) -> None:
        """Go on from another choice."""
        self.chosen, self._over = chosen.copy(), self.model.over(chosen)

    @property
    def excess(self) -> float:
        """Largest usage above capacity; not positive if memory suffices, -inf without rows."""
        return float(self._over.max(initial=-np.inf))

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
        rows = self.model.rows
        _cross(
            other, self.chosen, priced, self.model.usage, rows.first, rows.last, self._over,
            self._space, self.model.graph,
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
def _swap(
    size: int, chosen: Ints, usage: Floats, first: Ints, last: Ints, over: Floats, s: Space,
    g: Graph,
) -> None:  # fmt: skip
    """Take the proposed strategies of the nodes in order, and propose those that they had."""
    for k in range(size):
        v = s.order[k]
        at, p, q = g.offsets[v], chosen[v], s.choice[v]
        over[first[v] : last[v]] += usage[at + q] - usage[at + p]
        chosen[v], s.choice[v] = q, p


@jit
def _take(
    size: int, most: float, chosen: Ints, usage: Floats, first: Ints, last: Ints, over: Floats,
    s: Space, g: Graph,
) -> bool:  # fmt: skip
    """Move the nodes in order to their proposed strategies, unless a row is above `most` then."""
    _swap(size, chosen, usage, first, last, over, s, g)
    for v in s.order[:size]:
        for row in range(first[v], last[v]):
            if over[row] > most:
                _swap(size, chosen, usage, first, last, over, s, g)
                return False
    return True


@jit
def _cross(
    other: Ints, chosen: Ints, priced: Floats, usage: Floats, first: Ints, last: Ints, over: Floats,
    s: Space, g: Graph,
) -> None:  # fmt: skip
    most = max(0.0, over.max()) if len(over) else 0.0
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
        if gain > 0 and _take(size, most, chosen, usage, first, last, over, s, g) and most > 0:
            most = max(0.0, over.max())


@jit
def _pair(arc: int, p: int, q: int, g: Graph) -> float:
    width = g.offsets[g.heads[arc] + 1] - g.offsets[g.heads[arc]]
    return float(min(g.entries[g.tables[arc] + p * width + q], CONFLICT))
