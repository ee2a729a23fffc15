"""Reductions and normalizations of ONNX as maxima, sums and what follows, to cut along a dim.

A norm is the root of a sum of squares, and a ReduceLogSum the logarithm of a sum: these are always
written so, as the node that is added is as small as the result. The parts of the others go over
the data more often than a kernel, so they are another graph, and the search takes the better one:
a softmax is exponentials less the largest element over their sum, and the place of the largest
element is the first place where an element equals it. That form is for long dims, such as those of
a vocabulary, that are cut with the product before them; the weights of attention have a form of
their own (`rewrites.keys`). Results are those of ONNX Runtime's kernels, infinities and NaN
included. Half precision keeps the operator, whose sums are of a wider type.

ONNX Runtime has no kernel of GroupNormalization on a CPU and computes it as such nodes itself: it
is always written so. Variances are those of centred elements, in two passes, as the difference of
two large numbers would lose digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.onnx.reduction import reduced_dims, softmax_dims
from partitioner.ir.ops.table import OpView
from partitioner.ir.types import numpy_dtype
from partitioner.rewrites.graph_writer import Form, PartWriter
from partitioner.rewrites.keys import weighs_values

#: Least elements along the reduced dims for a second form: a row of fewer, 4 KiB, is gathered in
#: less time than an all-reduce takes to start, by the figures of all presets but `ideal`.
LEAST_ELEMENTS = 1024
#: Types of floats that have forms.
_WIDE = ("float32", "float64")
#: First opset in which Equal and IsInf take all types of floats that have a form here.
_COMPARES = 11
#: First opset in which GroupNormalization has a scale and a bias a channel, not a group.
_SCALE_A_CHANNEL = 21

Dims = Callable[[OpView], frozenset[int]]


def _softmax_dims(view: OpView) -> frozenset[int]:
    return frozenset(dim % view.rank() for dim in softmax_dims(view, view.opset))


def _axis(default: int, view: OpView) -> frozenset[int]:
    return frozenset({view.dim("axis", default)})


def _dims(of: Dims, graph: Graph, node: Node, dtypes: tuple[str, ...]) -> frozenset[int]:
    """The reduced dims of a node whose data has one of these types; none if it has no parts."""
    data = graph.types[node.inputs[0]]
    if data.dtype not in dtypes or not data.nbytes or not data.rank:
        return frozenset()
    try:
        return of(OpView(node, graph))
    except IRError:
        return frozenset()


def _divides(graph: Graph, node: Node) -> bool:
    dims = _dims(reduced_dims, graph, node, _WIDE)
    return math.prod(graph.types[node.inputs[0]].shape[dim] for dim in dims) > 1


def _is_long(
    graph: Graph, node: Node, of: Dims, opset: int = 1, dtypes: tuple[str, ...] = _WIDE
) -> bool:
    """Test whether a node reduces a long dim to fewer results; of more, the other dims are cut."""
    if graph.opsets.get("", 1) < opset:
        return False
    dims, data = _dims(of, graph, node, dtypes), graph.types[node.inputs[0]]
    count = math.prod(data.shape[dim] for dim in dims)
    return count >= LEAST_ELEMENTS and count * count >= data.numel


def _is_long_softmax(graph: Graph, node: Node) -> bool:
    """Test whether a softmax is over a long dim and weighs no values, as attention's does."""
    return _is_long(graph, node, _softmax_dims) and not weighs_values(graph, node.outputs[0])


def _of_sum(op: str, reduction: str, writer: PartWriter) -> None:
    view = writer.view
    keepdims, dims = view.int_attr("keepdims", 1), sorted(reduced_dims(view))
    total = writer.reduced(reduction, writer.operand, dims, keepdims=keepdims)
    writer.add(op, [total], made=writer.result)


def _log_of_exponentials(writer: PartWriter) -> None:
    """Sum exponentials of a row less its maximum, but for a maximum that is infinite."""
    x, dims = writer.operand, sorted(reduced_dims(writer.view))
    largest = writer.reduced("ReduceMax", x, dims)
    infinite = writer.add("IsInf", [largest], dtype="bool")
    zero = writer.number("zero", 0, x)
    largest = writer.add("Where", [infinite, zero, largest])
    powers = writer.add("Exp", [writer.add("Sub", [x, largest])])
    total = writer.reduced("ReduceSum", powers, dims)
    logarithm = writer.add("Log", [total])
    total = writer.add("Add", [logarithm, largest])
    writer.reshaped(total, writer.type(writer.result).shape, made=writer.result)


