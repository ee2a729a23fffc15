"""An order of nodes in which parts of a mesh that have nodes of their own do not wait in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from partitioner.ir.graph import Graph


def side_by_side(graph: Graph, places: Mapping[str, tuple[str, int]]) -> Iterator[str]:
    """Order the nodes of a graph: those that wait for nodes with a place come as late as they can.

    Devices run their nodes in one global order, and what one sends to others leaves in this order,
    too. So a device that has all nodes of its place before those of another keeps that waiting:
    places take turns, behind the nodes without a place that wait for none with one.
    """
    import networkx as nx

    placed = {value for node in graph.nodes if node.name in places for value in node.writes}
    numbers: Counter[tuple[str, int]] = Counter()
    keys: dict[str, tuple[bool, int, int, int]] = {}
    for position, node in enumerate(graph.nodes):
        place, turn = places.get(node.name), position
        rank = 2 if placed.intersection(node.reads) else 0
        if place is not None:
            rank, turn = 1, numbers[place]
            numbers[place] += 1
        keys[node.name] = node.name in graph.backward, rank, turn, position
    order: Iterator[str] = nx.lexicographical_topological_sort(
        graph.to_networkx(), key=keys.__getitem__
    )
    return order
