"""Read a choice off the messages without running into forbidden pairs.

Nodes are decided in order, each by its cost, its earlier neighbours' choices and the messages of
the later ones. After each decision strategies of undecided nodes that are left without an allowed
pair go, until nothing changes (maintaining arc consistency, Sabin and Freuder, ECAI 1994): so the
search sees in time which strategies a decision rules out far away.
"""

from __future__ import annotations

import numpy as np

from partitioner.solver.pairwise.bounding.messages import Messages, decide, split
from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.model import CONFLICT, Graph
from partitioner.solver.pairwise.problem import Flags, Floats, Ints


def decode(messages: Messages, unary: Floats) -> Ints:
    """A choice at these node costs; one strategy a node.

    Where nothing allowed is left, a forbidden pair is taken.
    """
    chosen = np.zeros(messages.graph.nodes, dtype=np.int64)
    alive = np.ones(len(unary), dtype=np.bool_)
    _decode(messages.inbox, messages.places, unary, chosen, alive, messages.graph)
    return chosen


@jit
def _decode(
    inbox: Floats, places: Ints, unary: Floats, chosen: Ints, alive: Flags, g: Graph
) -> None:
    queue, queued = np.empty(len(chosen), dtype=np.int64), np.zeros(len(chosen), dtype=np.bool_)
    for v in range(len(chosen)):
        first, size = g.offsets[v], g.offsets[v + 1] - g.offsets[v]
        theta = np.empty(size)
        decide(theta, v, split(v, g), inbox, places, unary, chosen, g)
        for p in range(size):
            if not alive[first + p]:
                theta[p] += CONFLICT / 2
        chosen[v] = theta.argmin()
        for p in range(size):
            alive[first + p] = p == chosen[v]
        _propagate(v, alive, queue, queued, g)


@jit
def _propagate(v: int, alive: Flags, queue: Ints, queued: Flags, g: Graph) -> None:
    """Clear strategies that a node's decision leaves without an allowed pair, at any distance."""
    count = len(queue)
    queue[0], queued[v] = v, True
    head, waiting = 0, 1
    while waiting:
        u = queue[head % count]
        head += 1
        waiting -= 1
        queued[u] = False
        for arc in range(g.starts[u], g.starts[u + 1]):
            w = g.heads[arc]
            if w > v and _filter(u, g.back[arc], w, alive, g) and not queued[w]:
                queue[(head + waiting) % count] = w
                queued[w] = True
                waiting += 1


@jit
def _filter(u: int, arc: int, w: int, alive: Flags, g: Graph) -> bool:
    """Clear strategies of w that no strategy of u allows; whether some went and some are left."""
    width = g.offsets[u + 1] - g.offsets[u]
    gone, left = 0, 0
    for q in range(g.offsets[w + 1] - g.offsets[w]):
        if not alive[g.offsets[w] + q]:
            continue
        row = g.tables[arc] + q * width
        allowed = False
        for p in range(width):
            if alive[g.offsets[u] + p] and g.entries[row + p] < np.inf:
                allowed = True
                break
        if allowed:
            left += 1
        else:
            alive[g.offsets[w] + q] = False
            gone += 1
    return gone > 0 and left > 0