def _softmax(writer: PartWriter, *, logarithm: bool = False) -> None:
    x, dims = writer.operand, sorted(_softmax_dims(writer.view))
    less = writer.add("Sub", [x, writer.reduced("ReduceMax", x, dims)])
    powers = writer.add("Exp", [less])
    total = writer.reduced("ReduceSum", powers, dims)
    if logarithm:
        writer.add("Sub", [less, writer.add("Log", [total])], made=writer.result)
    else:
        writer.add("Div", [powers, total], made=writer.result)


def _place(writer: PartWriter) -> None:
    """Write the first place of the largest element, or of the least.

    ONNX Runtime compares each element with the first one and those after it, so that NaN counts
    nowhere but at the first place, where it counts as the largest: here as an infinity.
    """
    x, dims, least = writer.operand, sorted(_axis(0, writer.view)), writer.node.op == "ArgMin"
    data = writer.type(x)
    count = math.prod(data.shape[dim] for dim in dims)
    along = [size if dim in dims else 1 for dim, size in enumerate(data.shape)]
    places = writer.constant("places", np.arange(count, dtype=np.int32).reshape(along))
    if "float" in data.dtype:
        other_end = math.inf if least else -math.inf
        fill = np.full(along, other_end, numpy_dtype(data.dtype))
        fill.reshape(-1)[0] = -other_end
        absent = writer.add("IsNaN", [x], dtype="bool")
        x = writer.add("Where", [absent, writer.constant("fill", fill), x])
    extreme = writer.reduced("ReduceMin" if least else "ReduceMax", x, dims)
    equal = writer.add("Equal", [x, extreme], dtype="bool")
    behind = writer.number("behind", count, places)
    place = writer.reduced("ReduceMin", writer.add("Where", [equal, places, behind]), dims)
    shape = writer.type(writer.result).shape
    keep = writer.type(place).shape == shape
    made, attrs = writer.result if keep else "", {"to": _INT64}
    index = writer.add("Cast", [place], made=made, dtype="int64", attrs=attrs)
    if not keep:
        writer.reshaped(index, shape, made=writer.result)


#: `onnx.TensorProto.INT64`, the attribute of Cast.
_INT64 = 7


def _normalises(graph: Graph, node: Node) -> bool:
    """Test whether a wide normalization has a form in parts, over means of several elements."""
    tensors = [graph.types[value] for value in node.reads]
    data = tensors[0]
    wide = data.dtype in _WIDE and all(t.dtype == data.dtype for t in tensors)
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
    """Write a MeanVarianceNormalization as ONNX Runtime computes it: without ONNX's 1e-9."""
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


def _finds_first(graph: Graph, node: Node) -> bool:
    """Test whether a node gives the first place of an extreme along a long dim."""
    dtypes = "float32", "float64", "int32", "int64"
    is_last = bool(node.attrs.get("select_last_index", 0))
    return not is_last and _is_long(graph, node, partial(_axis, 0), _COMPARES, dtypes)


_ARG = Form(_finds_first, _place)

#: Operators without a kernel on a CPU, or whose parts are one more, as small as the result.
WITHOUT_KERNELS: Mapping[str, Form] = {
    "GroupNormalization": Form(_normalises, _scaled),
    "ReduceL2": Form(_divides, partial(_of_sum, "Sqrt", "ReduceSumSquare")),
    "ReduceLogSum": Form(_divides, partial(_of_sum, "Log", "ReduceSum")),
}

#: Operators whose parts go over the data more often than the kernel of ONNX Runtime.
WITH_KERNELS: Mapping[str, Form] = {
    "ArgMax": _ARG,
    "ArgMin": _ARG,
    "InstanceNormalization": Form(_normalises, _scaled),
    "LogSoftmax": Form(_is_long_softmax, partial(_softmax, logarithm=True)),
    "MeanVarianceNormalization": Form(_normalises, _mean_variance),
    "ReduceLogSumExp": Form(
        partial(_is_long, of=reduced_dims, opset=_COMPARES), _log_of_exponentials
    ),
    "Softmax": Form(_is_long_softmax, _softmax),
}
