"""Settles the offers of a graph: the graph that a plan is for.

A node that takes either of two operands reads the last one that is computed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from partitioner.ir.graph import Graph, Node, needed
from partitioner.ir.ops import inherit_rules, row_of


def chosen(graph: Graph, present: Container[str]) -> Graph:
    """The graph with these optional nodes, without those of them that nothing reads.

    Raises:
        IRError: A node that is left out is read.
    """
    made = {*graph.inputs, *graph.constants}
    nodes = []
    for node in graph.nodes:
        if node.name not in graph.optional or node.name in present:
            nodes.append(_settled(node, made))
            made.update(node.writes)
    nodes = needed(nodes, graph.outputs, graph.by_name.keys() - graph.optional)
    kept = {*graph.inputs, *graph.constants, *(v for node in nodes for v in node.writes)}
    settled = replace(
        graph,
        nodes=tuple(nodes),
        types={value: type_ for value, type_ in graph.types.items() if value in kept},
        backward=graph.backward & {node.name for node in nodes},
        optional=frozenset(),
    )
    inherit_rules(settled, graph)
    return settled


def _settled(node: Node, made: set[str]) -> Node:
    """The node with the last computed operand alone, if it takes either."""
    row = row_of(node)
    if row is None or not row.either:
        return node
    computed = [value for value in node.inputs if value in made]
    return replace(node, inputs=tuple(computed[-1:])) if computed else node
