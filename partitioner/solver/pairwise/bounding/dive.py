"""Read a choice off the dual by decimation: fix a node, pass messages, repeat.

Where many nodes of equal layers share a neighbour, its strategies are often as good as each other
in the messages, but only if all layers follow. So nodes with most neighbours are fixed first, each
to its best, and a few sweeps follow before the next. While fixing costs nothing, more nodes are
fixed at a time (decimation: Mezard, Parisi and Zecchina, Science 297, 2002). Prices move on all the
while, and strategies that no longer fit into memory go.
"""

from __future__ import annotations

import math

import numpy as np

from partitioner.solver.pairwise.bounding.dual import Dual
from partitioner.solver.pairwise.bounding.messages import decode
from partitioner.solver.pairwise.model import Model, restrict
from partitioner.solver.pairwise.problem import Flags, Floats, Ints
from partitioner.solver.pairwise.reducing.reduce import prune
from partitioner.solver.work import now_s

#: Sweeps after each step.
SWEEPS = 5
#: Nodes fixed first, of how many; twice as many each time that costs less than `FREE` of the bound.
FIRST = 1000
FREE = 1e-4


def dive(dual: Dual, keep: Flags, noise: Floats, until: float = math.inf) -> Ints | None:
    """A choice; one strategy a node. Where nothing allowed is left, a forbidden pair is taken.

    Only strategies flagged in `keep` are chosen; `noise` is by how much the neighbours of each node
    count more. The dual does not change. None if the kept strategies contradict each other or
    exceed memory, or if it is later than the second `until` of `now_s`.
    """
    start = _pruned(dual.model, keep)
    if start is None:
        return None
    rest, batch = _within(dual, start), 1
    while (undecided := np.flatnonzero(rest.model.graph.sizes > 1)).size:
        if now_s() > until:
            return None
        degree = (np.diff(rest.model.graph.starts) * (1 + noise))[undecided]
        hubs = undecided[np.argsort(-degree, kind="stable")]  # most neighbours first
        count = max(batch, batch * len(undecided) // FIRST)
        smaller = _fixed(rest, hubs[:count])
        if smaller is None and count > 1:
            batch, smaller = 1, _fixed(rest, hubs[:1])
        if smaller is None:
            smaller = _fixed(rest, hubs[:1], forbid=True)
        if smaller is None:
            chosen = decode(rest.messages, rest.model.priced(rest.price))
            return dual.model.within(rest.model.original(chosen))
        after = _within(rest, smaller)
        batch = 2 * batch if after.bound - rest.bound < FREE * abs(rest.bound) else 1
        rest = after
    chosen = np.zeros(rest.model.graph.nodes, dtype=np.int64)
    return dual.model.within(rest.model.original(chosen))


def _within(dual: Dual, smaller: Model) -> Dual:
    """The dual of a smaller model, a few sweeps after it took over the larger one's."""
    inner = Dual(smaller)
    inner.inherit(dual)
    inner.ascend(SWEEPS)
    return inner


def _fixed(dual: Dual, nodes: Ints, *, forbid: bool = False) -> Model | None:
    """The model once some nodes take their best (or may not); None if that cannot be."""
    graph, belief = dual.model.graph, dual.messages.costs(dual.model.priced(dual.price))
    keep = np.ones(len(belief), dtype=np.bool_)
    for v in nodes:
        first, last = graph.offsets[v : v + 2]
        keep[first:last] = forbid
        keep[first + belief[first:last].argmin()] = not forbid
    return _pruned(dual.model, keep)


def _pruned(model: Model, keep: Flags) -> Model | None:
    smaller = prune(restrict(model, keep))
    return None if smaller is None or (smaller.rows.capacity < 0).any() else smaller
