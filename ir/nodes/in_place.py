"""Writes that take the memory of what they write to, as of a token to a cache.

The result of a write of some rows is a new value. Where the operand is what a module keeps, a
buffer, it becomes its next contents at the end of the call. If nothing else reads the operand, the
rows can be written where it lies. An input stays as it is: it belongs to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from partitioner.ir.graph import Graph, Node, once_a_graph
from partitioner.ir.ops import row_of, writes_stored


@once_a_graph
def writes_in_place(graph: Graph) -> frozenset[str]:
    """Names of the nodes whose result may lie where their first operand lies; none in training.

    Each is one of a chain of writes from a stored value to its next contents, and is the only
    reader of its operand: neither a node behind it, nor one before it whose result might be a view
    of the operand, would see the new rows.
    """
    updates = () if graph.backward else filter(writes_stored, graph.nodes)
    chains = (_chain(graph, node, node.inputs[row_of(node).in_place or 0]) for node in updates)
    return frozenset(chain.from_iterable(chains))


def _chain(graph: Graph, update: Node, stored: str) -> Sequence[str]:
    """The writes that lead from a stored value to what an update takes to its place."""
    writes: list[str] = []
    value = update.inputs[0]
    while value != stored:
        node = graph.producers.get(value)
        if node is None or not row_of(node).overwrites:
            return ()
        value = node.inputs[0]
        readers = {reader.name for reader in graph.consumers[value]} - {update.name}
        if readers != {node.name} or value in node.inputs[1:] or value in graph.outputs:
            return ()
        writes.append(node.name)
    return writes
