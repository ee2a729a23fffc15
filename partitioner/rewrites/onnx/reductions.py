"""Reductions along a dim as maxima, sums and what is made of them, which may be cut along the dim.

A norm is the root of a sum of squares, and a ReduceLogSum the logarithm of a sum: these are always
written so, as the node that is added is as small as the result. The parts of the others go over
the data more often than a kernel, so they are another graph, and the search takes the better one:
a softmax is exponentials less the largest element over their sum, and the place of the largest
element is the first place where an element equals it. That form is for long dims, such as those of
a vocabulary, that are cut with the product before them; the weights of attention have a form of
their own (`rewrites.keys`). Results are those of ONNX Runtime's kernels, infinities and NaN
included. Half precision keeps the operator, whose sums are of a wider type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.onnx.reduction import reduced_dims, softmax_dims
from partitioner.ir.ops.table import OpView
from partitioner.ir.types import numpy_dtype
from partitioner.rewrites.keys import weighs_values
from partitioner.rewrites.node_writer import Form, PartWriter

#: Least elements along the reduced dims for a second form: a row of fewer, 4 KiB, is gathered in
#: less time than an all-reduce takes to start, by the figures of all presets but `ideal`.
LEAST_ELEMENTS = 1024
#: First opset in which Equal and IsInf take all types of floats that have a form here.
_COMPARES = 11

Dims = Callable[[OpView], frozenset[int]]


def _softmax_dims(view: OpView) -> frozenset[int]:
    return (
        frozenset(dim % view.rank() for dim in softmax_dims(view)) if view.rank() else frozenset()
    )


def _arg_dims(view: OpView) -> frozenset[int]:
    return frozenset({view.dim("axis", 0)}) if view.rank() else frozenset()


def _norm_dims(view: OpView) -> frozenset[int]:
    return frozenset({view.dim("axis", -1)}) if view.rank() else frozenset()


def _dims(of: Dims, graph: Graph, node: Node, dtypes: tuple[str, ...]) -> frozenset[int]:
    """The reduced dims of a node whose data has one of these types; none if it has no parts."""
    data = graph.types[node.inputs[0]]
    if data.dtype not in dtypes or not data.nbytes:
        return frozenset()
    try:
        return of(OpView(node, graph))
    except IRError:
        return frozenset()


def _divides(graph: Graph, node: Node) -> bool:
    """Test whether a reduction combines elements."""
    dims = _dims(reduced_dims, graph, node, ("float32", "float64"))
    return math.prod(graph.types[node.inputs[0]].shape[dim] for dim in dims) > 1


def _is_long(
    graph: Graph,
    node: Node,
    of: Dims,
    *,
    opset: int = 1,
    dtypes: tuple[str, ...] = ("float32", "float64"),
) -> bool:
    """Test whether a node reduces a long dim, of more elements than there are results.

    Of more results than that the other dims are cut.
    """
    if graph.opsets.get("", 1) < opset:
        return False
    dims, data = _dims(of, graph, node, dtypes), graph.types[node.inputs[0]]
    count = math.prod(data.shape[dim] for dim in dims)
    return count >= LEAST_ELEMENTS and count * count >= data.numel


def _is_long_softmax(graph: Graph, node: Node) -> bool:
    """Test whether a softmax is over a long dim and weighs no values, as attention's does."""
    return _is_long(graph, node, _softmax_dims) and not weighs_values(graph, node.outputs[0])


def _root_of_squares(writer: PartWriter) -> None:
    view = writer.view
    keepdims, dims = view.int_attr("keepdims", 1), sorted(reduced_dims(view))
    squares = writer.reduced("ReduceSumSquare", writer.operand, dims, keepdims=keepdims)
    writer.add("Sqrt", [squares], made=writer.result)


def _log_of_sum(writer: PartWriter) -> None:
    view = writer.view
    keepdims, dims = view.int_attr("keepdims", 1), sorted(reduced_dims(view))
    total = writer.reduced("ReduceSum", writer.operand, dims, keepdims=keepdims)
    writer.add("Log", [total], made=writer.result)


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
    _shaped(writer, writer.add("Add", [logarithm, largest]))


def _softmax(writer: PartWriter) -> None:
    powers, total, _ = _exponentials(writer)
    writer.add("Div", [powers, total], made=writer.result)


def _log_softmax(writer: PartWriter) -> None:
    _, total, less = _exponentials(writer)
    writer.add("Sub", [less, writer.add("Log", [total])], made=writer.result)


def _exponentials(writer: PartWriter) -> tuple[str, str, str]:
    """Exponentials of elements less the largest, their sum, and these differences."""
    x, dims = writer.operand, sorted(_softmax_dims(writer.view))
    less = writer.add("Sub", [x, writer.reduced("ReduceMax", x, dims)])
    powers = writer.add("Exp", [less])
    return powers, writer.reduced("ReduceSum", powers, dims), less


def _lp_normalization(writer: PartWriter) -> None:
    """Elements over their norm; zeros where it is 0."""
    view = writer.view
    x, dims = writer.operand, sorted(_norm_dims(view))
    if view.int_attr("p", 2) == 1:
        norm = writer.reduced("ReduceL1", x, dims)
    else:
        norm = writer.add("Sqrt", [writer.reduced("ReduceSumSquare", x, dims)])
    is_zero = writer.add("Equal", [norm, writer.number("zero", 0, x)], dtype="bool")
    norm = writer.add("Where", [is_zero, writer.number("all", math.inf, x), norm])
    writer.add("Div", [x, norm], made=writer.result)


