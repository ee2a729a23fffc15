"""Exact presolve: strategies that some optimum does without.

A strategy goes if a neighbour leaves it no allowed pair (arc consistency), if it does not fit
beside the least usage of all other nodes, or if another one of its node is never worse and uses no
more: for strategies p and q of node v

    cost_v[q] - cost_v[p] + sum over neighbours w of min_r (cost_vw[q, r] - cost_vw[p, r])  >=  0

(Goldstein's criterion of dead-end elimination, Biophysical Journal 66, 1994; Pareto dominance is
the special case in which every term is at least 0).
"""

from __future__ import annotations

import math

import numpy as np

from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.model import Graph, Model, restrict
from partitioner.solver.pairwise.problem import Flags, Floats

#: Comparisons of two strategies of one node on all tables are not tried above this many entries.
MAX_COMPARED = 200_000_000


def reduce(model: Model) -> Model | None:
    """The model without strategies that are not needed; None if a node has none left."""
    while (consistent := prune(model)) is not None:
        model = consistent
        inside = (model.rows.last > model.rows.first).astype(np.float64)
        usage = model.usage * np.repeat(inside, model.graph.sizes)
        keep = np.ones(len(usage), dtype=np.bool_)
        _dominated(keep, usage, float(MAX_COMPARED), model.graph)
        if keep.all():
            return model
        model = restrict(model, keep)
    return None


def prune(model: Model) -> Model | None:
    """The model without strategies that forbidden pairs, or memory, rule out; None if too few."""
    while True:
        room = np.maximum(model.rows.room(), 0.0)  # short rows are for the caller to see
        keep = np.isfinite(model.graph.unary)
        keep &= model.usage <= np.repeat(room, model.graph.sizes)
        if not _consistent(keep, model.graph):
            return None
        if keep.all():
            return model
        model = restrict(model, keep)


@jit
def _consistent(keep: Flags, g: Graph) -> bool:
    """Clear the flags of strategies that an edge allows no pair; false if a node loses all."""
    changed = True
    while changed:
        changed = False
        for v in range(len(g.offsets) - 1):
            left = 0
            for p in range(g.offsets[v], g.offsets[v + 1]):
                if keep[p] and not _supported(keep, v, p - g.offsets[v], g):
                    keep[p] = False
                    changed = True
                left += keep[p]
            if left == 0:
                return False
    return True


@jit
def _supported(keep: Flags, v: int, p: int, g: Graph) -> bool:
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        width = g.offsets[w + 1] - g.offsets[w]
        row = g.tables[arc] + p * width
        allowed = False
        for r in range(width):
            if keep[g.offsets[w] + r] and g.entries[row + r] < np.inf:
                allowed = True
                break
        if not allowed:
            return False
    return True


@jit
def _dominated(keep: Flags, usage: Floats, most: float, g: Graph) -> None:
    for v in range(len(g.offsets) - 1):
        first, count = g.offsets[v], g.offsets[v + 1] - g.offsets[v]
        area = 0
        for arc in range(g.starts[v], g.starts[v + 1]):
            area += g.offsets[g.heads[arc] + 1] - g.offsets[g.heads[arc]]
        if float(area) * count * count > most:
            continue
        for q in range(count):
            for p in range(count):
                if p == q or not keep[first + p] or usage[first + p] > usage[first + q]:
                    continue
                if _never_worse(keep, v, p, q, g):
                    keep[first + q] = False
                    break


@jit
def _never_worse(keep: Flags, v: int, p: int, q: int, g: Graph) -> bool:
    slack = g.unary[g.offsets[v] + q] - g.unary[g.offsets[v] + p]
    for arc in range(g.starts[v], g.starts[v + 1]):
        w = g.heads[arc]
        width = g.offsets[w + 1] - g.offsets[w]
        least = math.inf
        for r in range(width):
            other = g.entries[g.tables[arc] + q * width + r]
            if keep[g.offsets[w] + r] and other < np.inf:
                least = min(least, other - g.entries[g.tables[arc] + p * width + r])
        slack += least
        if slack == -np.inf:
            return False
    return bool(slack >= 0)
