"""Orders the nodes of a forward and a backward pass for what is stored from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import is_view
from partitioner.ir.ops.aten.state import ALIAS, KEEP, REST, STATE, UPDATE

#: Uses of stored values between the point where one may be sent for and its own first use. Two,
#: since the one between a pair of matmuls is often a small one (a norm's weight).
AHEAD = 2


def passes_of(graph: Graph) -> tuple[list[Node], list[Node]]:
    """The nodes of the forward pass and those of the backward pass."""
    forward = [node for node in graph.nodes if node.name not in graph.backward]
    return forward, [node for node in graph.nodes if node.name in graph.backward]


def shared_states(graph: Graph) -> list[str]:
    """Stored values that both passes read where they are stored."""
    states = (node for node in graph.nodes if node.op == STATE)
    return [node.outputs[0] for node in states if not node.attrs.get("apart")]


def early_updates(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes, each update right behind the node that makes its new value."""
    made = {value for node in nodes for value in node.writes}
    updates: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op in (UPDATE, KEEP) and node.inputs[0] in made:
            updates.setdefault(node.inputs[0], []).append(node)
    moved = {node.name for group in updates.values() for node in group}
    for node in nodes:
        waiting = [] if node.name in moved else [node]
        while waiting:
            node = waiting.pop(0)
            yield node
            waiting += [update for value in node.writes for update in updates.get(value, ())]


def fetched_early(graph: Graph) -> Graph:
    """The graph with stored values and aliases `AHEAD` uses of such values before their own.

    So a plan may gather a value while others are computed with; it takes memory from there on.
    """
    forward, backward = passes_of(graph)
    nodes = (*_fetched_early(forward, ()), *_fetched_early(backward, shared_states(graph)))
    return replace(graph, nodes=nodes)


def _fetched_early(nodes: Sequence[Node], stored: Iterable[str]) -> Iterator[Node]:
    """The nodes of a pass; `stored` are the values that the other pass declares."""
    names = {*stored, *(node.outputs[0] for node in nodes if node.op == STATE)}
    early: dict[str, Node] = {}
    for node in nodes:
        alias = node.op in (ALIAS, REST) and node.inputs[0] in names
        if node.op == STATE or alias:
            names.add(node.outputs[0])
            early[node.outputs[0]] = node
    rest = [node for node in nodes if node.outputs[0] not in early]
    read = _first_reads(rest, early.values(), through_views=False)
    used = _first_reads(rest, early.values(), through_views=True)
    first_use = {value: used.get(value, read.get(value, 0)) for value in early}
    uses = sorted(set(first_use.values()))
    fetch = {use: uses[max(0, index - AHEAD)] for index, use in enumerate(uses)}
    placed: dict[int, list[Node]] = {}
    for value in sorted(early, key=first_use.__getitem__):
        place = min(fetch[first_use[value]], read.get(value, 0))
        placed.setdefault(place, []).append(early[value])
    for index, node in enumerate(rest):
        yield from placed.get(index, ())
        yield node


def _first_reads(
    nodes: Sequence[Node], aliases: Iterable[Node], *, through_views: bool
) -> dict[str, int]:
    """Position of the first node that reads a value or an alias of it.

    Through views, a view is no reader, and its readers read what it is a view of.
    """
    first: dict[str, int] = {}
    renaming = list(aliases)
    for index, node in enumerate(nodes):
        if through_views and is_view(node):
            renaming.append(node)
            continue
        for value in node.reads:
            first.setdefault(value, index)
    for node in reversed(renaming):
        reads = [first[value] for value in (*node.inputs[:1], *node.writes) if value in first]
        if reads and node.inputs:
            first[node.inputs[0]] = min(reads)
    return first
