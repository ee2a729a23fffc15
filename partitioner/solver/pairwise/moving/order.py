"""An order in which nodes are eliminated, with the nodes that are fixed where tables get too large.

The node whose table is smallest goes next (min-weight; Kjaerulff, "Triangulation of graphs", 1990).
Where none is small enough, a node is fixed and leaves the graph.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from partitioner.solver.pairwise.jit import State, draw, jit
from partitioner.solver.pairwise.model import Graph
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