def _place(writer: PartWriter) -> None:
    """ArgMax or ArgMin."""
    view = writer.view
    dims = sorted(_arg_dims(view))
    write = _last_place if view.int_attr("select_last_index", 0) else _first_place
    place = write(writer, dims, least=writer.node.op == "ArgMin")
    keep = writer.type(place).shape == writer.graph.types[writer.result].shape
    made = writer.result if keep else ""
    index = writer.add("Cast", [place], made=made, dtype="int64", attrs={"to": _INT64})
    if not keep:
        _shaped(writer, index)


#: `onnx.TensorProto.INT64` and `FLOAT`, the attribute of Cast.
_INT64, _FLOAT = 7, 1


def _first_place(writer: PartWriter, dims: list[int], *, least: bool) -> str:
    """The first place of the largest element, or of the least.

    ONNX Runtime compares each element with the first one and those after it, so that NaN counts
    nowhere but at the first place, where it counts as the largest: here as an infinity.
    """
    x = writer.operand
    data, places = writer.type(x), _places(writer, dims)
    if "float" in data.dtype:
        other_end = math.inf if least else -math.inf
        fill = np.full(writer.type(places).shape, other_end, numpy_dtype(data.dtype))
        fill.reshape(-1)[0] = -other_end
        absent = writer.add("IsNaN", [x], dtype="bool")
        x = writer.add("Where", [absent, writer.constant("fill", fill), x])
    extreme = writer.reduced("ReduceMin" if least else "ReduceMax", x, dims)
    equal = writer.add("Equal", [x, extreme], dtype="bool")
    behind = writer.number("behind", _count(data.shape, dims), places)
    return writer.reduced("ReduceMin", writer.add("Where", [equal, places, behind]), dims)


def _last_place(writer: PartWriter, dims: list[int], *, least: bool) -> str:
    """The last place of the largest element, or of the least; the first one if NaN stands there."""
    x = writer.operand
    data, places = writer.type(x), _places(writer, dims)
    is_float, clean = "float" in data.dtype, x
    if is_float:
        absent = writer.add("IsNaN", [x], dtype="bool")
        fill = writer.number("fill", math.inf if least else -math.inf, x)
        clean = writer.add("Where", [absent, fill, x])
    extreme = writer.reduced("ReduceMin" if least else "ReduceMax", clean, dims)
    equal = writer.add("Equal", [x, extreme], dtype="bool")
    before = writer.number("before", -1, places)
    chosen = writer.add("Where", [equal, places, before])
    if not is_float:
        return writer.reduced("ReduceMax", chosen, dims)
    count = writer.number("count", _count(data.shape, dims), places)
    first = np.zeros(writer.type(places).shape, bool)
    first.reshape(-1)[0] = True
    absent = writer.add("And", [absent, writer.constant("first", first)], dtype="bool")
    chosen = writer.add("Where", [absent, count, chosen])
    return writer.add("Mod", [writer.reduced("ReduceMax", chosen, dims), count])


def _hardmax(writer: PartWriter) -> None:
    """Mark the first place of the largest element with 1."""
    dims = sorted(_softmax_dims(writer.view))
    place = _first_place(writer, dims, least=False)
    places = _places(writer, dims)
    equal = writer.add("Equal", [places, place], dtype="bool")
    shape = writer.type(writer.operand).shape
    writer.add("Cast", [equal], shape, made=writer.result, attrs={"to": _FLOAT})


def _places(writer: PartWriter, dims: list[int]) -> str:
    """The place of each element along these dims, as a constant."""
    shape = writer.type(writer.operand).shape
    kept = [size if dim in dims else 1 for dim, size in enumerate(shape)]
    return writer.constant("places", np.arange(_count(shape, dims), dtype=np.int32).reshape(kept))


def _count(shape: tuple[int, ...], dims: list[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


def _shaped(writer: PartWriter, x: str) -> None:
    """The node's result in its shape, with or without the reduced dims."""
    result = writer.result
    writer.reshaped(x, writer.graph.types[result].shape, made=result)


_ARG = Form(
    partial(
        _is_long, of=_arg_dims, opset=_COMPARES, dtypes=("float32", "float64", "int32", "int64")
    ),
    _place,
)

#: Reductions whose parts are one kernel more, on what is as small as the result.
WITHOUT_KERNELS: Mapping[str, Form] = {
    "ReduceL2": Form(_divides, _root_of_squares),
    "ReduceLogSum": Form(_divides, _log_of_sum),
}

#: Reductions whose parts go over the data more often than the kernel of ONNX Runtime.
WITH_KERNELS: Mapping[str, Form] = {
    "ArgMax": _ARG,
    "ArgMin": _ARG,
    "Hardmax": Form(
        partial(_is_long, of=_softmax_dims, opset=_COMPARES, dtypes=("float32",)), _hardmax
    ),
    "LogSoftmax": Form(_is_long_softmax, _log_softmax),
    "LpNormalization": Form(partial(_is_long, of=_norm_dims, opset=_COMPARES), _lp_normalization),
    "ReduceLogSumExp": Form(
        partial(_is_long, of=reduced_dims, opset=_COMPARES), _log_of_exponentials
    ),
    "Softmax": Form(_is_long_softmax, _softmax),
}
