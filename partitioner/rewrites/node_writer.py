"""Writes the nodes that stand in the place of one node, ONNX's in the forms of a graph's opset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.ops.onnx.reduction import SUM_AXES_INPUT
from partitioner.ir.ops.table import OpView
from partitioner.ir.types import TensorType, numpy_dtype
from partitioner.rewrites.graph_writer import GraphWriter, replaced

#: First opset in which all reductions take their axes as an operand.
_AXES_INPUT = 18


@dataclass
class NodeWriter:
    """Writes nodes, with their constants, in the place of a node."""

    writer: GraphWriter
    node: Node

    def _node_name(self, op: str) -> str:
        return f"{self.node.name}/{op}"

    def _constant_name(self, name: str) -> str:
        return f"{self.node.name}/{name}"

    def add(
        self,
        op: str,
        reads: Sequence[str],
        shape: Sequence[int] | None = None,
        made: str = "",
        dtype: str = "",
        attrs: Mapping[str, Attr] | None = None,
    ) -> str:
        """Write a node; returns its result.

        Args:
            op: The operator.
            reads: The operands; "" for an absent one.
            shape: Sizes of the result; None for those of the broadcast operands.
            made: The result, if it is one of the replaced node.
            dtype: Its element type; "" for that of the last operand.
            attrs: The attributes.
        """
        types = [self.type(value) for value in reads if value]
        if shape is None:
            shape = np.broadcast_shapes(*(tensor.shape for tensor in types))
        result = replace(types[0].with_shape(shape), dtype=dtype or types[-1].dtype)
        given = [made] if made else ()
        (value,) = self.writer.add(self._node_name(op), op, reads, [result], given, attrs)
        return value

    def number(self, name: str, number: float, like: str) -> str:
        """A number as a constant of the element type of a value."""
        return self.constant(name, np.array(number, numpy_dtype(self.type(like).dtype)))

    def constant(self, name: str, array: np.ndarray) -> str:
        """A new constant."""
        return self.writer.constant(self._constant_name(name), Constant.of(array))

    def type(self, value: str) -> TensorType:
        """The type of a value of the graph, or of one that was written."""
        return self.writer.types[value]


@dataclass
class PartWriter(NodeWriter):
    """Writes nodes of ONNX."""

    @property
    def graph(self) -> Graph:
        """The graph that has the node."""
        return self.writer.source

    @property
    def view(self) -> OpView:
        """The node as its rule sees it."""
        return OpView(self.node, self.graph)

    @property
    def operand(self) -> str:
        """First operand of the node."""
        return self.node.inputs[0]

    @property
    def result(self) -> str:
        """First result of the node."""
        return self.node.outputs[0]

    def reduced(self, op: str, x: str, dims: Iterable[int], *, keepdims: int = 1) -> str:
        """Write a reduction over these dims, which become 1 or are left out."""
        axes, data = tuple(dims), self.type(x)
        kept = [1 if dim in axes else size for dim, size in enumerate(data.shape)]
        shape = kept if keepdims else [s for dim, s in enumerate(kept) if dim not in axes]
        first = SUM_AXES_INPUT if op == "ReduceSum" else _AXES_INPUT
        if self.graph.opsets[""] < first:
            return self.add(op, [x], shape, attrs={"axes": axes, "keepdims": keepdims})
        listed = self.constant("axes", np.array(axes, np.int64))
        return self.add(op, [x, listed], shape, "", data.dtype, {"keepdims": keepdims})

    def reshaped(self, x: str, shape: Sequence[int], made: str = "") -> str:
        """Write the elements in another shape."""
        sizes = self.constant("shape", np.array(shape, np.int64))
        return self.add("Reshape", [x, sizes], shape, made, self.type(x).dtype)


class Form(NamedTuple):
    """How nodes of one operator are written in parts."""

    divides: Callable[[Graph, Node], bool]  #: Whether a node of a graph has a form in parts.
    write: Callable[[PartWriter], object]  #: Writes it.


def in_parts(graph: Graph, forms: Mapping[str, Form]) -> Graph:
    """The graph with the nodes of these operators in parts; itself if none has such a form."""

    def write(writer: GraphWriter, node: Node) -> None:
        forms[node.op].write(PartWriter(writer, node))

    divided = [n.name for n in graph.nodes if n.op in forms and forms[n.op].divides(graph, n)]
    return replaced(graph, dict.fromkeys(divided, write), mark="_")
