"""Orders of the nodes: in which little communication crosses each position, or few nodes wait.

A contiguous plan cuts an order into intervals, so it can be no better than its order. The first
orders are grown (`stages.cut_orders.grow`) along the edges, against them, and from either end
whatever their direction.

Tables over the nodes that wait for others (`sweep`) are as large as two to the power of their
number, so the last order keeps the frontier of waiting nodes small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partitioner.solver.problem import Problem
from partitioner.solver.stages.cut_orders import Net, Order, grow

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
    """The given order and the grown ones, each once."""
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
