"""Normalizations as means, squares and a scale, which may be cut along what is normalised.

ONNX Runtime has no kernel of GroupNormalization on a CPU and computes it as such nodes itself: it
is always written so. InstanceNormalization and MeanVarianceNormalization have kernels, which are
faster where nothing is cut: their form in parts is another graph, and the search takes the better
one. Variances are those of centred elements, in two passes, as the difference of two large numbers
would lose digits. Half precision keeps the operator, which has statistics of another type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from partitioner.ir.graph import Graph, Node
from partitioner.rewrites.node_writer import Form, PartWriter

#: First opset in which GroupNormalization has a scale and a bias a channel, not a group.
_SCALE_A_CHANNEL = 21


def _divides(graph: Graph, node: Node) -> bool:
    """Test whether a normalization of a graph has a form in parts.

    Those of one element a mean stay: there is nothing to cut.
    """
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


def _mean_variance(writer: PartWriter) -> None:
    """Write a MeanVarianceNormalization as ONNX Runtime's kernel computes it.

    The kernel adds nothing to a deviation, although ONNX's definition adds 1e-9: elements that are
    all alike give NaN, in parts as well.
    """
    x, result = writer.operand, writer.result
    centred, variance = _centred(writer, x, _normalised(writer.node, writer.type(x).rank))
    writer.add("Div", [centred, writer.add("Sqrt", [variance])], made=result)


def _scaled(writer: PartWriter) -> None:
    """A norm of instances or groups, with a scale and a bias."""
    x, result = writer.operand, writer.result
    data = writer.type(x)
    epsilon = writer.node.attrs.get("epsilon", 1e-5)
    assert isinstance(epsilon, int | float)
    channels, space = data.shape[1], data.shape[2:]
    shape, scale_shape = data.shape, (channels, *[1] * len(space))
    groups = writer.node.attrs.get("num_groups")
    if isinstance(groups, int):
        shape = (data.shape[0], groups, channels // groups, *space)
        size = channels // groups if writer.graph.opsets[""] >= _SCALE_A_CHANNEL else 1
        scale_shape = (groups, size, *[1] * len(space))
        x = writer.reshaped(x, shape)
    centred, variance = _centred(writer, x, range(2, len(shape)))
    least = writer.number("epsilon", epsilon, x)
    deviation = writer.add("Sqrt", [writer.add("Add", [variance, least])])
    scale, bias = (writer.reshaped(value, scale_shape) for value in writer.node.inputs[1:3])
    factor = writer.add("Div", [scale, deviation])
    scaled = writer.add("Mul", [centred, factor])
    if shape == data.shape:
        writer.add("Add", [scaled, bias], made=result)
    else:
        writer.reshaped(writer.add("Add", [scaled, bias]), data.shape, made=result)


def _centred(writer: PartWriter, x: str, axes: Iterable[int]) -> tuple[str, str]:
    """The data less its means over these dims, and the variances."""
    dims, data = tuple(axes), writer.type(x)
    count = math.prod(data.shape[dim] for dim in dims)
    centred = writer.add("Sub", [x, writer.reduced("ReduceMean", x, dims)])
    squares = writer.reduced("ReduceSumSquare", centred, dims)
    share = writer.number("share", 1 / count, x)
    return centred, writer.add("Mul", [squares, share])


#: Normalizations without a kernel of ONNX Runtime on a CPU.
WITHOUT_KERNELS: Mapping[str, Form] = {"GroupNormalization": Form(_divides, _scaled)}

#: Normalizations of which ONNX Runtime has a kernel.
WITH_KERNELS: Mapping[str, Form] = {
    "InstanceNormalization": Form(_divides, _scaled),
    "MeanVarianceNormalization": Form(_divides, _mean_variance),
}
