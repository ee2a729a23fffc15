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


def is_of_torch(graph: Graph) -> bool:
    """Test whether a graph is of a PyTorch module; else it is of an ONNX model."""
    return list(graph.opsets) == ["aten"]


def part_of(
    graph: Graph, value: str, type_: TensorType, cuts: Mapping[int, Interval], name: str
) -> LocalOp:
    """The part of a value of this type that lies in an interval of each cut dim.

    The part is called `name`, and so is the node that makes it.
    """
    if is_of_torch(graph):
        return _torch_part(value, type_, cuts, name)
    starts = tuple(start for start, _ in cuts.values())
    ends = tuple(start + length for start, length in cuts.values())
    if graph.opsets[""] < SLICE_INPUT:
        attrs = {"starts": starts, "ends": ends, "axes": tuple(cuts)}
        return LocalOp((Node(name, "Slice", (value,), (name,), attrs),))
    bounds = {"starts": starts, "ends": ends, "axes": tuple(cuts)}
    constants = {f"{name}.{key}": np.array(of, np.int64) for key, of in bounds.items()}
    return LocalOp((Node(name, "Slice", (value, *constants), (name,)),), constants)


def _torch_part(value: str, type_: TensorType, cuts: Mapping[int, Interval], name: str) -> LocalOp:
    nodes, types, shape = [], {}, list(type_.shape)
    for index, (dim, (start, length)) in enumerate(cuts.items()):
        made = name if index == len(cuts) - 1 else f"{name}.{dim}"
        attrs = {"dim": dim, "start": start, "end": start + length, "step": 1}
        nodes.append(Node(made, "aten::slice.Tensor", (value,), (made,), attrs))
        shape[dim] = length
        if made != name:
            types[made] = type_.with_shape(shape)
        value = made
    return LocalOp(tuple(nodes), {}, types)


def joined(graph: Graph, parts: Sequence[str], dim: int, name: str) -> Node:
    """The node that puts parts one after the other along a dim, and its result, called `name`."""
    if is_of_torch(graph):
        attrs = {"tensors": len(parts), "dim": dim}
        return Node(name, "aten::cat", tuple(parts), (name,), attrs)
    return Node(name, "Concat", tuple(parts), (name,), {"axis": dim})


def added(graph: Graph, one: str, other: str, name: str) -> Node:
    """The node that adds two values of one type, and its result, called `name`."""
    if is_of_torch(graph):
        return Node(name, "aten::add.Tensor", (one, other), (name,), {"alpha": 1})
    return Node(name, "Add", (one, other), (name,))
