"""Orders of nodes that are worth cutting, since little communication crosses their positions."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partitioner.solver.problem import Problem
from partitioner.solver.stages.graph import StageGraph

if TYPE_CHECKING:
    import networkx as nx

Order = tuple[int, ...]


@dataclass(frozen=True)
class Net:
    """A value: nodes between which it is paid once if they are not together."""

    nodes: tuple[int, ...]  #: The nodes that make and read it, ascending.
    load_s: float  #: Seconds, over all devices, where it is dearest.


def grow(
    count: int,
    nets: Sequence[Net],
    arcs: Iterable[tuple[int, int]],
    first: int | None = None,
) -> Order:
    """An order grown node by node, from the first one if it is given.

    The next node is the one that opens the least communication and closes the most (the one-sided
    minimum linear arrangement heuristic), the one touched last of equals. The order keeps the arcs,
    (before, after) pairs without a cycle.
    """
    growth = _Growth(count, nets, arcs)
    order: list[int] = []
    while len(order) < count:
        node = first if first is not None and not order else growth.next()
        order.append(node)
        growth.place(node, len(order))
    return tuple(order)


class _Growth:
    """The nodes that are not placed yet, by the communication that each would open."""

    def __init__(self, count: int, nets: Sequence[Net], arcs: Iterable[tuple[int, int]]) -> None:
        self.nets = nets
        self.nets_of: list[list[int]] = [[] for _ in range(count)]
        for index, net in enumerate(nets):
            for node in net.nodes:
                self.nets_of[node].append(index)
        self.unplaced = [len(net.nodes) for net in nets]
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.waiting = [0] * count
        for u, v in arcs:
            self.after[u].append(v)
            self.waiting[v] += 1
        self.opens = [sum(nets[index].load_s for index in indices) for indices in self.nets_of]
        self.touched = [0] * count
        self.placed = [False] * count
        self.heap: list[tuple[float, int, int]] = []
        for node in range(count):
            self._push(node)

    def next(self) -> int:
        """The node that opens the least communication and closes the most."""
        while True:
            opens, stamp, node = heapq.heappop(self.heap)
            if not self.placed[node] and (opens, -stamp) == (self.opens[node], self.touched[node]):
                return node

    def place(self, node: int, stamp: int) -> None:
        """Place a node as the `stamp`-th."""
        self.placed[node] = True
        changed = dict.fromkeys(self.after[node])
        for other in self.after[node]:
            self.waiting[other] -= 1
        for index in self.nets_of[node]:
            net = self.nets[index]
            opened = self.unplaced[index] == len(net.nodes)
            self.unplaced[index] -= 1
            nearly_closed = self.unplaced[index] == 1
            if opened or nearly_closed:
                for other in net.nodes:
                    if not self.placed[other]:
                        self.opens[other] -= net.load_s * (opened + nearly_closed)
                        self.touched[other] = stamp
                        changed[other] = None
        for other in changed:
            self._push(other)

    def _push(self, node: int) -> None:
        if not self.waiting[node] and not self.placed[node]:
            heapq.heappush(self.heap, (self.opens[node], -self.touched[node], node))


def first_orders(graph: StageGraph) -> list[Order]:
    """Orders of the nodes, each once.

    Two are grown from either end so that few bytes cross each position; two go by depth, from
    either end (breadth first); one goes depth first.
    """
    import networkx as nx

    names = list(graph.nodes)
    index = {v: at for at, v in enumerate(names)}
    arcs = [(index[u], index[v]) for u, v in graph.edges]
    nets = [
        Net((min(arc), max(arc)), size)
        for arc, size in zip(arcs, graph.edges.values(), strict=True)
    ]
    ahead = grow(len(names), nets, arcs)
    behind = grow(len(names), nets, [(v, u) for u, v in arcs])[::-1]
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


def nets(problem: Problem) -> list[Net]:
    """The values of a problem: its edges, those together that share their items."""
    total = [sum(item.load_s) for item in problem.items]
    nodes: dict[int, set[int]] = {}
    dearest: dict[int, float] = {}
    for edge in problem.edges:
        priced = [items for items in edge.items.values() if items]
        if not priced:
            continue
        key = min(min(items) for items in priced)
        cost = max(sum(total[item] for item in items) for items in priced)
        nodes.setdefault(key, set()).update((edge.u, edge.v))
        dearest[key] = max(dearest.get(key, 0.0), cost)
    return [Net(tuple(sorted(nodes[key])), dearest[key]) for key in sorted(nodes)]


def narrow_orders(problem: Problem) -> list[Order]:
    """The given order and the grown ones, each once.

    A contiguous plan cuts an order into intervals, so it can be no better than its order. They grow
    along the edges, against them, and from either end whatever their direction.
    """
    count = len(problem.nodes)
    values = nets(problem)
    forward = [(edge.u, edge.v) for edge in problem.edges]
    backward = [(v, u) for u, v in forward]
    orders = [
        tuple(range(count)),
        grow(count, values, forward),
        grow(count, values, backward)[::-1],
        grow(count, values, (), first=0),
        grow(count, values, (), first=count - 1)[::-1],
    ]
    return list(dict.fromkeys(orders))


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
