"""Exact minimum of a weighted sum of the loads by eliminating nodes one by one.

    min over plans of  sum_d weight_d * load_d,     memory left aside

is a sum of tables: one a node, one an edge, one for the items that several edges or holds of
the same nodes share. Eliminating node v adds the tables that mention v, takes the minimum over
v's choices, and leaves a table over v's neighbours (bucket elimination, the dynamic programme
over a tree decomposition). Model graphs are narrow, so the tables stay small; when they do not,
the caller is told to use the MILP instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import Edge, Pair, Problem
from partitioner.solver.sites import Site, item_sites

T = TypeVar("T", bound=np.generic)
Floats = npt.NDArray[np.float64]

#: The largest table, in entries, that elimination may make (32 MB).
MAX_TABLE = 4_000_000
#: numpy arrays have at most 64 axes; more two-way nodes than this exceed MAX_TABLE anyway.
MAX_SCOPE = 22


@dataclass(frozen=True)
class Factor:
    """A cost for every combination of choices of the nodes in `scope` (ascending)."""

    scope: tuple[int, ...]
    table: Floats


@dataclass(frozen=True)
class _Step:
    """How a node's choice follows from its neighbours' once theirs are known."""

    node: int
    scope: tuple[int, ...]
    best: npt.NDArray[np.intp]


def min_sum(
    problem: Problem, weights: Sequence[float], byte_price: float = 0.0
) -> tuple[tuple[int, ...], float] | None:
    """The plan of least weighted load and its value; None if the graph is too wide.

    The value is infinite if every plan takes a forbidden pair. With a `byte_price` (per byte
    held during the whole order) plans that hold less are preferred, and the value includes it.
    """
    count = len(problem.nodes)
    prices = [
        sum(w * s for w, s in zip(weights, item.load_s, strict=True))
        + byte_price * sum(item.bytes) * (item.last - item.first + 1) / count
        for item in problem.items
    ]
    return _solve(problem, weights, prices)


def min_bytes(problem: Problem, position: int) -> tuple[tuple[int, ...], float] | None:
    """The plan that holds least at one position, and the mean of its bytes over the devices.

    The mean is a lower bound on the largest peak; None and infinite as of `min_sum`.
    """
    prices = [
        sum(item.bytes) / problem.devices if item.first <= position <= item.last else 0.0
        for item in problem.items
    ]
    return _solve(problem, [0.0] * problem.devices, prices)


def _solve(
    problem: Problem, weights: Sequence[float], prices: Sequence[float]
) -> tuple[tuple[int, ...], float] | None:
    sizes = [len(choices) for choices in problem.nodes]
    factors = _factors(problem, np.array(weights), prices, sizes)
    return None if factors is None else _eliminate(factors, sizes)


def _factors(
    problem: Problem, weights: Floats, prices: Sequence[float], sizes: Sequence[int]
) -> list[Factor] | None:
    factors = [
        Factor((node,), np.array([weights @ np.array(choice.load_s) for choice in choices]))
        for node, choices in enumerate(problem.nodes)
    ]
    alone: dict[int, list[tuple[Pair, float]]] = {}  # by edge: items that it alone triggers
    shared: dict[tuple[int, ...], Floats] = {}
    for cost, sites in zip(prices, item_sites(problem), strict=True):
        if not sites or cost == 0:
            continue
        if len(sites) == 1 and sites[0].edge is not None:
            alone.setdefault(sites[0].edge, []).extend((pair, cost) for pair in sites[0].pairs)
            continue
        scope = tuple(sorted({node for site in sites for node in _nodes(problem, site)}))
        if math.prod(sizes[node] for node in scope) > MAX_TABLE or len(scope) > MAX_SCOPE:
            return None
        on = np.zeros([1] * len(scope), dtype=bool)
        for site in sites:
            on = on | _spread(_site_table(problem, site), _nodes(problem, site), scope)
        shared[scope] = shared.get(scope, np.zeros(1)) + cost * on
    for scope, table in shared.items():
        factors.append(Factor(scope, np.broadcast_to(table, [sizes[node] for node in scope])))
    factors += [
        Factor((edge.u, edge.v), _edge_table(edge, alone.get(index, [])))
        for index, edge in enumerate(problem.edges)
    ]
    return factors


def _edge_table(edge: Edge, costs: Sequence[tuple[Pair, float]]) -> Floats:
    """What an edge alone costs, by the choices of its ends."""
    by_class = np.zeros(_shape(edge))
    for pair, cost in costs:
        by_class[pair] += cost
    for pair in edge.forbidden:
        by_class[pair] = math.inf
    return by_class[np.ix_(edge.out_class, edge.in_class)]


def _nodes(problem: Problem, site: Site) -> tuple[int, ...]:
    if site.edge is not None:
        return problem.edges[site.edge].u, problem.edges[site.edge].v
    assert site.hold is not None
    return (problem.holds[site.hold].node,)


def _site_table(problem: Problem, site: Site) -> npt.NDArray[np.bool_]:
    """Which choices of the site's nodes trigger it."""
    if site.edge is not None:
        return _on(problem.edges[site.edge], site.pairs)
    (node,) = _nodes(problem, site)
    on = np.zeros(len(problem.nodes[node]), dtype=bool)
    on[list(site.choices)] = True
    return on


