"""Offers to compute again, in the backward pass, what it reads of the forward pass.

The backward pass takes a value either as it was kept or from a clone of the node that made it. The
clone reads the backward pass's own names of its operands, so that chains of clones lead back to
kept values. Views are repeated in any case: they cost nothing. All that only clones read is
optional (`Graph.optional`).

A clone stands before the first reader of its results, and so does all that it reads. Chains would
lead from the last layer to the first, and all of it would be computed where the backward pass
begins. So the forward pass is cut into regions, and what passes from one to another is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_stored, is_view, row_of, writes_stored
from partitioner.ir.ops.aten.state import EITHER
from partitioner.ir.pieces.repeats import Stretch, numbered, repetitions
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import GraphWriter
from partitioner.rewrites.passes.ordering import passes_of
from partitioner.rewrites.passes.reads import Access, backward_apart, plain_access
from partitioner.rewrites.passes.regions import Life, regions


def with_offers(graph: Graph) -> Graph:
    """The graph whose backward pass has names of its own, and offers.

    The outputs of the graph are kept to the end: they are not offered.
    """
    apart = backward_apart(graph, _offered_access(graph))
    needed: set[str] = set()
    optional = set()
    for node in reversed(passes_of(apart)[1]):
        if node.name not in graph.by_name and not needed.intersection(node.writes):
            optional.add(node.name)
        elif node.op != EITHER:
            needed.update(node.reads)
    read = {value for node in apart.nodes for value in node.reads}
    writer = GraphWriter(source=apart)
    for node in apart.nodes:
        outputs = node.outputs
        if node.name not in graph.by_name:
            outputs = tuple(value if value in read else "" for value in outputs)
        writer.nodes.append(replace(node, outputs=outputs))
    return writer.graph(optional=frozenset(optional))


def _offered_access(graph: Graph) -> dict[str, Access]:
    forward, backward = passes_of(graph)
    access = plain_access(graph)
    computed: dict[str, Node] = {}
    for node in forward:
        for value in node.writes:
            if value in graph.outputs or is_stored(node):
                continue
            if _is_view(node):
                access[value] = Access.REPEATED
            elif access[value] is Access.ALIAS:
                computed[value] = node
    within = _values_within_regions(forward, backward, graph.types, computed)
    for value, node in computed.items():
        if row_of(node) is not None:
            access[value] = Access.OFFERED if value in within else Access.TAKEN
    return access


def _values_within_regions(
    forward: Sequence[Node],
    backward: Sequence[Node],
    types: Mapping[str, TensorType],
    values: Collection[str],
) -> set[str]:
    """The values that the forward pass reads only in the region that makes them."""
    saved = {value for node in backward for value in node.reads}
    last: dict[str, int] = {}
    made: dict[str, int] = {}
    for position, node in reversed(list(enumerate(forward))):
        made.update(dict.fromkeys(node.writes, position))
        end = position
        if _is_view(node):
            end = max([position, *(last.get(value, -1) for value in node.writes)])
            saved.update(node.reads if saved.intersection(node.writes) else ())
        for value in node.reads:
            last[value] = max(last.get(value, -1), end)
    lives = {
        value: Life(
            made[value],
            max(made[value], last.get(value, -1)),
            types[value].nbytes,
            value in saved,
        )
        for value in values
    }
    of = regions(tuple(lives.values()), len(forward), _repeated_blocks(forward, types))
    return {value for value, life in lives.items() if of[life.first] == of[life.last]}


def _is_view(node: Node) -> bool:
    return is_view(node) and not writes_stored(node)


def _repeated_blocks(
    forward: Sequence[Node], types: Mapping[str, TensorType]
) -> tuple[Stretch, ...]:
    classes = numbered(
        (
            node.op,
            repr(sorted(node.attrs.items())),
            *(str(types[value]) for value in (*node.reads, *node.writes)),
        )
        for node in forward
    )
    return tuple(repetitions(classes))
