"""Normalizations as means, squares and a scale, which may be cut along what is normalised.

ONNX Runtime has no kernel of GroupNormalization on a CPU and computes it as such nodes itself: it
is always written so. InstanceNormalization and MeanVarianceNormalization have kernels, which are
faster where nothing is cut: their form in parts is another graph, and the search takes the better
one. Variances are those of centred elements, in two passes, as the difference of two large numbers
would lose digits. Half precision keeps the operator, which has statistics of another type.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from partitioner.frontends.onnx.names import fresh
from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.types import TensorType, numpy_dtype

GROUP = "GroupNormalization"
#: Normalizations of which ONNX Runtime has a kernel.
WITH_KERNELS = frozenset({"InstanceNormalization", "MeanVarianceNormalization"})

#: First opset in which all reductions take their axes as an operand.
_AXES_INPUT = 18
#: First opset in which GroupNormalization has a scale and a bias a channel, not a group.
_SCALE_A_CHANNEL = 21
#: What MeanVarianceNormalization adds to a deviation, in ONNX's own definition.
_LEAST_DEVIATION = 1e-9


def norms_in_parts(graph: Graph, ops: Container[str]) -> Graph:
    """The graph with normalizations of these operators in parts; itself if it has none.

    Those of one element a mean stay: there is nothing to cut.
    """
    if not any(node.op in ops and _divides(graph, node) for node in graph.nodes):
        return graph
    writer = _Writer(graph)
    for node in graph.nodes:
        if node.op in ops and _divides(graph, node):
            writer.normalize(node)
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


def _divides(graph: Graph, node: Node) -> bool:
    """Whether a normalization of a graph has a form in parts."""
    tensors = [graph.types[value] for value in node.reads]
    data = tensors[0]
    wide = data.dtype in ("float32", "float64") and all(t.dtype == data.dtype for t in tensors)
    if not wide or not data.nbytes or data.rank < 3:
        return False
    return math.prod(data.shape[dim] for dim in _normalised(node, data.rank)) > 1


def _normalised(node: Node, rank: int) -> tuple[int, ...]:
    """Dims of the data over which the means are; of channels those of a group."""
    if node.op != "MeanVarianceNormalization":
        return tuple(range(2, rank))
    axes = node.attrs.get("axes", (0, 2, 3))
    assert isinstance(axes, tuple)
    return tuple(sorted(int(axis) % rank for axis in axes))


@dataclass
class _Writer:
    """Writes the nodes of normalizations, with their constants and types."""

    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (node.name for node in self.graph.nodes)
        self._taken: set[str | None] = {*self.graph.types, *names}

    def normalize(self, node: Node) -> None:
        """Write a normalization in parts."""
        x, result = node.inputs[0], node.outputs[0]
        data = self.graph.types[x]
        if node.op == "MeanVarianceNormalization":
            axes = _normalised(node, data.rank)
            centred, variance = self._centred(node, x, axes)
            deviation = self._add(node, "Sqrt", [variance])
            least = self._number(node, "least", _LEAST_DEVIATION, data)
            self._add(
                node, "Div", [centred, self._add(node, "Add", [deviation, least])], made=result
            )
            return
        epsilon = node.attrs.get("epsilon", 1e-5)
        assert isinstance(epsilon, int | float)
        channels, space = data.shape[1], data.shape[2:]
        shape, scale_shape = data.shape, (channels, *[1] * len(space))
        if node.op == GROUP:
            groups = node.attrs["num_groups"]
            assert isinstance(groups, int)
            shape = (data.shape[0], groups, channels // groups, *space)
            size = channels // groups if self.graph.opsets[""] >= _SCALE_A_CHANNEL else 1
            scale_shape = (groups, size, *[1] * len(space))
            x = self._reshape(node, x, shape)
        centred, variance = self._centred(node, x, range(2, len(shape)))
        least = self._number(node, "epsilon", epsilon, data)
        deviation = self._add(node, "Sqrt", [self._add(node, "Add", [variance, least])])
        scale, bias = (self._reshape(node, value, scale_shape) for value in node.inputs[1:3])
        factor = self._add(node, "Div", [scale, deviation])
        scaled = self._add(node, "Mul", [centred, factor])
        if shape == data.shape:
            self._add(node, "Add", [scaled, bias], made=result)
        else:
            self._reshape(node, self._add(node, "Add", [scaled, bias]), data.shape, made=result)

    def _centred(self, node: Node, x: str, axes: Iterable[int]) -> tuple[str, str]:
        """The data less its means over these dims, and the variances."""
        dims, data = tuple(axes), self._type(x)
        count = math.prod(data.shape[dim] for dim in dims)
        centred = self._add(node, "Sub", [x, self._reduced(node, "ReduceMean", x, dims)])
        squares = self._reduced(node, "ReduceSumSquare", centred, dims)
        share = self._number(node, "share", 1 / count, data)
        return centred, self._add(node, "Mul", [squares, share])

    def _reduced(self, node: Node, op: str, x: str, dims: tuple[int, ...]) -> str:
        data = self._type(x)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(data.shape))
        if self.graph.opsets[""] < _AXES_INPUT:
            return self._add(node, op, [x], kept, axes=dims, keepdims=1)
        axes = self._constant(node, "axes", np.array(dims, np.int64))
        return self._add(node, op, [x, axes], kept, keepdims=1)

    def _reshape(self, node: Node, x: str, shape: tuple[int, ...], made: str = "") -> str:
        sizes = self._constant(node, "shape", np.array(shape, np.int64))
        return self._add(node, "Reshape", [x, sizes], shape, made)

    def _number(self, node: Node, name: str, number: float, like: TensorType) -> str:
        return self._constant(node, name, np.array(number, numpy_dtype(like.dtype)))

    def _constant(self, node: Node, name: str, array: np.ndarray) -> str:
        value = fresh(f"{node.name}/{name}", self._taken)
        self.constants[value] = Constant.of(array)
        self.types[value] = self.constants[value].type
        return value

    def _add(
        self,
        node: Node,
        op: str,
        reads: list[str],
        shape: tuple[int, ...] | None = None,
        made: str = "",
        **attrs: Attr,
    ) -> str:
        """Write a node; without a shape the result's is that of the broadcast operands."""
        name = fresh(f"{node.name}/{op}", self._taken)
        types = [self._type(value) for value in reads]
        if shape is None:
            shape = np.broadcast_shapes(*(tensor.shape for tensor in types))
        result = made or fresh(f"{name}:0", self._taken)
        if not made:
            self.types[result] = types[0].with_shape(shape)
        self.nodes.append(Node(name, op, tuple(reads), (result,), attrs))
        if node.name in self.graph.modules:
            self.modules[name] = self.graph.modules[node.name]
        return result

    def _type(self, value: str) -> TensorType:
        return self.types.get(value) or self.graph.types[value]