def _on(edge: Edge, pairs: Iterable[Pair]) -> npt.NDArray[np.bool_]:
    """Which choices of the edge's ends meet in one of the pairs."""
    by_class = np.zeros(_shape(edge), dtype=bool)
    by_class[tuple(zip(*pairs, strict=True))] = True
    return by_class[np.ix_(edge.out_class, edge.in_class)]


def _shape(edge: Edge) -> tuple[int, int]:
    """Room for all classes, those that no choice takes too."""
    pairs = [*edge.items, *edge.forbidden]
    outs, ins = [o for o, _ in pairs], [i for _, i in pairs]
    return max([*edge.out_class, *outs]) + 1, max([*edge.in_class, *ins]) + 1


def _spread(table: npt.NDArray[T], own: Sequence[int], scope: Sequence[int]) -> npt.NDArray[T]:
    """The table with an axis of size 1 for each node of the scope that it does not mention."""
    sizes = dict(zip(own, table.shape, strict=True))
    return table.reshape([sizes.get(node, 1) for node in scope])


def _eliminate(factors: list[Factor], sizes: Sequence[int]) -> tuple[tuple[int, ...], float] | None:
    touching: dict[int, set[int]] = {node: set() for node in range(len(sizes))}
    pool = dict(enumerate(factors))
    for index, factor in pool.items():
        for node in factor.scope:
            touching[node].add(index)
    steps: list[_Step] = []
    constant = 0.0
    while touching:
        node, scope = _cheapest(touching, pool, sizes)
        shape = [sizes[n] for n in scope]
        if math.prod(shape) > MAX_TABLE or len(scope) > MAX_SCOPE:
            return None
        total = np.zeros(shape)
        for index in sorted(touching.pop(node)):
            factor = pool.pop(index)
            total = total + _spread(factor.table, factor.scope, scope)
            for other in factor.scope:
                if other != node:
                    touching[other].discard(index)
        axis = scope.index(node)
        rest = scope[:axis] + scope[axis + 1 :]
        steps.append(_Step(node, rest, total.argmin(axis=axis)))
        least = total.min(axis=axis)
        if not rest:
            constant += float(least)
            continue
        index = len(factors) + len(steps)
        pool[index] = Factor(rest, least)
        for other in rest:
            touching[other].add(index)
    return _decode(steps, len(sizes)), constant


def _cheapest(
    touching: dict[int, set[int]], pool: dict[int, Factor], sizes: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """The node whose elimination makes the smallest table, with that table's scope."""
    best: tuple[int, tuple[int, ...]] | None = None
    best_size = math.inf
    for node, indices in touching.items():
        scope = {node}.union(*(pool[index].scope for index in indices))
        size = math.prod(sizes[n] for n in scope)
        if size < best_size:
            best, best_size = (node, tuple(sorted(scope))), size
    assert best is not None
    return best


def _decode(steps: Sequence[_Step], count: int) -> tuple[int, ...]:
    chosen = [0] * count
    for step in reversed(steps):
        chosen[step.node] = int(step.best[tuple(chosen[node] for node in step.scope)])
    return tuple(chosen)
