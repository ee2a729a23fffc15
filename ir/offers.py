"""What a graph offers beside what it must do: nodes that may be left out, and their alternatives.

A plan is for a graph without offers. `chosen` makes it, from the names of the optional nodes that
are there: who takes either of two operands reads the last one that is made.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from partitioner.ir.graph import Graph, Node, needed
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode


def chosen(graph: Graph, present: Container[str]) -> Graph:
    """The graph with these optional nodes, less those of them that nothing reads.

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
    return replace(
        graph,
        nodes=tuple(nodes),
        types={value: kind for value, kind in graph.types.items() if value in kept},
        backward=graph.backward & {node.name for node in nodes},
        optional=frozenset(),
    )


def alternatives(graph: Graph, node: Node, placed: tuple[PlacedNode, ...]) -> Iterator[PlacedNode]:
    """What a plan may do with a node that has these strategies: of its operands, and without it."""
    row = row_of(node)
    if row is None or not row.either:
        yield from placed
    else:
        for slot in range(len(node.inputs)):
            yield from (_reading(one, slot) for one in placed)
    if node.name in graph.optional:
        yield _absent(placed[0])


def everything(node: Node) -> int:
    """Which of its alternatives a node takes where all is computed again."""
    row = row_of(node)
    return len(node.inputs) - 1 if row is not None and row.either else 0


def originals(graph: Graph) -> Mapping[str, str]:
    """Of which node each optional node is a copy, by name.

    Who takes either of two operands joins a value and its copy; their nodes' operands are so too.
    Optional nodes without such a node are left out.
    """
    found: dict[str, str] = {}
    for node in reversed(graph.nodes):
        row = row_of(node)
        pairs = []
        if row is not None and row.either and len(node.inputs) > 1:
            pairs = [(node.inputs[1], node.inputs[0])]
        elif node.name in found:
            pairs = list(zip(node.inputs, graph.by_name[found[node.name]].inputs, strict=True))
        for copy, value in pairs:
            again, first = graph.producers.get(copy), graph.producers.get(value)
            if again and first and again.name in graph.optional and again.op == first.op:
                found.setdefault(again.name, first.name)
    return found


def _settled(node: Node, made: set[str]) -> Node:
    """The node with one operand, if it takes either."""
    row = row_of(node)
    if row is None or not row.either:
        return node
    there = [value for value in node.inputs if value in made]
    return replace(node, inputs=tuple(there[-1:])) if there else node


def _reading(placed: PlacedNode, slot: int) -> PlacedNode:
    """The strategy of a node that reads one of its operands alone."""
    node = placed.node
    inputs = tuple(value if i == slot else "" for i, value in enumerate(node.inputs))
    ins = tuple(at if i == slot else None for i, at in enumerate(placed.ins))
    return replace(placed, node=replace(node, inputs=inputs), ins=ins)


def _absent(placed: PlacedNode) -> PlacedNode:
    """The node left out."""
    node = placed.node
    nothing = replace(
        node,
        inputs=("",) * len(node.inputs),
        outputs=("",) * len(node.outputs),
        captures=("",) * len(node.captures),
    )
    ins, outs = (None,) * len(placed.ins), (None,) * len(placed.outs)
    return PlacedNode(nothing, placed.mesh, None, {}, ins, outs)
