"""Names of nodes and outputs: each node has one, and each output is a value of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import GraphProto, NodeProto


def fresh(name: str, taken: set[str | None]) -> str:
    """`name`, or `name_k` with the first k from 1 that is free; it is then taken."""
    count, free = 0, name
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    taken.add(free)
    return free


def name_nodes(nodes: Iterable[NodeProto]) -> None:
    """Give each unnamed node, in place, the name `Op_k`, k the first number that is free."""
    taken = {node.name for node in nodes}
    counts: dict[str, int] = {}
    for node in nodes:
        while not node.name:
            count = counts.get(node.op_type, 0)
            counts[node.op_type] = count + 1
            name = f"{node.op_type}_{count}"
            node.name = "" if name in taken else name


def distinct_outputs(graph: GraphProto) -> Iterator[str]:
    """Give an output that is an input, an initializer or a repeated output its own value, in place.

    Yields:
        A note for the user on each output that is renamed.
    """
    seen = {value.name for value in (*graph.input, *graph.initializer)}
    taken: set[str | None] = {value.name for value in graph.output} | seen
    taken.update(name for node in graph.node for name in node.output)
    for value in graph.output:
        if value.name in seen:
            name = fresh(f"{value.name}_output", taken)
            graph.node.add(
                op_type="Identity", name=f"Identity_{name}", input=[value.name], output=[name]
            )
            yield f"output {value.name!r} repeats another value: it is returned as {name!r}"
            value.name = name
        seen.add(value.name)
