"""Exact minimum of a pairwise problem without memory, by elimination.

Nodes whose choices an edge makes equal (copies of one block) become one first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from partitioner.solver.buckets import Factor, Floats, Room, eliminate
from partitioner.solver.pairwise.problem import FORBIDDEN, Ints, Pairwise


def least_cost(problem: Pairwise, room: Room) -> tuple[tuple[int, ...], float] | None:
    """The strategies of least cost, usages left aside, and their cost; None: too wide.

    The cost is infinite if all choices are forbidden.
    """
    tables = [_table(problem, edge) for edge in range(len(problem.edges))]
    leader = _leaders(problem, tables)
    factors = [
        Factor((leader[node],), _allowed(problem.costs[first:last]))
        for node, (first, last) in enumerate(
            zip(problem.offsets[:-1].tolist(), problem.offsets[1:].tolist(), strict=True)
        )
    ]
    for (u, v), table in zip(problem.edges.tolist(), tables, strict=True):
        one, other = leader[u], leader[v]
        if one == other:
            factors.append(Factor((one,), np.diagonal(table)))
        else:
            scope = (min(one, other), max(one, other))
            factors.append(Factor(scope, table if one < other else table.T))
    sizes = [
        size if leader[node] == node else 1 for node, size in enumerate(problem.sizes.tolist())
    ]
    found = eliminate(_summed(factors), sizes, room)
    if found is None:
        return None
    chosen, cost = found
    return tuple(chosen[node] for node in leader), cost


def _table(problem: Pairwise, edge: int) -> Floats:
    u, v = problem.edges[edge]
    first, last = problem.edge_offsets[edge : edge + 2]
    return _allowed(problem.edge_costs[first:last]).reshape(problem.sizes[u], problem.sizes[v])


def _allowed(costs: Ints) -> Floats:
    return np.where(costs >= FORBIDDEN, np.inf, costs.astype(np.float64))


def _leaders(problem: Pairwise, tables: Sequence[Floats]) -> list[int]:
    """For each node the least one that edges make it equal to."""
    leader = list(range(problem.nodes))

    def root(node: int) -> int:
        while leader[node] != node:
            node = leader[node]
        return node

    for (u, v), table in zip(problem.edges.tolist(), tables, strict=True):
        square = table.shape[0] == table.shape[1]
        if square and np.array_equal(np.isfinite(table), np.eye(len(table), dtype=bool)):
            one, other = sorted((root(u), root(v)))
            leader[other] = one
    return [root(node) for node in range(problem.nodes)]


def _summed(factors: Sequence[Factor]) -> list[Factor]:
    """One factor a scope."""
    found: dict[tuple[int, ...], Floats] = {}
    for factor in factors:
        known = found.get(factor.scope)
        found[factor.scope] = factor.table if known is None else known + factor.table
    return [Factor(scope, table) for scope, table in found.items()]
