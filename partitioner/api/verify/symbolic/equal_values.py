"""One name for values of the whole model that are equal: constants, and what follows from them.

A rank's value that is several of them would be followed as each, in all their combinations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.onnx.factories import RANDOM

Content = tuple[str, tuple[int, ...], bytes]  #: Type, shape and contents of a constant.


def merged(graph: Graph) -> tuple[Graph, Mapping[str, str]]:
    """Give the model with one name for equal values, and the names that went.

    Constants are equal if their contents are, and results of one operator with equal attributes of
    equal operands that follow from constants alone. Outputs and captured values keep their names.
    """
    kept = {*graph.outputs, *(name for node in graph.nodes for name in node.captures)}
    free = (name for name in graph.constants if name not in kept)
    equal = (names for names in by_content(graph, free).values() if len(names) > 1)
    gone = {name: first for first, *others in equal for name in others}
    fixed, found, nodes = {*graph.constants}, dict[Hashable, Node](), list[Node]()
    for node in graph.nodes:
        renamed = node
        if not gone.keys().isdisjoint(node.inputs):
            inputs = tuple(gone.get(name, name) for name in node.inputs)
            renamed = replace(node, inputs=inputs)
        if not node.reads or not fixed.issuperset(node.reads) or node.op in RANDOM:
            nodes.append(renamed)
            continue
        fixed.update(node.writes)
        key = _what(graph, renamed)
        first = renamed if key is None else found.setdefault(key, renamed)
        if first is renamed or not kept.isdisjoint(node.writes):
            nodes.append(renamed)
        else:
            gone |= dict(zip(node.outputs, first.outputs, strict=True))
    return (replace(graph, nodes=tuple(nodes)) if gone else graph), gone


def _what(graph: Graph, node: Node) -> Hashable | None:
    """Give what makes a node's results; None of a node with subgraphs."""
    if node.captures or any(isinstance(value, Graph) for value in node.attrs.values()):
        return None
    attrs = tuple(
        (name, type(value), content(value) if isinstance(value, np.ndarray) else repr(value))
        for name, value in sorted(node.attrs.items())
    )
    types = tuple(graph.types.get(name) for name in node.outputs)
    return node.op, node.inputs, attrs, types


def by_content(graph: Graph, names: Iterable[str]) -> dict[Content, list[str]]:
    """Small constants by what they hold."""
    found: dict[Content, list[str]] = {}
    for name in names:
        array = graph.constant(name)
        if array is not None:
            found.setdefault(content(array), []).append(name)
    return found


def content(array: np.ndarray) -> Content:
    """Give the type, shape and contents of an array."""
    return array.dtype.name, array.shape, array.tobytes()
