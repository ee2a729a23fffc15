"""Writes the nodes that stand in the place of one node, in the forms of a graph's opset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from partitioner.frontends.onnx.reading.names import fresh
from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.ops.onnx.reduction import SUM_AXES_INPUT
from partitioner.ir.types import TensorType, numpy_dtype

#: First opset in which all reductions take their axes as an operand.
_AXES_INPUT = 18


@dataclass
class PartWriter:
    """Writes nodes, with their constants and types, where those of a graph are replaced."""

    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (node.name for node in self.graph.nodes)
        self._taken: set[str | None] = {*self.graph.types, *names}

    def add(
        self,
        node: Node,
        op: str,
        reads: list[str],
        shape: tuple[int, ...] | None = None,
        made: str = "",
        dtype: str = "",
        **attrs: Attr,
    ) -> str:
        """Write a node in the place of another one; returns its result.

        Args:
            node: The node that is replaced.
            op: The operator.
            reads: The operands.
            shape: Sizes of the result; None for those of the broadcast operands.
            made: The result, if it is one of the replaced node.
            dtype: Its element type; "" for that of the last operand.
            attrs: The attributes.
        """
        name = fresh(f"{node.name}/{op}", self._taken)
        types = [self.type(value) for value in reads]
        if shape is None:
            shape = np.broadcast_shapes(*(tensor.shape for tensor in types))
        result = made or fresh(f"{name}:0", self._taken)
        if not made:
            self.types[result] = TensorType.of(dtype or types[-1].dtype, shape)
        self.nodes.append(Node(name, op, tuple(reads), (result,), attrs))
        if node.name in self.graph.modules:
            self.modules[name] = self.graph.modules[node.name]
        return result

    def reduced(
        self,
        node: Node,
        op: str,
        x: str,
        dims: Iterable[int],
        made: str = "",
        *,
        keepdims: int = 1,
    ) -> str:
        """Write a reduction over these dims, which become 1 or are left out."""
        axes, data = tuple(dims), self.type(x)
        sizes = enumerate(data.shape)
        if keepdims:
            shape = tuple(1 if dim in axes else size for dim, size in sizes)
        else:
            shape = tuple(size for dim, size in sizes if dim not in axes)
        first = SUM_AXES_INPUT if op == "ReduceSum" else _AXES_INPUT
        if self.graph.opsets[""] < first:
            return self.add(node, op, [x], shape, made, axes=axes, keepdims=keepdims)
        listed = self.constant(node, "axes", np.array(axes, np.int64))
        return self.add(node, op, [x, listed], shape, made, data.dtype, keepdims=keepdims)

    def reshape(self, node: Node, x: str, shape: tuple[int, ...], made: str = "") -> str:
        """Write the elements in another shape."""
        sizes = self.constant(node, "shape", np.array(shape, np.int64))
        return self.add(node, "Reshape", [x, sizes], shape, made, self.type(x).dtype)

    def number(self, node: Node, name: str, number: float, like: str) -> str:
        """A number as a constant of the element type of a value."""
        return self.constant(node, name, np.array(number, numpy_dtype(self.type(like).dtype)))

    def constant(self, node: Node, name: str, array: np.ndarray) -> str:
        """A new constant."""
        value = fresh(f"{node.name}/{name}", self._taken)
        self.constants[value] = Constant.of(array)
        self.types[value] = self.constants[value].type
        return value

    def type(self, value: str) -> TensorType:
        """The type of a value of the graph, or of one that was written."""
        return self.types.get(value) or self.graph.types[value]


class Form(NamedTuple):
    """How nodes of one operator are written in parts.

    Attributes:
        divides: Whether a node of a graph has a form in parts.
        write: Writes it.
    """

    divides: Callable[[Graph, Node], bool]
    write: Callable[[PartWriter, Node], None]


def in_parts(graph: Graph, forms: Mapping[str, Form]) -> Graph:
    """The graph with the nodes of these operators in parts; itself if none has such a form."""
    divided = {
        node.name
        for node in graph.nodes
        if node.op in forms and forms[node.op].divides(graph, node)
    }
    if not divided:
        return graph
    writer = PartWriter(graph)
    for node in graph.nodes:
        if node.name in divided:
            forms[node.op].write(writer, node)
        else:
            writer.nodes.append(node)
    read = {value for node in writer.nodes for value in node.reads}
    constants = {n: c for n, c in {**graph.constants, **writer.constants}.items() if n in read}
    gone = graph.constants.keys() - constants.keys()
    return replace(
        graph,
        nodes=tuple(writer.nodes),
        types={n: t for n, t in {**graph.types, **writer.types}.items() if n not in gone},
        constants=constants,
        modules={**graph.modules, **writer.modules},
    )
