"""The stage of every node of a graph, from the stages of the nodes of its forward pass.

A backward node that gradients reach goes to the stage of the forward node that it differentiates.
One that has none, such as a sum of gradients, goes to the lowest stage that its gradients come
from, since they pass from higher stages to lower ones. A backward node that gradients do not reach,
such as one that repeats a forward node, goes to the highest stage that reads it, and not below its
operands'; but another name of a value that several stages read stays where the value is. An update
is where its value is stored, and a stored value where it is read first.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of, writes_stored
from partitioner.ir.phases import fixed_nodes


def changing_nodes(graph: Graph) -> tuple[Node, ...]:
    """The computations of the forward pass whose results differ from micro-batch to micro-batch."""
    fixed = fixed_nodes(graph)
    return tuple(
        n
        for n in graph.nodes
        if n.name not in graph.backward and n.name not in fixed and n.reads and not writes_stored(n)
    )


def stages_of_all(graph: Graph, forward: Mapping[str, int]) -> dict[str, int]:
    """Stages of all nodes by name, from those of `changing_nodes`: values pass to none earlier."""
    stages = _forward_stages(graph, forward)
    last = max(stages.values(), default=0)
    # the nodes of the backward pass that depend on the input that it alone reads: a gradient
    flowing, reached = set(graph.inputs), set[str]()
    flowing -= {v for n in graph.nodes if n.name not in graph.backward for v in n.reads}
    for node in graph.nodes:
        row = row_of(node)
        if node.name in graph.backward and not flowing.isdisjoint(node.reads):
            reached.add(node.name)
            flowing.update(node.writes)
        if row.in_place is not None:
            stages[node.name] = stages[graph.producers[node.inputs[row.in_place]].name]
        elif node.name in reached:
            sources = (stages[name] for name in _makers(graph, node) if name in reached)
            lowest = min(sources, default=last)
            twin = graph.twins.get(node.name, "")
            stages[node.name] = min(stages.get(twin, lowest), lowest)
    for node in reversed(graph.nodes):
        if node.name not in stages:
            stages[node.name] = _repeated_stage(graph, node, stages)
    return stages


def layers(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The positions of all nodes, by the node of the forward pass that they go with, in order."""
    numbers = {node.name: number for number, node in enumerate(changing_nodes(graph))}
    of: dict[int, list[int]] = {}
    stages = stages_of_all(graph, numbers)
    for position, node in enumerate(graph.nodes):
        of.setdefault(stages[node.name], []).append(position)
    return tuple(tuple(of[number]) for number in sorted(of))


def _forward_stages(graph: Graph, forward: Mapping[str, int]) -> dict[str, int]:
    """Stages of the forward pass but its updates: of the first reader, else of the operands."""
    stages = dict(forward)
    others = [n for n in graph.nodes if n.name not in graph.backward and n.name not in forward]
    others = [node for node in others if not writes_stored(node)]
    for node in reversed(others):
        if known := [stages[name] for name in _readers(graph, node) if name in stages]:
            stages[node.name] = min(known)
    for node in others:
        if node.name not in stages:
            made = (stages[name] for name in _makers(graph, node) if name in stages)
            stages[node.name] = max(made, default=0)
    return stages


def _makers(graph: Graph, node: Node) -> list[str]:
    return [graph.producers[value].name for value in node.reads if value in graph.producers]


def _readers(graph: Graph, node: Node) -> list[str]:
    return [reader.name for value in node.writes for reader in graph.consumers[value]]


def _repeated_stage(graph: Graph, node: Node, stages: Mapping[str, int]) -> int:
    """The stage of a backward node that gradients do not reach; those of its readers are known."""
    row, makers, readers = row_of(node), _makers(graph, node), _readers(graph, node)
    around = [*makers, *readers, graph.twins.get(node.name, "")]
    if row.again and len({stages[name] for name in readers}) > 1:
        around = makers  # another name of a value
    return max((stages[name] for name in around if name in stages), default=0)
