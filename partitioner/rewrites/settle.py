"""Settles the offers of a graph: the graph that a plan is for.

A node that takes either of two operands reads the last one that is computed.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from partitioner.ir.graph import Graph
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
            row = row_of(node)
            computed = [v for v in node.inputs if v in made] if row and row.either else []
            if computed:  # the node reads the last one
                node = replace(node, inputs=tuple(computed[-1:]))
            writer.nodes.append(node)
            made.update(node.writes)
    settled = writer.graph(graph.by_name.keys() - graph.optional, optional=frozenset())
    inherit_rules(settled, graph)
    return settled
