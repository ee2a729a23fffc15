"""The stage of every node of a graph, from the stages of the nodes of its forward pass.

A backward node goes to the stage of the forward node that it differentiates or repeats. One that
has none, such as a sum of gradients, goes to the lowest stage that its gradients come from, since
they pass from higher stages to lower ones. Another name of a value is where the value is, an update
where its value is stored, and a stored value where it is read first. What the backward pass reads
and no micro-batch changes, such as another name of a tied weight, is in its readers' highest stage.

A micro-batch reads the buffers that the one before it wrote. So all that reads or writes such a
buffer in the forward pass is in one stage: the latest of those given.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.phases import fixed_nodes


def changing_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes of the forward pass whose results differ from micro-batch to micro-batch."""
    fixed = fixed_nodes(graph)
    return tuple(n for n in graph.nodes if n.name not in graph.backward and n.name not in fixed)


def stages_of_all(graph: Graph, forward: Mapping[str, int]) -> dict[str, int]:
    """Stage of every node, by name.

    Args:
        graph: The graph.
        forward: Stage of each of the `changing_nodes`; values pass from a stage to itself or to
            later ones.
    """
    stages = _with_buffers_in_one_stage(graph, forward)
    for node in reversed(graph.nodes):
        if node.name not in stages and node.name not in graph.backward:
            readers = [r.name for value in node.writes for r in graph.consumers[value]]
            staged = [stages[name] for name in readers if name in stages]
            if staged:
                stages[node.name] = min(staged)
    for node in graph.nodes:
        if node.name not in stages and node.name not in graph.backward:
            producers = (graph.producers[value].name for value in node.reads)
            stages[node.name] = max((stages[name] for name in producers), default=0)
    last = max(stages.values(), default=0)
    gradients = _gradients(graph)
    for node in graph.nodes:
        if node.name in graph.backward:
            stages[node.name] = _backward_stage(graph, node, stages, gradients, last)
    for node in reversed(graph.nodes):
        if node.name in graph.backward and not gradients[node.name]:
            stages[node.name] = _read_stage(graph, node, stages)
    return stages


def _with_buffers_in_one_stage(graph: Graph, forward: Mapping[str, int]) -> dict[str, int]:
    """The stages of the forward pass, with nodes moved to later ones as written buffers want it."""
    written = {node.inputs[1] for node in graph.nodes if node.attrs.get("role") == "next"}
    users = [
        [n.name for n in (graph.producers[value], *graph.consumers[value]) if n.name in forward]
        for value in written
    ]
    stages = dict(forward)
    before: dict[str, int] = {}
    while stages != before:
        before = dict(stages)
        for names in users:
            stages.update(dict.fromkeys(names, max(stages[name] for name in names)))
        for node in graph.nodes:
            if node.name in stages:
                made = (graph.producers[v].name for v in node.reads if v in graph.producers)
                stages[node.name] = max(stages.get(name, 0) for name in (node.name, *made))
    return stages


def _read_stage(graph: Graph, node: Node, stages: Mapping[str, int]) -> int:
    """Stage of a backward node that depends on no gradient: where it is read.

    It is the highest, which runs first; but another name of a value that several stages read stays
    where the value is, and runs with it.
    """
    row, own = row_of(node), stages[node.name]
    if row is not None and row.in_place is not None:
        return own
    readers = {stages[r.name] for value in node.writes for r in graph.consumers[value]}
    is_name = row is not None and row.again
    return own if is_name and len(readers) > 1 else max(readers, default=own)


def _backward_stage(
    graph: Graph,
    node: Node,
    stages: Mapping[str, int],
    gradients: Mapping[str, bool],
    last: int,
) -> int:
    row = row_of(node)
    if row is not None and row.in_place is not None:
        return stages[graph.producers[node.inputs[row.in_place]].name]
    producers = [graph.producers[value].name for value in node.reads if value in graph.producers]
    lowest = min((stages[name] for name in producers if gradients.get(name)), default=last)
    twin = graph.twins.get(node.name, "")
    if twin in stages:
        return min(stages[twin], lowest)
    if not gradients[node.name] and producers:
        return max(stages[name] for name in producers)
    return lowest


def _gradients(graph: Graph) -> Mapping[str, bool]:
    """Whether each node of the backward pass depends on the gradient of the loss, by name.

    That is the graph input that the backward pass alone reads.
    """
    read = {v for n in graph.nodes if n.name not in graph.backward for v in n.reads}
    flowing = set(graph.inputs) - read
    of = {}
    for node in graph.nodes:
        if node.name in graph.backward:
            of[node.name] = not flowing.isdisjoint(node.reads)
            if of[node.name]:
                flowing.update(node.writes)
    return of
