"""The graph of a model whose results are inputs of its next call, which stay where they are.

The readers of such an input read it through an Identity, which has one layout, and the result goes
through a `partitioner::feed` node, which lies where the Identity does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.nodes.feeds import Feed, grown_dim, named_pairs
from partitioner.ir.ops.onnx.feeding import FEED
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import GraphWriter


def with_fed_results(graph: Graph, feed: Feed) -> Graph:
    """The graph in which these results become inputs of the next call; itself without any.

    Raises:
        OptionError: There is no such result or input, or the one cannot become the other.
    """
    users = {graph.output_names.get(value, value): value for value in graph.outputs}
    named = named_pairs(feed, users, graph.inputs)
    if not named:
        return graph
    pairs = {users[name]: value for name, value in named.items()}
    for result, value in pairs.items():
        _check(graph, result, value)
    return _written(graph, pairs)


def _check(graph: Graph, result: str, value: str) -> None:
    text = f"feed {graph.output_names.get(result, result)}={value}"
    grown_dim(text, graph.types[result], graph.types[value])
    if result in graph.bounded:
        raise OptionError(f"{text}: the size of the result depends on data")
    for node in graph.consumers[result]:
        if result in node.captures:
            raise OptionError(f"{text}: {node.name!r} reads the result inside of its body")


def _written(graph: Graph, pairs: Mapping[str, str]) -> Graph:
    """Each Identity stands before the first reader of its input, each feed behind its result."""
    writer, inputs = GraphWriter(source=graph), frozenset(pairs.values())
    held: dict[str, str] = {}
    made = {result: writer.copied(result, "made") for result in pairs}

    def hold(value: str) -> None:
        if value not in held:
            type_ = graph.types[value]
            plain = TensorType.of(type_.dtype, type_.shape)  # results have no symbols
            held[value] = writer.value(f"{value}.held", plain)
            writer.add(f"{value}/held", "Identity", (value,), made=(held[value],))

    def renamed(node: Node) -> Node:
        names = {**held, **made}
        return replace(
            node,
            inputs=tuple(names.get(value, value) for value in node.inputs),
            outputs=tuple(made.get(value, value) for value in node.outputs),
        )

    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs):
            if value in inputs:
                hold(value)
        writer.nodes.append(renamed(node))
        for result in pairs.keys() & set(node.writes):
            hold(pairs[result])
            reads = made[result], held[pairs[result]]
            writer.add(f"{result}/feed", FEED, reads, made=(result,))
    return writer.graph()
