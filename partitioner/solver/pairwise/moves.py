"""Moves on a choice of strategies that keep within memory.

Two kinds of move. All nodes but a few that stay are set to their best: they are eliminated in an
order that keeps tables small (Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; the node
whose table is smallest goes next: Kjaerulff, "Triangulation of graphs", 1990). Where every table
would be above the limit, a node keeps its strategy (a cutset; Dechter, "Enhancement schemes for
constraint processing", Artificial Intelligence 41, 1990), drawn at random in favour of many
neighbours: another call fixes other nodes. The rest is solved exactly. And two choices are
crossed: the nodes in which they differ fall into connected parts that do not touch, so that each
part can be taken over on its own (partition crossover: Whitley, Hains and Howe, "A hybrid genetic
algorithm for the traveling salesman problem using generalized partition crossover", PPSN 2010).

The price of memory enters the node costs, so that a move may pay for room that another one needs.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np

from partitioner.solver.pairwise.jit import State, draw, jit, seeded
from partitioner.solver.pairwise.model import CONFLICT, Graph, Model
from partitioner.solver.pairwise.problem import Floats, Ints

#: States of a node while the order is made.
WAITING, ORDERED, FIXED = 0, 1, 2


class Order(NamedTuple):
    """An order of elimination."""

    nodes: Ints  #: Nodes in order; (eliminated,).
    place: Ints  #: Position of each node in it; -1 where it is fixed; (nodes,).
    first: Ints  #: First entry of each position's scope; (eliminated + 1,).
    scope: Ints  #: Nodes on which the message of a position depends, the last eliminated first.


@jit
def eliminated_order(most: float, work: float, tournament: int, state: State, g: Graph) -> Order:
    """An order, the same for the same graph and state of the draws, which changes.

    The largest table has at most 2^most entries, all tables `work`. For each node that is fixed
    `tournament` ones are drawn: the one with most neighbours is.
    """
    status, logs, first, length, pool = _adjacency(g)
    weight, heap = _weights(status, logs, first, length, pool)
    waiting = np.flatnonzero(status == WAITING)
    nodes, place = np.empty(len(waiting), dtype=np.int64), np.full(len(status), -1, dtype=np.int64)
    room, mark = length.copy(), place.copy()
    scope, starts = (
        np.empty(4 * len(waiting) + 64, dtype=np.int64),
        np.zeros(len(waiting) + 1, dtype=np.int64),
    )
    left, top, done, total = len(waiting), len(pool), 0, 0.0
    while heap:
        key, v = heapq.heappop(heap)
        if v < 0 or status[v] != WAITING or key != weight[v]:
            continue
        if key > most or total + 2.0**key > work:
            heapq.heappush(heap, (key, v))
            c, left = _crowded(tournament, left, waiting, status, length, state)
            status[c] = FIXED
            for k in range(first[c], first[c] + length[c]):
                w = pool[k]
                _drop(w, c, first, length, pool)
                weight[w] = _weigh(w, logs, first, length, pool)
                heapq.heappush(heap, (weight[w], w))
            continue
        status[v], nodes[done], place[v] = ORDERED, v, done
        total += 2.0**key
        near = pool[first[v] : first[v] + length[v]].copy()
        scope = _room(scope, starts[done], len(near))
        scope[starts[done] : starts[done] + len(near)] = near
        starts[done + 1] = starts[done] + len(near)
        done += 1
        for w in near:
            _drop(w, v, first, length, pool)
            need = length[w] + len(near)
            if need > room[w]:
                pool = _room(pool, top, 2 * need)
                pool[top : top + length[w]] = pool[first[w] : first[w] + length[w]]
                first[w], room[w] = top, 2 * need
                top += 2 * need
            _join(w, near, mark, first, length, pool)
            weight[w] = _weigh(w, logs, first, length, pool)
            heapq.heappush(heap, (weight[w], w))
    return _sorted(nodes[:done], place, starts[: done + 1], scope)


@jit
def _weights(
    status: Ints, logs: Floats, first: Ints, length: Ints, pool: Ints
) -> tuple[Floats, list[tuple[float, int]]]:
    """The log2 of each node's table, and a heap of them."""
    weight, heap = np.zeros(len(status)), [(0.0, -1)]  # an entry tells the compiler the type
    for v in range(len(status)):
        if status[v] == WAITING:
            weight[v] = _weigh(v, logs, first, length, pool)
            heap.append((weight[v], v))
    heapq.heapify(heap)
    return weight, heap


