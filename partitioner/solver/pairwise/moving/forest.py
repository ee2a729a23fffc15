"""The best strategies of an induced forest, the other nodes fixed.

Nodes are taken in a given order into a set in which no cycle closes; the set's best strategies
given the rest follow exactly from min-sum dynamic programming (Hamze and de Freitas, "From fields
to trees", UAI 2004).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.model import CONFLICT, Graph
from partitioner.solver.pairwise.problem import Floats, Ints


class Space(NamedTuple):
    """Working space, one entry a node (`belief`: a strategy); flags are -1 between calls."""

    block: Ints  #: Nodes in hand.
    order: Ints  #: Nodes of one tree, from its root outwards.
    parent: Ints  #: The arc to the parent, stored as -3 - arc; -2 at a root.
    root: Ints  #: Union-find over the forest.
    inside: Ints  #: 1 in the forest.
    seen: Ints  #: Last node that met a tree.
    choice: Ints  #: Strategies proposed.
    near: Ints  #: Flags of a search.
    belief: Floats  #: Least cost of the subtree below each strategy.


def space(graph: Graph) -> Space:
    """Empty working space for a graph."""
    a, b, c, d, e, f, g, h = (np.full(graph.nodes, -1, dtype=np.int64) for _ in range(8))
    return Space(a, b, c, d, e, f, g, h, np.zeros(len(graph.unary)))


@jit
def grow(count: int, s: Space, g: Graph) -> int:
    """Keep, at the front of the block, the nodes that close no cycle; their number."""
    kept = 0
    for k in range(count):
        v = s.block[k]
        if not _joins(v, s, g):
            continue
        s.root[v], s.inside[v] = v, 1
        for arc in range(g.starts[v], g.starts[v + 1]):
            if s.inside[g.heads[arc]] == 1:
                s.root[_find(s.root, g.heads[arc])] = v
        s.block[kept] = v
        kept += 1
    return kept


@jit
def _joins(v: int, s: Space, g: Graph) -> bool:
    for arc in range(g.starts[v], g.starts[v + 1]):
        if s.inside[g.heads[arc]] == 1:
            top = _find(s.root, g.heads[arc])
            if s.seen[top] == v:
                return False
            s.seen[top] = v
    return True


@jit
def _find(root: Ints, v: int) -> int:
    while root[v] != v:
        root[v] = root[root[v]]
        v = root[v]
    return v


@jit
def lay(top: int, s: Space, g: Graph) -> int:
    """Put the nodes of a tree in order from its root outwards; their number."""
    s.order[0] = top
    s.parent[top] = -2
    count, done = 1, 0
    while done < count:
        v = s.order[done]
        done += 1
        for arc in range(g.starts[v], g.starts[v + 1]):
            w = g.heads[arc]
            if s.inside[w] == 1 and s.parent[w] == -1:
                s.parent[w] = -3 - g.back[arc]
                s.order[count] = w
                count += 1
    return count


@jit
def plan(size: int, chosen: Ints, priced: Floats, s: Space, g: Graph) -> float:
    """Write the best strategies of the tree in order to `choice`; the cost that they save."""
    before = 0.0
    for k in range(size):
        before += _local(s.order[k], chosen, priced, s, g)
    for k in range(size - 1, 0, -1):
        _pass_up(s.order[k], -3 - s.parent[s.order[k]], s, g)
    top = s.order[0]
    belief = s.belief[g.offsets[top] : g.offsets[top + 1]]
    best = belief.argmin()
    s.choice[top] = best if belief[best] < belief[chosen[top]] else chosen[top]
    gain = before - belief[best]
    if gain <= 1e-9 * abs(before):
        return 0.0
    for k in range(1, size):
        _pass_down(s.order[k], -3 - s.parent[s.order[k]], chosen, s, g)
    return float(gain)


@jit
def _local(v: int, chosen: Ints, priced: Floats, s: Space, g: Graph) -> float:
    """Start a node's beliefs with its fixed costs; the cost of its choice and its parent's arc."""
    belief = s.belief[g.offsets[v] : g.offsets[v + 1]]
    belief[:] = priced[g.offsets[v] : g.offsets[v + 1]]
    parent = 0.0
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        if s.inside[w] == -1:
            at = g.tables[g.back[arc]] + chosen[w] * len(belief)
            row = g.entries[at : at + len(belief)]
            for p in range(len(belief)):
                belief[p] += min(CONFLICT, row[p])
        elif s.parent[v] == -3 - arc:
            width = g.offsets[w + 1] - g.offsets[w]
            parent = min(g.entries[g.tables[arc] + chosen[v] * width + chosen[w]], CONFLICT)
    return float(belief[chosen[v]] + parent)


@jit
def _pass_up(v: int, arc: int, s: Space, g: Graph) -> None:
    """Add the least cost of a node's subtree to each strategy of the parent."""
    up = g.heads[arc]
    belief = s.belief[g.offsets[v] : g.offsets[v + 1]]
    above = s.belief[g.offsets[up] : g.offsets[up + 1]]
    best = np.full(len(above), np.inf)
    for p in range(len(belief)):
        at = g.tables[arc] + p * len(above)
        row = g.entries[at : at + len(above)]
        for q in range(len(above)):
            pair = min(CONFLICT, row[q])
            value = belief[p] + pair
            best[q] = min(best[q], value)
    for q in range(len(above)):
        above[q] += best[q]


@jit
def _pass_down(v: int, arc: int, chosen: Ints, s: Space, g: Graph) -> None:
    """Choose for a node given its parent's choice; on ties its strategy stays."""
    belief = s.belief[g.offsets[v] : g.offsets[v + 1]]
    at = g.tables[g.back[arc]] + s.choice[g.heads[arc]] * len(belief)
    row = g.entries[at : at + len(belief)]
    best = chosen[v]
    least = belief[best] + min(row[best], CONFLICT)
    for p in range(len(belief)):
        value = belief[p] + min(row[p], CONFLICT)
        if value < least:
            best, least = p, value
    s.choice[v] = best
