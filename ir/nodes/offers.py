"""Offers of a graph: nodes that may be left out (`rewrites.graph_writer`), and alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode


def alternatives(graph: Graph, node: Node, placed: tuple[PlacedNode, ...]) -> Iterator[PlacedNode]:
    """The strategies of a node with each operand that it may take, and the node left out."""
    if not row_of(node).either:
        yield from placed
    else:
        for slot, value in enumerate(node.inputs):  # it reads this operand alone
            others = ("",) * len(node.inputs)
            reader = replace(node, inputs=(*others[:slot], value, *others[slot + 1 :]))
            for p in placed:
                ins = tuple(at if i == slot else None for i, at in enumerate(p.ins))
                yield replace(p, node=reader, ins=ins)
    if node.name in graph.optional:
        sides = (("",) * len(side) for side in (node.inputs, node.outputs, node.captures))
        inputs, outputs, captures = sides
        empty = replace(node, inputs=inputs, outputs=outputs, captures=captures)
        ins, outs = (None,) * len(placed[0].ins), (None,) * len(placed[0].outs)
        yield PlacedNode(empty, placed[0].mesh, None, {}, ins, outs)


def everything(node: Node) -> int:
    """Index of the alternative that a node takes where all values are computed again."""
    return len(node.inputs) - 1 if row_of(node).either else 0


def originals(graph: Graph) -> Mapping[str, str]:
    """Name of the node that each optional node is a copy of; no entry if there is none.

    A node that takes either of two operands joins a value and its copy; so do the operands of the
    two nodes that compute them, in turn.
    """
    copied: dict[str, str] = {}
    for node in reversed(graph.nodes):
        pairs = []
        if row_of(node).either and len(node.inputs) > 1:
            pairs = [(node.inputs[1], node.inputs[0])]
        elif node.name in copied:
            pairs = list(zip(node.inputs, graph.by_name[copied[node.name]].inputs, strict=True))
        for copy, value in pairs:
            again, first = graph.producers.get(copy), graph.producers.get(value)
            if again and first and again.name in graph.optional and again.op == first.op:
                copied.setdefault(again.name, first.name)
    return copied
