"""Downsets to cut at where a graph has too many: the heads of some orders, and neighbours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from partitioner.solver.formats.piper import Instance
from partitioner.solver.formats.piper_layout import Downset, in_order, needs_of
from partitioner.solver.placement.orders import Net, grow

Order = tuple[int, ...]


def first_orders(instance: Instance) -> list[Order]:
    """Orders of the nodes along the edges, each once.

    Two are grown from either end so that few bytes cross each position; two go by depth, from
    either end (breadth first); one goes depth first.
    """
    arcs = list(instance.edges)
    back = [(v, u) for u, v in arcs]
    index = {v: at for at, v in enumerate(instance.nodes)}
    names = list(instance.nodes)
    nets = [
        Net(tuple(sorted((index[u], index[v]))), size) for (u, v), size in instance.edges.items()
    ]

    def grown(pairs: Iterable[tuple[int, int]]) -> Order:
        positions = grow(len(names), nets, [(index[u], index[v]) for u, v in pairs])
        return tuple(names[at] for at in positions)

    depth, height = _depths(names, arcs), _depths(names[::-1], back)
    placed: dict[int, int] = {}

    def latest(v: int) -> int:
        return -max((placed[u] for u, w in arcs if w == v and u in placed), default=-1)

    def depth_first() -> Order:
        order: list[int] = []
        for v in ordered(names, arcs, latest):
            placed[v] = len(order)
            order.append(v)
        return tuple(order)

    orders = [
        grown(arcs),
        grown(back)[::-1],
        tuple(ordered(names, arcs, lambda v: depth[v])),
        tuple(ordered(names, arcs, lambda v: -height[v])),
        depth_first(),
    ]
    return list(dict.fromkeys(orders))


def ordered(
    nodes: Iterable[int], arcs: Iterable[tuple[int, int]], rank: Callable[[int], float]
) -> Iterator[int]:
    """The nodes along the arcs, of those that may be next the one of the lowest rank.

    A node is ranked once all before it have been yielded.
    """
    inside = list(nodes)
    waiting = dict.fromkeys(inside, 0)
    after: dict[int, list[int]] = {v: [] for v in inside}
    for u, v in arcs:
        if u in waiting and v in waiting:
            waiting[v] += 1
            after[u].append(v)
    ready: list[tuple[float, int]] = []
    for v in inside:
        if not waiting[v]:
            heappush(ready, (rank(v), v))
    while ready:
        _, v = heappop(ready)
        yield v
        for w in after[v]:
            waiting[w] -= 1
            if not waiting[w]:
                heappush(ready, (rank(w), w))


def random_order(instance: Instance, rng: random.Random) -> Order:
    """An order of the nodes along the edges that goes deep at times and wide at times."""
    arcs, names = list(instance.edges), list(instance.nodes)
    depth = _depths(names, arcs)
    bend = {v: rng.random() * max(depth.values()) * rng.choice((0.1, 1.0)) for v in names}
    return tuple(ordered(names, arcs, lambda v: depth[v] + bend[v]))


def heads(order: Sequence[int]) -> tuple[Downset, ...]:
    """The first nodes of an order, for every number of them."""
    return between((), order)


def between(cuts: Sequence[Downset], order: Sequence[int]) -> tuple[Downset, ...]:
    """Some downsets, each a part of the next, and between two the heads of an order."""
    downsets: set[Downset] = {frozenset()}
    head: list[int] = []
    for low, high in zip([frozenset(), *cuts], [*cuts, frozenset(order)], strict=True):
        head += [v for v in order if v in high and v not in low]
        downsets.update(frozenset(head[:many]) for many in range(len(low), len(head) + 1))
    return in_order(downsets)


def around(instance: Instance, cuts: Sequence[Downset], most: int) -> tuple[Downset, ...]:
    """The downsets that are the nearest to some, by nodes that come or go; at most so many."""
    needs = needs_of(instance)
    wanted_by: dict[int, set[int]] = {v: set() for v in instance.nodes}
    for source, target in instance.edges:
        wanted_by[source].add(target)
    nearest: dict[Downset, None] = dict.fromkeys([frozenset(), frozenset(instance.nodes), *cuts])
    ring = list(cuts)
    while ring and len(nearest) < most:
        further: list[Downset] = []
        for cut in ring:
            more = (cut | {v} for v in instance.nodes if v not in cut and needs[v] <= cut)
            fewer = (cut - {v} for v in cut if not wanted_by[v] & cut)
            further += [near for near in (*more, *fewer) if near not in nearest]
        ring = list(dict.fromkeys(further))[: most - len(nearest)]
        nearest |= dict.fromkeys(ring)
    return in_order(nearest)


def _depths(order: Iterable[int], arcs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Longest path to each node, along the arcs; the order is one along them."""
    before: dict[int, list[int]] = {}
    for u, v in arcs:
        before.setdefault(v, []).append(u)
    depth: dict[int, int] = {}
    for v in order:
        depth[v] = 1 + max((depth[u] for u in before.get(v, ())), default=-1)
    return depth
