"""Nodes that take a part of a value and join parts, in the operators of the graph they go into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Interval
from partitioner.ir.ops.table import LocalOp
from partitioner.ir.types import TensorType

#: First operator set of ONNX whose Slice takes its bounds as operands.
SLICE_INPUT = 10


def part_of(
    graph: Graph,
    value: str,
    type_: TensorType,
    cuts: Mapping[int, Interval],
    name: str,
    made: str = "",
) -> LocalOp:
    """The part of a value in an interval of each cut dim, under the node's name unless `made`."""
    if graph.domain == "aten":
        return sliced(value, type_, cuts, name, made or name)
    starts = tuple(start for start, _ in cuts.values())
    ends = tuple(start + length for start, length in cuts.values())
    bounds = {"starts": starts, "ends": ends, "axes": tuple(cuts)}
    if graph.opsets[""] < SLICE_INPUT:
        return LocalOp((Node(name, "Slice", (value,), (made or name,), bounds),))
    constants = {f"{name}.{key}": np.array(of, np.int64) for key, of in bounds.items()}
    return LocalOp((Node(name, "Slice", (value, *constants), (made or name,)),), constants)


def sliced(
    value: str, type_: TensorType, cuts: Mapping[int, Interval], name: str, made: str
) -> LocalOp:
    """`part_of` in PyTorch's operators, which slice one dim after the other."""
    nodes, types, shape = [], {}, list(type_.shape)
    for index, (dim, (start, length)) in enumerate(cuts.items()):
        is_last = index == len(cuts) - 1
        node, result = (name, made) if is_last else (f"{name}.{dim}", f"{name}.{dim}")
        attrs = {"dim": dim, "start": start, "end": start + length, "step": 1}
        nodes.append(Node(node, "aten::slice.Tensor", (value,), (result,), attrs))
        shape[dim] = length
        if not is_last:
            types[result] = type_.with_shape(shape)
        value = result
    return LocalOp(tuple(nodes), {}, types)


def joined(graph: Graph, parts: Sequence[str], dim: int, name: str) -> Node:
    """The node that puts parts one after the other along a dim, and its result, called `name`."""
    if graph.domain == "aten":
        attrs = {"tensors": len(parts), "dim": dim}
        return Node(name, "aten::cat", tuple(parts), (name,), attrs)
    return Node(name, "Concat", tuple(parts), (name,), {"axis": dim})


def added(graph: Graph, one: str, other: str, name: str) -> Node:
    """The node that adds two values of one type, and its result, called `name`."""
    if graph.domain == "aten":
        return Node(name, "aten::add.Tensor", (one, other), (name,), {"alpha": 1})
    return Node(name, "Add", (one, other), (name,))
