"""Orders of nodes that are worth cutting, since little communication crosses their positions."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from partitioner.solver.stages.graph import StageGraph

if TYPE_CHECKING:
    import networkx as nx

Order = tuple[int, ...]


def grow(count: int, arcs: Mapping[tuple[int, int], float]) -> Order:
    """An order grown node by node, in which few bytes cross each position.

    The next node is the one that opens the fewest bytes and closes the most (the one-sided minimum
    linear arrangement heuristic), the one touched last of equals.

    Args:
        count: Nodes, numbered from 0.
        arcs: Bytes of each (before, after) pair that the order keeps; without a cycle.
    """
    near: list[dict[int, float]] = [{} for _ in range(count)]
    waiting = [0] * count  # for nodes before
    for (u, v), size in arcs.items():
        near[u][v] = near[v][u] = size
        waiting[v] += 1
    opens = [sum(sizes.values()) for sizes in near]
    order: dict[int, None] = {}
    heap = [(opens[node], 0, node) for node in range(count) if not waiting[node]]
    heapq.heapify(heap)
    while heap:
        *_, node = heapq.heappop(heap)
        if node in order:
            continue
        order[node] = None
        for other, size in near[node].items():
            waiting[other] -= (node, other) in arcs
            if other not in order:
                opens[other] -= 2 * size
                if not waiting[other]:
                    heapq.heappush(heap, (opens[other], -len(order), other))
    return tuple(order)


def first_orders(graph: StageGraph) -> list[Order]:
    """Orders of the nodes, each once.

    Two are grown from either end so that few bytes cross each position; two go by depth, from
    either end (breadth first); one goes depth first.
    """
    import networkx as nx

    names = list(graph.nodes)
    index = {v: at for at, v in enumerate(names)}
    arcs = {(index[u], index[v]): size for (u, v), size in graph.edges.items()}
    ahead = grow(len(names), arcs)
    behind = grow(len(names), {(v, u): size for (u, v), size in arcs.items()})[::-1]
    flow = _flow(graph)
    depth, height = _depths(flow), _depths(flow.reverse())
    orders = [
        tuple(names[at] for at in ahead),
        tuple(names[at] for at in behind),
        tuple(sorted(names, key=lambda v: (depth[v], index[v]))),
        tuple(sorted(names, key=lambda v: (-height[v], index[v]))),
        tuple(nx.dfs_postorder_nodes(flow))[::-1],
    ]
    return list(dict.fromkeys(orders))


def random_order(graph: StageGraph, rng: random.Random) -> Order:
    """An order of the nodes that goes deep at times and wide at times."""
    import networkx as nx

    flow = _flow(graph)
    depth = _depths(flow)
    most = max(depth.values())
    bend = {v: depth[v] + rng.random() * most * rng.choice((0.1, 1.0)) for v in graph.nodes}
    return tuple(nx.lexicographical_topological_sort(flow, bend.__getitem__))


def _flow(graph: StageGraph) -> nx.DiGraph[int]:
    import networkx as nx

    flow: nx.DiGraph[int] = nx.DiGraph()
    flow.add_nodes_from(graph.nodes)
    flow.add_edges_from(graph.edges)
    return flow


def _depths(flow: nx.DiGraph[int]) -> dict[int, int]:
    """Edges of the longest path to each node."""
    import networkx as nx

    levels = enumerate(nx.topological_generations(flow))
    return {v: depth for depth, level in levels for v in level}


#: Frontier orders that are grown, and the nodes of all of them together: 0.1 s.
STARTS = 16
MOST_GROWN = 8000


def frontier_order(count: int, pairs: Iterable[tuple[int, int]]) -> Order:
    """An order in which few nodes wait for one another, the best of those grown from some starts.

    Tables over the nodes that wait for others (`placement.sweep`) are as large as two to the power
    of their number.

    The next node is the one that leaves the fewest waiting, of equals the one nearest to the
    node that came last. The nodes of a pair wait for each other.
    """
    near: list[set[int]] = [set() for _ in range(count)]
    for u, v in pairs:
        near[u].add(v)
        near[v].add(u)
    starts = max(1, min(STARTS, MOST_GROWN // count))
    step = max(1, count // starts)
    grown = (_grow_frontier(near, start) for start in range(0, count, step))
    return min(grown, key=lambda entry: entry[1])[0]


def _grow_frontier(near: Sequence[set[int]], first: int) -> tuple[Order, int]:
    """The order, and the entries of its tables."""
    place: dict[int, int] = {}
    unplaced = [len(neighbours) for neighbours in near]
    waiting: set[int] = set()

    def rank(node: int) -> tuple[int, int, int]:
        """Open nodes once this one is placed, age of its latest placed neighbour, and its index."""
        closed = sum(other in waiting and unplaced[other] == 1 for other in near[node])
        latest = max((place[n] for n in near[node] if n in place), default=-1)
        return len(waiting) + (unplaced[node] > 0) - closed, -latest, node

    cells, node = 0, first
    while True:
        place[node] = len(place)
        waiting.add(node)
        cells += 1 << len(waiting)
        for other in near[node]:
            unplaced[other] -= 1
        waiting = {n for n in waiting if unplaced[n]}
        if len(place) == len(near):
            return tuple(place), cells
        ahead = {n for w in waiting for n in near[w] if n not in place}
        node = min(ahead or (n for n in range(len(near)) if n not in place), key=rank)
