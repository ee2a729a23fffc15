"""Exact minimum of a pairwise problem without memory, by elimination.

Nodes whose choices an edge makes equal (copies of one block) become one first.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from partitioner.solver.buckets import Answer, Factor, Room, eliminate
from partitioner.solver.pairwise.problem import FORBIDDEN, Floats, Ints, Pairwise


def least_cost(problem: Pairwise, room: Room) -> Answer:
    """The strategies of least cost, usages left aside, and their cost; None: too wide.

    The cost is infinite if all choices are forbidden.
    """
    sizes = problem.sizes.tolist()
    edges = [
        (u, v, _allowed(problem.edge_costs[first:last]).reshape(sizes[u], sizes[v]))
        for (u, v), (first, last) in zip(
            problem.edges.tolist(), pairwise(problem.edge_offsets.tolist()), strict=True
        )
    ]
    leader = _leaders(problem.nodes, edges)
    factors: dict[tuple[int, ...], Floats] = {}

    def add(scope: tuple[int, ...], table: Floats) -> None:
        factors[scope] = factors[scope] + table if scope in factors else table

    for node, (first, last) in enumerate(pairwise(problem.offsets.tolist())):
        add((leader[node],), _allowed(problem.costs[first:last]))
    for u, v, table in edges:
        a, b = leader[u], leader[v]
        if a == b:
            add((a,), np.diagonal(table))
        else:
            add((min(a, b), max(a, b)), table if a < b else table.T)
    sizes = [size if leader[node] == node else 1 for node, size in enumerate(sizes)]
    answer = eliminate([Factor(scope, table) for scope, table in factors.items()], sizes, room)
    if answer is None:
        return None
    chosen, cost = answer
    return tuple(chosen[node] for node in leader), cost


def _allowed(costs: Ints) -> Floats:
    return np.where(costs >= FORBIDDEN, np.inf, costs.astype(np.float64))


def _leaders(nodes: int, edges: list[tuple[int, int, Floats]]) -> list[int]:
    """Find for each node the least one that edges make it equal to."""
    leader = list(range(nodes))

    def root(node: int) -> int:
        while leader[node] != node:
            node = leader[node]
        return node

    for u, v, table in edges:
        square = table.shape[0] == table.shape[1]
        if square and np.array_equal(np.isfinite(table), np.eye(len(table), dtype=bool)):
            least, other = sorted((root(u), root(v)))
            leader[other] = least
    return [root(node) for node in range(nodes)]
