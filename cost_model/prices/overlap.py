"""Communications that pass beside compute, because no node waits for them at once.

A value that is only written to where it is stored (a gradient) is waited for when the pass ends; a
stored value may be sent before it is used; so may the keys of a ring's next step. The nodes that
run meanwhile hide a share `LinkLevel.overlap` of the seconds of such a communication. Small ones
share buckets, whose start-up each pays in part (`collectives.bucket_seconds`).
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_view, row_of, writes_stored
from partitioner.ir.program import BUCKET_BYTES, JOINING, SMALL_BYTES, CommKind


def beside_compute(graph: Graph) -> frozenset[str]:
    """Values whose communications pass beside compute."""
    values: set[str] = set()
    for node in graph.nodes:
        row = row_of(node)
        if row is not None and (row.stored or (row.again and node.inputs[0] in values)):
            values.update(node.writes)
        elif row is not None and row.ahead:
            values.update(node.reads)
    return frozenset(values | _written(graph))


def most_joined(graph: Graph) -> Mapping[CommKind, int]:
    """Bytes that buckets of each kind of collective hold at most, whatever the plan.

    What passes beside compute passes once in a pass over a group. Only what is written is summed.
    """
    beside, written = beside_compute(graph), _written(graph)

    def most(values: Collection[str]) -> int:
        views = ((value, graph.producers.get(value)) for value in values)
        sizes = (
            graph.types[value].nbytes
            for value, maker in views
            if not (maker and is_view(maker) and maker.inputs and maker.inputs[0] in values)
        )
        return max(1, min(BUCKET_BYTES, sum(min(size, SMALL_BYTES) for size in sizes)))

    gathered, summed = most(beside), most(written)
    return {kind: gathered if kind is CommKind.ALL_GATHER else summed for kind in JOINING}


def _written(graph: Graph) -> set[str]:
    """Values that are only stored, and what these are views of."""
    written: set[str] = set()
    for node in reversed(graph.nodes):
        for value in node.writes:
            readers = graph.consumers[value]
            if readers and all(_only_writes(reader, value, written) for reader in readers):
                written.add(value)
    return written


def _only_writes(node: Node, value: str, written: Container[str]) -> bool:
    if not is_view(node) or node.inputs.index(value) > 0:
        return False
    return writes_stored(node) or all(result in written for result in node.writes)