@jit
def _weigh(v: int, logs: Floats, first: Ints, length: Ints, pool: Ints) -> float:
    total = logs[v]
    for k in range(first[v], first[v] + length[v]):
        total += logs[pool[k]]
    return float(total)


@jit
def _crowded(
    tournament: int, left: int, waiting: Ints, status: Ints, length: Ints, state: State
) -> tuple[int, int]:
    """The node with most neighbours of some waiting ones drawn at random; how many may be drawn."""
    best, most = -1, -1
    for _ in range(tournament):
        at = draw(state, left)
        while status[waiting[at]] != WAITING:
            left -= 1
            waiting[at] = waiting[left]
            at = draw(state, left)
        if length[waiting[at]] > most:
            best, most = waiting[at], length[waiting[at]]
    return best, left


@jit
def _room(array: Ints, used: int, more: int) -> Ints:
    """The array, or a longer copy if there is no room for more."""
    if used + more <= len(array):
        return array
    longer = np.empty(2 * len(array) + more, dtype=np.int64)
    longer[:used] = array[:used]
    return longer


@jit
def _join(w: int, near: Ints, mark: Ints, first: Ints, length: Ints, pool: Ints) -> None:
    """Make all of some nodes but itself neighbours of a node."""
    mark[w] = w
    for k in range(first[w], first[w] + length[w]):
        mark[pool[k]] = w
    for x in near:
        if mark[x] != w:
            pool[first[w] + length[w]] = x
            length[w] += 1


@jit
def _sorted(nodes: Ints, place: Ints, starts: Ints, scope: Ints) -> Order:
    """Scopes without fixed nodes, the last eliminated first."""
    first = np.zeros(len(starts), dtype=np.int64)
    kept = 0
    for k in range(len(nodes)):
        begin = kept
        for i in range(starts[k], starts[k + 1]):
            w = scope[i]
            if place[w] < 0:
                continue
            at = kept
            while at > begin and place[scope[at - 1]] < place[w]:
                scope[at] = scope[at - 1]
                at -= 1
            scope[at] = w
            kept += 1
        first[k + 1] = kept
    return Order(nodes, place, first, scope[:kept].copy())


@jit
def _adjacency(g: Graph) -> tuple[Ints, Floats, Ints, Ints, Ints]:
    """Status, log2 of the size, and the list of free neighbours of each node."""
    count = len(g.offsets) - 1
    status = np.full(count, FIXED, dtype=np.int64)
    logs = np.zeros(count)
    for v in range(count):
        size = g.offsets[v + 1] - g.offsets[v]
        if size > 1:
            status[v] = WAITING
            logs[v] = np.log2(size)
    first, length = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    pool = np.empty(2 * len(g.heads) + 16, dtype=np.int64)
    top = 0
    for v in range(count):
        first[v] = top
        if status[v] != WAITING:
            continue
        for arc in range(g.starts[v], g.starts[v + 1]):
            if status[g.heads[arc]] == WAITING:
                pool[top] = g.heads[arc]
                top += 1
        length[v] = top - first[v]
    return status, logs, first, length, pool


@jit
def _drop(w: int, v: int, first: Ints, length: Ints, pool: Ints) -> None:
    k = first[w]
    while pool[k] != v:
        k += 1
    length[w] -= 1
    pool[k] = pool[first[w] + length[w]]


#: Entries of the largest table, and of all tables of one call, the eliminated node included.
TABLE, WORK = 20_000, 50_000_000


def best_given_cutset(
    chosen: Ints, priced: Floats, tournament: int, state: State, graph: Graph
) -> Ints:
    """A choice that is best among all that agree with the fixed nodes; one strategy a node.

    Fixed nodes keep `chosen`; on ties all others keep it too. `priced` is the cost of each
    strategy, price of memory included. The state of the draws changes, see `eliminated_order`.
    """
    order = eliminated_order(math.log2(TABLE), float(WORK), tournament, state, graph)
    best: Ints = _eliminate(chosen, priced, order, graph)
    return best


