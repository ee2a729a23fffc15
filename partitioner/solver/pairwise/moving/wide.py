"""The best strategies of most nodes at once, a few fixed: elimination within a table limit.

Nodes are eliminated in an order that keeps tables small (Bertele and Brioschi, "Nonserial Dynamic
Programming", 1972). Where every table would be above the limit, a node keeps its strategy (a
cutset; Dechter, "Enhancement schemes for constraint processing", Artificial Intelligence 41, 1990),
drawn at random in favour of many neighbours: another call fixes other nodes. The rest is solved
exactly given the fixed nodes. Forests are the case of tables with two nodes.
"""

from __future__ import annotations

import math

import numpy as np

from partitioner.solver.pairwise.jit import State, jit
from partitioner.solver.pairwise.model import CONFLICT, Graph
from partitioner.solver.pairwise.moving.order import Order, eliminated_order
from partitioner.solver.pairwise.problem import Floats, Ints

#: Entries of the largest table, and of all tables of one call, the eliminated node included.
TABLE, WORK = 20_000, 50_000_000


def best_given_cutset(
    chosen: Ints, priced: Floats, tournament: int, state: State, graph: Graph
) -> Ints:
    """A choice that is best among all that agree with the fixed nodes; one strategy a node.

    Fixed nodes keep `chosen`; on ties all others keep it too. `priced` is the cost of each
    strategy, price of memory included. For each node that is fixed `tournament` ones are drawn: the
    one with most neighbours is. The state of the draws changes.
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
