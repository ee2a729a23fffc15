"""Communications that pass beside compute: those that nobody waits for at once.

What is only written to where it is stored (a gradient) is waited for when the pass ends. A stored
value may be sent for before it is used. Of the seconds of such a communication, the share
`LinkLevel.overlap` is hidden by the nodes that run meanwhile.
"""

from __future__ import annotations

from collections.abc import Container

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of


def stored_values(graph: Graph) -> frozenset[str]:
    """Values that are kept from step to step, under all their names."""
    found: set[str] = set()
    for node in graph.nodes:
        row = row_of(node)
        if row is not None and (row.stored or (row.again and node.inputs[0] in found)):
            found.update(node.writes)
    return frozenset(found)


def beside_compute(graph: Graph) -> frozenset[str]:
    """Values whose communications pass beside compute."""
    written: set[str] = set()
    for node in reversed(graph.nodes):
        for value in node.writes:
            readers = graph.consumers[value]
            if readers and all(_only_writes(reader, value, written) for reader in readers):
                written.add(value)
    return stored_values(graph) | written


def _only_writes(node: Node, value: str, written: Container[str]) -> bool:
    """Whether a node writes an operand to where it is stored, or is a view that only goes there."""
    row = row_of(node)
    if row is None or not row.view or node.inputs.index(value) > 0:
        return False
    return row.in_place is not None or all(made in written for made in node.writes)
