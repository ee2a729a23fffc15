"""Read a choice off the dual by decimation: fix a node, let the others hear of it, go on.

Where many nodes of equal layers share a neighbour, its strategies are often as good as each other
in the messages, but only if all layers follow. So nodes with most neighbours are fixed first, each
to its best, and a few sweeps follow before the next. While fixing costs nothing, more nodes are
fixed at a time (decimation: Mezard, Parisi and Zecchina, Science 297, 2002). Prices move on all the
while, and strategies that no longer fit into memory go.
"""

from __future__ import annotations

import math
import time

import numpy as np

from partitioner.solver.pairwise.decode import decode
from partitioner.solver.pairwise.dual import Dual
from partitioner.solver.pairwise.model import Flags, Floats, Model, restrict
from partitioner.solver.pairwise.problem import Ints
from partitioner.solver.pairwise.reduce import prune

#: Sweeps after each step.
SWEEPS = 5
#: Nodes fixed first, of how many; twice as many each time that costs less than `FREE` of the bound.
FIRST = 1000
FREE = 1e-4


def dive(dual: Dual, keep: Flags, noise: Floats, until: float = math.inf) -> Ints | None:
    """A choice; one strategy a node. Where nothing allowed is left, a forbidden pair is taken.

    Args:
        dual: Messages and prices of the model; not changed.
        keep: Strategies that may be chosen; (strategies,).
        noise: By how much the neighbours of a node count more; (nodes,).
        until: Monotonic second at which to give up.

    Returns:
        The choice; None if the kept strategies contradict each other or exceed memory, or if time
        is up.
    """
    start = _pruned(dual.model, keep)
    if start is None:
        return None
    own, batch = _within(dual, start), 1
    while (undecided := np.flatnonzero(np.diff(own.model.graph.offsets) > 1)).size:
        if time.monotonic() > until:
            return None
        count = max(batch, batch * len(undecided) // FIRST)
        smaller = _fixed(own, undecided, count, noise)
        if smaller is None and count > 1:
            batch, smaller = 1, _fixed(own, undecided, 1, noise)
        if smaller is None:
            smaller = _forbidden(own, undecided, noise)
        if smaller is None:
            now = own.messages
            chosen = decode(now.inbox, now.places, own.priced(own.price), own.model.graph)
            return dual.model.within(own.model.original(chosen))
        after = _within(own, smaller)
        batch = 2 * batch if after.bound - own.bound < FREE * abs(own.bound) else 1
        own = after
    chosen = np.zeros(own.model.graph.nodes, dtype=np.int64)
    return dual.model.within(own.model.original(chosen))


def _within(dual: Dual, smaller: Model) -> Dual:
    """The dual of a smaller model, a few sweeps after it became so."""
    own = Dual(smaller)
    own.inherit(dual)
    own.ascend(SWEEPS)
    return own


def _fixed(dual: Dual, undecided: Ints, count: int, noise: Floats) -> Model | None:
    """The model once the nodes with most neighbours take their best; None if that cannot be."""
    graph, belief = dual.model.graph, dual.messages.costs(dual.priced(dual.price))
    degree = (np.diff(graph.starts) * (1 + noise))[undecided]
    keep = np.ones(len(belief), dtype=np.bool_)
    for v in undecided[np.argsort(-degree, kind="stable")[:count]]:
        own = slice(graph.offsets[v], graph.offsets[v + 1])
        keep[own] = False
        keep[own.start + belief[own].argmin()] = True
    return _pruned(dual.model, keep)


def _forbidden(dual: Dual, undecided: Ints, noise: Floats) -> Model | None:
    """The model if the node with most neighbours does not take its best; None if that cannot be."""
    graph, belief = dual.model.graph, dual.messages.costs(dual.priced(dual.price))
    v = undecided[np.argmax((np.diff(graph.starts) * (1 + noise))[undecided])]
    keep = np.ones(len(belief), dtype=np.bool_)
    keep[graph.offsets[v] + belief[graph.offsets[v] : graph.offsets[v + 1]].argmin()] = False
    return _pruned(dual.model, keep)


def _pruned(model: Model, keep: Flags) -> Model | None:
    smaller = prune(restrict(model, keep))
    return None if smaller is None or (smaller.rows.capacity < 0).any() else smaller
