"""Moves on a choice of strategies that keep within memory.

Three kinds of move. The trees of an induced forest in a ball of nodes are set to their best, each
if it gains. All nodes but a few that stay are set to their best (`wide`). And two choices are
crossed: the nodes in which they differ fall into connected parts that do not touch, so that each
part can be taken over on its own (partition crossover: Whitley, Hains and Howe, "A hybrid genetic
algorithm for the traveling salesman problem using generalized partition crossover", PPSN 2010).

The price of memory enters the node costs, so that a move may pay for room that another one needs.
"""

from __future__ import annotations

import numpy as np

from partitioner.solver.pairwise.jit import State, draw, jit, seeded
from partitioner.solver.pairwise.model import CONFLICT, Graph, Model
from partitioner.solver.pairwise.moving.forest import Space, grow, lay, plan, space
from partitioner.solver.pairwise.moving.ledger import Ledger, add, ledger
from partitioner.solver.pairwise.moving.wide import best_given_cutset
from partitioner.solver.pairwise.problem import Floats, Ints

#: Arcs of one node that the search for a ball follows.
FANOUT = 40


class Mover:
    """A choice of strategies, `chosen`, one a node, and moves that change it in place.

    Moves take the cost of each strategy with the price of memory, `priced`; (strategies,). With
    `free` memory may become short; its price alone speaks for it.
    """

    def __init__(self, model: Model, chosen: Ints, seed: int) -> None:
        self.model = model
        self.chosen, self._ledger = chosen.copy(), ledger(model, chosen)
        self._random = seeded(seed)
        self._space = space(model.graph)
        self._open = np.flatnonzero(model.graph.sizes > 1)

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

    def improve(self, priced: Floats, rounds: int, ball: int, *, free: bool = False) -> None:
        """Set trees in so many random balls of nodes, or in the whole graph, to their best."""
        if len(self._open):
            _improve(
                rounds, ball, free, self._random, self._open, self.chosen, priced,
                self.model.usage, self._ledger, self._space, self.model.graph,
            )  # fmt: skip

    def widen(self, priced: Floats, tournament: int, *, free: bool = False) -> None:
        """Set all nodes to their best but a random few, which stay; parts that gain are taken.

        For each node that stays, the one with most neighbours of `tournament` drawn ones does.
        """
        best = best_given_cutset(self.chosen, priced, tournament, self._random, self.model.graph)
        if free:
            self.restart(best)
        else:
            self.cross(best, priced)

    def around(self, centre: int, nodes: int) -> Ints:
        """The open nodes nearest to one in the graph, at most so many."""
        count = _ball(self._random, centre, nodes, self._space, self.model.graph)
        return self._space.block[:count].copy()

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
def _improve(
    rounds: int, ball: int, free: bool, state: State, pool: Ints, chosen: Ints, priced: Floats,
    usage: Floats, book: Ledger, s: Space, g: Graph,
) -> None:  # fmt: skip
    for _ in range(rounds):
        count = len(pool)
        if ball < count:
            count = _ball(state, pool[draw(state, len(pool))], ball, s, g)
        else:
            s.block[:count] = pool
        _shuffle(state, s.block, count)
        members = grow(count, s, g)
        for k in range(members):
            if s.parent[s.block[k]] == -1:
                size = lay(s.block[k], s, g)
                if plan(size, chosen, priced, s, g) > 0:
                    _take(size, free, chosen, usage, book, s, g)
        for k in range(members):
            v = s.block[k]
            s.parent[v] = s.inside[v] = s.root[v] = s.seen[v] = -1


@jit
def _ball(state: State, centre: int, most: int, s: Space, g: Graph) -> int:
    """The open nodes nearest to one, by breadth first search over a few arcs of each."""
    s.block[0] = centre
    s.near[centre] = 1
    count, done = 1, 0
    while done < count and count < most:
        v = s.block[done]
        done += 1
        degree = g.starts[v + 1] - g.starts[v]
        for k in range(min(degree, FANOUT)):
            w = g.heads[g.starts[v] + (k if degree <= FANOUT else draw(state, degree))]
            if s.near[w] == -1 and count < most:
                s.near[w] = 1
                s.block[count] = w
                count += 1
    for k in range(count):
        s.near[s.block[k]] = -1
    return count


@jit
def _shuffle(state: State, block: Ints, count: int) -> None:
    for k in range(count - 1):
        other = k + draw(state, count - k)
        block[k], block[other] = block[other], block[k]


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