@jit
def _eliminate(chosen: Ints, priced: Floats, o: Order, g: Graph) -> Ints:
    count = len(o.nodes)
    sizes, places = np.empty(count, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    child, following = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    widest = 1
    for k in range(count):
        size = 1
        for i in range(o.first[k], o.first[k + 1]):
            size *= g.offsets[o.scope[i] + 1] - g.offsets[o.scope[i]]
        sizes[k] = size
        places[k + 1] = places[k] + size
        v = o.nodes[k]
        widest = max(widest, size * (g.offsets[v + 1] - g.offsets[v]))
        if o.first[k + 1] > o.first[k]:
            up = o.place[o.scope[o.first[k + 1] - 1]]
            following[k], child[up] = child[up], k
    messages, table = np.empty(places[count]), np.empty(widest)
    steps = np.zeros(64, dtype=np.int64)
    for k in range(count):
        width = g.offsets[o.nodes[k] + 1] - g.offsets[o.nodes[k]]
        costs = table[: sizes[k] * width]
        _gather(costs, k, chosen, priced, messages, places, child, following, steps, o, g)
        out = messages[places[k] : places[k + 1]]
        for row in range(sizes[k]):
            least = costs[row * width]
            for p in range(1, width):
                least = min(least, costs[row * width + p])
            out[row] = least
    best = chosen.copy()
    for k in range(count - 1, -1, -1):
        _settle(best, table, k, priced, messages, places, child, following, o, g)
    return best


@jit
def _start(costs: Floats, v: int, chosen: Ints, priced: Floats, o: Order, g: Graph) -> None:
    """Cost of a node's strategies given its fixed neighbours."""
    costs[:] = priced[g.offsets[v] : g.offsets[v + 1]]
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        if o.place[w] >= 0:
            continue
        at = g.tables[g.back[arc]] + chosen[w] * len(costs)
        row = g.entries[at : at + len(costs)]
        for p in range(len(costs)):
            costs[p] += min(row[p], CONFLICT)


@jit
def _gather(
    table: Floats, k: int, chosen: Ints, priced: Floats, messages: Floats, places: Ints,
    child: Ints, following: Ints, steps: Ints, o: Order, g: Graph,
) -> None:  # fmt: skip
    """All costs that end at a position, over its scope (outer) and its node (inner)."""
    v = o.nodes[k]
    width = g.offsets[v + 1] - g.offsets[v]
    _start(table[:width], v, chosen, priced, o, g)
    for row in range(1, len(table) // width):
        table[row * width : row * width + width] = table[:width]
    scope = o.scope[o.first[k] : o.first[k + 1]]
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        if o.place[w] > k:
            for i in range(len(scope)):
                steps[i] = width if scope[i] == w else 0
            at = g.tables[g.back[arc]]
            area = width * (g.offsets[w + 1] - g.offsets[w])
            _spread(table, g.entries[at : at + area], scope, steps, width, g)
    c = child[k]
    while c >= 0:
        inner = o.scope[o.first[c] : o.first[c + 1]]
        step, j = width, len(inner) - 2
        for i in range(len(scope) - 1, -1, -1):
            steps[i] = 0
            if j >= 0 and scope[i] == inner[j]:
                steps[i] = step
                step *= g.offsets[scope[i] + 1] - g.offsets[scope[i]]
                j -= 1
        _spread(table, messages[places[c] : places[c + 1]], scope, steps, width, g)
        c = following[c]


@jit
def _spread(table: Floats, part: Floats, scope: Ints, steps: Ints, width: int, g: Graph) -> None:
    """Add a table over some nodes of the scope to the table over all."""
    digits = np.zeros(len(scope), dtype=np.int64)
    at = 0
    for row in range(len(table) // width):
        base = row * width
        for p in range(width):
            table[base + p] += min(part[at + p], CONFLICT)
        i = len(scope) - 1
        while i >= 0:
            digits[i] += 1
            at += steps[i]
            size = g.offsets[scope[i] + 1] - g.offsets[scope[i]]
            if digits[i] < size:
                break
            at -= steps[i] * size
            digits[i] = 0
            i -= 1


@jit
def _settle(
    best: Ints, table: Floats, k: int, priced: Floats, messages: Floats, places: Ints,
    child: Ints, following: Ints, o: Order, g: Graph,
) -> None:  # fmt: skip
    """Choose for a position given all later ones; on ties its strategy stays."""
    v = o.nodes[k]
    width = g.offsets[v + 1] - g.offsets[v]
    costs = table[:width]
    _start(costs, v, best, priced, o, g)
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        if o.place[w] > k:
            at = g.tables[g.back[arc]] + best[w] * width
            for p in range(width):
                costs[p] += min(g.entries[at + p], CONFLICT)
    c = child[k]
    while c >= 0:
        inner = o.scope[o.first[c] : o.first[c + 1] - 1]
        at, step = places[c], width
        for i in range(len(inner) - 1, -1, -1):
            at += step * best[inner[i]]
            step *= g.offsets[inner[i] + 1] - g.offsets[inner[i]]
        for p in range(width):
            costs[p] += min(messages[at + p], CONFLICT)
        c = following[c]
    for p in range(width):
        if costs[p] < costs[best[v]]:
            best[v] = p


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
