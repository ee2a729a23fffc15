"""Orders of the nodes in which few seconds of communication cross each position.

A contiguous plan cuts an order into intervals, so it can be no better than its order. The
orders here are grown greedily: the next node is the one that opens the least communication and
closes the most (the one-sided minimum linear arrangement heuristic), the one touched last of
equals. Grown along the edges, against them, and from either end whatever their direction.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partitioner.solver.problem import Problem

Order = tuple[int, ...]


@dataclass(frozen=True)
class Net:
    """A value: nodes between which it is paid once if they are not together.

    Attributes:
        nodes: Who makes and reads it, ascending.
        load_s: Seconds, over all devices, where it is dearest.
    """

    nodes: tuple[int, ...]
    load_s: float


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
    """The given order and the grown ones, each once."""
    count = len(problem.nodes)
    found = nets(problem)
    ahead = [(edge.u, edge.v) for edge in problem.edges]
    back = [(v, u) for u, v in ahead]
    orders = [
        tuple(range(count)),
        grow(count, found, ahead),
        grow(count, found, back)[::-1],
        grow(count, found, (), first=0),
        grow(count, found, (), first=count - 1)[::-1],
    ]
    return list(dict.fromkeys(orders))


def grow(
    count: int,
    nets: Sequence[Net],
    arcs: Iterable[tuple[int, int]],
    first: int | None = None,
) -> Order:
    """An order grown node by node.

    Args:
        count: How many nodes there are.
        nets: What the nodes share.
        arcs: (before, after) pairs that the order keeps; they have no cycle.
        first: Where to begin; None leaves it open.
    """
    return _Growth(count, nets, arcs).run(first)


class _Growth:
    def __init__(self, count: int, nets: Sequence[Net], arcs: Iterable[tuple[int, int]]) -> None:
        self.nets = nets
        self.of: list[list[int]] = [[] for _ in range(count)]
        for index, net in enumerate(nets):
            for node in net.nodes:
                self.of[node].append(index)
        self.left = [len(net.nodes) for net in nets]
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.waiting = [0] * count
        for u, v in arcs:
            self.after[u].append(v)
            self.waiting[v] += 1
        self.opens = [sum(nets[index].load_s for index in own) for own in self.of]
        self.touched = [0] * count
        self.placed = [False] * count
        self.heap: list[tuple[float, int, int]] = []

    def run(self, first: int | None) -> Order:
        order: list[int] = []
        for node in range(len(self.of)):
            self._push(node)
        while len(order) < len(self.of):
            node = first if first is not None and not order else self._next()
            order.append(node)
            self._place(node, len(order))
        return tuple(order)

    def _push(self, node: int) -> None:
        if not self.waiting[node] and not self.placed[node]:
            heapq.heappush(self.heap, (self.opens[node], -self.touched[node], node))

    def _next(self) -> int:
        while True:
            opens, stamp, node = heapq.heappop(self.heap)
            if not self.placed[node] and (opens, -stamp) == (self.opens[node], self.touched[node]):
                return node

    def _place(self, node: int, stamp: int) -> None:
        self.placed[node] = True
        changed = dict.fromkeys(self.after[node])
        for other in self.after[node]:
            self.waiting[other] -= 1
        for index in self.of[node]:
            net = self.nets[index]
            opened = self.left[index] == len(net.nodes)
            self.left[index] -= 1
            if opened or self.left[index] == 1:
                for other in net.nodes:
                    if not self.placed[other]:
                        self.opens[other] -= net.load_s * (opened + (self.left[index] == 1))
                        self.touched[other] = stamp
                        changed[other] = None
        for other in changed:
            self._push(other)
