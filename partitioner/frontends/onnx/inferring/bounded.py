"""Results whose size depends on data, behind a bound that the user gives.

What such a result leads to has no shape before the model runs, so it cannot be cut, and no buffer
can be made for it that another device fills. All of it becomes the body of one node, an If whose
condition is true, which runs whole on one device. Nothing inside needs a shape. The types of its
results, which are outputs of the model, are bounds: those which the user's bound leads to. They are
found on a copy of the model, because the model itself must not be simplified by them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir

from partitioner.frontends.onnx.reading.bodies import captured, made
from partitioner.frontends.onnx.reading.names import fresh

#: Operators whose results have a size that depends on data.
DEPEND_ON_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})


def bounded_values(graph: onnx_ir.Graph, given: Collection[str]) -> tuple[onnx_ir.Value, ...]:
    """Pick the results with a given shape whose size depends on data."""
    return tuple(
        value
        for node in graph
        if node.op_type in DEPEND_ON_DATA and not node.domain
        for value in node.outputs
        if value.name in given
    )


def behind(graph: onnx_ir.Graph, bounded: Collection[onnx_ir.Value]) -> tuple[onnx_ir.Node, ...]:
    """The nodes that make these results, and all that read what those lead to, in order."""
    reached: set[onnx_ir.Value] = set()
    nodes = []
    for node in graph:
        reads = (value for value in (*node.inputs, *captured(node)) if value is not None)
        if not reached.isdisjoint(reads) or any(value in bounded for value in node.outputs):
            reached.update(node.outputs)
            nodes.append(node)
    return tuple(nodes)


def keep_together(
    graph: onnx_ir.Graph, bounded: Collection[onnx_ir.Value], bounds: Sequence[onnx_ir.Value]
) -> tuple[str, tuple[str, ...]]:
    """Make the nodes behind the bounded results one node, in place.

    Every output of the graph is a node's own result; `bounds` are those of the copy in which these
    have the user's bounds.

    Returns:
        Its name, and a note; "" and none if no such node is left.
    """
    nodes = behind(graph, bounded)
    if not nodes:
        return "", ()
    taken = {value.name for value in made(graph)}
    names = ", ".join(sorted({repr(value.name) for value in bounded}))
    inner = {i: value for i, value in enumerate(graph.outputs) if value.producer() in nodes}
    graph.remove(nodes)
    results = []
    for index, value in inner.items():
        type_, shape = bounds[index].type, bounds[index].shape
        assert shape is not None
        bound = onnx_ir.Shape(shape.numpy())
        results.append(onnx_ir.Value(name=value.name, type=type_, shape=bound))
        value.name, value.type = fresh(f"{value.name}_inside", taken), type_
        graph.outputs[index] = results[-1]
    then = onnx_ir.Graph([], list(inner.values()), nodes=nodes, name="behind_bounds")
    true = onnx_ir.tensor(np.array(1, np.bool_), name=fresh("behind_bounds_condition", taken))
    condition = onnx_ir.val(true.name, const_value=true)
    graph.register_initializer(condition)
    branches = {"then_branch": then, "else_branch": _other(results)}
    attributes = [onnx_ir.AttrGraph(name, branch) for name, branch in branches.items()]
    name = fresh("behind_bounds", {node.name for node in graph})
    graph.append(onnx_ir.Node("", "If", [condition], attributes, outputs=results, name=name))
    note = (
        f"sizes behind {names} depend on data: what follows stays together on one device as node "
        f"{name!r}; memory and time are counted for the shapes that --shape gives"
    )
    return name, (note,)


def _other(results: Collection[onnx_ir.Value]) -> onnx_ir.Graph:
    """The branch that never runs: results without elements, of the same types."""
    empty = []
    for index, value in enumerate(results):
        assert value.dtype is not None and value.shape is not None  # noqa: PT018
        array = np.zeros([0] * len(value.shape), value.dtype.numpy())
        node = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(array, value.dtype)})
        node.outputs[0].name = f"behind_bounds_none_{index}"
        empty.append(node)
    return onnx_ir.Graph([], [node.outputs[0] for node in empty], nodes=empty, name="never")
