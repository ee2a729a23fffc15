"""Settles the offers of a graph: the graph that a plan is for.

A node that takes either of two operands reads the last one that is computed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import inherit_rules, row_of
from partitioner.rewrites.graph_writer import GraphWriter


def chosen(graph: Graph, present: Container[str]) -> Graph:
    """The graph with these optional nodes, without those of them that nothing reads.

    Raises:
        IRError: A node that is left out is read.
    """
    writer, made = GraphWriter(source=graph), {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        if node.name not in graph.optional or node.name in present:
            writer.nodes.append(_settled(node, made))
            made.update(node.writes)
    settled = writer.graph(graph.by_name.keys() - graph.optional, optional=frozenset())
    inherit_rules(settled, graph)
    return settled


def _settled(node: Node, made: set[str]) -> Node:
    """The node with the last computed operand alone, if it takes either."""
    row = row_of(node)
    if row is None or not row.either:
        return node
    computed = [value for value in node.inputs if value in made]
    return replace(node, inputs=tuple(computed[-1:])) if computed else node
