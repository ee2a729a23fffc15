"""Sizes of results as ONNX Runtime has them, where onnx_shape_inference does not.

Slice clamps the start of a negative step to the first place. Its axes and steps may be computed at
run time, and of a dim of unknown size not even a constant end tells the size: the library guesses.
Resize and Upsample multiply sizes by scales in float32, Range computes in doubles.
Grids of all of them are compared with ONNX Runtime (tests/frontends/onnx/inferring/test_sizes.py).

The library reads an operand that is computed at run time as an absent one: it takes Split's parts
to be equal, Squeeze's axes to be all dims of size 1, and fails on Pad's axes. Where the shape of
one branch of an If is unknown, it takes the other's. A guess is worse than no shape, because it
contradicts what the model declares. Here the unknown stays unknown.

It also follows the elements of every vector that Concat makes, as sizes, one symbol each. Here it
does so up to a number that a shape can have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir
from onnx_ir import convenience
from onnx_shape_inference import ShapeInferenceContext

from partitioner.frontends.onnx.inferring.check_nodes import MAX_RANK
from partitioner.frontends.onnx.inferring.contents import (
    MOST_FOLLOWED,
    TO_THE_END,
    Infer,
    known_integers,
    part_of,
)

#: A rule that stands before the library's own, which it gets first.
Rule = Callable[[Infer, ShapeInferenceContext, onnx_ir.Node], None]


def slice_(_: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Infer a Slice whose axes and steps are operands."""
    data, starts, ends, *others = node.inputs
    axes, steps = (others[index] if index < len(others) else None for index in range(2))
    assert data is not None
    shape = None
    if data.shape is not None:
        dims = list(data.shape.dims)
        places = list(range(len(dims))) if axes is None else known_integers(context, axes)
        if places is None:
            dims = [context.new_symbolic_dim() for _ in dims]
        else:
            _take_parts(context, dims, places, starts, ends, steps)
        shape = onnx_ir.Shape(dims)
    context.set_shape_and_dtype(node.outputs[0], shape, data.dtype)


def _take_parts(
    context: ShapeInferenceContext,
    dims: list[int | onnx_ir.SymbolicDim],
    axes: list[int],
    *bounds: onnx_ir.Value | None,
) -> None:
    """Put the sizes that Slice leaves in place of those of the data."""
    firsts, lasts = (known_integers(context, value) for value in bounds[:2])
    count = _length(bounds[0]) if firsts is None else len(firsts)
    strides = [1] * len(dims) if bounds[2] is None else known_integers(context, bounds[2])
    for index, axis in enumerate(axes if count is None else axes[:count]):
        if not -len(dims) <= axis < len(dims):
            raise ValueError(f"axis {axis} is not a dim of its operand of {len(dims)} dims")
        size = dims[axis]
        dims[axis] = context.new_symbolic_dim()
        if firsts is None or lasts is None or strides is None:
            continue
        if max(index + 1 - len(lasts), index + 1 - len(strides)) > 0:
            raise ValueError("its starts, ends, axes and steps are not as many")
        start, end, step = firsts[index], lasts[index], strides[index]
        if not step:
            raise ValueError("a step is 0")
        if isinstance(size, int):
            dims[axis] = part_of(size, start, end, step)[1]
        elif start == 0 and step == 1 and end in TO_THE_END:
            dims[axis] = size


def _length(value: onnx_ir.Value | None) -> int | None:
    """Elements of a vector; None if that is not known, or the value is no vector."""
    if value is None or value.shape is None or len(value.shape) != 1:
        return None
    size = value.shape[0]
    return size if isinstance(size, int) else None


def scaled(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Infer Resize and Upsample by scales: products in float32, without the fraction."""
    data = node.inputs[0]
    index = 1 if node.op_type == "Upsample" or len(node.inputs) == 2 else 2
    by_sizes = len(node.inputs) > 3 and node.inputs[3] is not None
    operand = node.inputs[index] if len(node.inputs) > index and not by_sizes else None
    tensor = None if operand is None else convenience.get_const_tensor(operand)
    shape = None if data is None or tensor is None else data.shape
    axes = node.attributes.get_ints("axes", range(len(shape or ())))
    if data is None or shape is None or tensor is None or len(axes) != tensor.size:
        known(context, node)
        return
    dims: list[int | onnx_ir.SymbolicDim] = list(shape.dims)
    for axis, scale in zip(axes, tensor.numpy().ravel(), strict=True):
        size = dims[axis]
        is_known = isinstance(size, int)
        product = int(np.float32(size) * np.float32(scale)) if is_known else None
        dims[axis] = context.new_symbolic_dim() if product is None else product
    context.set_shape_and_dtype(node.outputs[0], onnx_ir.Shape(dims), data.dtype)


def range_(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Infer the length of a Range of constants, in doubles."""
    tensors = [convenience.get_const_tensor(v) for v in node.inputs if v is not None]
    values = [tensor.numpy().reshape(-1) for tensor in tensors if tensor is not None]
    if len(values) < 3 or any(value.size != 1 for value in values) or not values[2].all():
        known(context, node)
        return
    start, limit, delta = (np.float64(value[0]) for value in values)
    count = (limit - start) / delta
    if not math.isfinite(count):
        raise ValueError(f"its start, limit and delta make {count} elements")
    shape = onnx_ir.Shape([max(math.ceil(count), 0)])
    first = node.inputs[0]
    context.set_shape_and_dtype(node.outputs[0], shape, None if first is None else first.dtype)


def concat(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Ask the library only where it follows few elements."""
    lengths = [_length(value) for value in node.inputs]
    total = sum(length for length in lengths if length is not None)
    first = node.inputs[0]
    if first is None or total <= MOST_FOLLOWED or None in lengths:
        known(context, node)
    else:
        context.set_shape_and_dtype(node.outputs[0], onnx_ir.Shape([total]), first.dtype)


def if_(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Drop the shapes of results that one branch alone knows."""
    before = [value.shape for value in node.outputs]
    known(context, node)
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    results = zip(node.outputs, before, *(branch.outputs for branch in branches), strict=False)
    for value, shape, then, other in results:
        if (then.shape is None) != (other.shape is None):
            value.shape = shape


def shaped(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Refuse an operand that is a shape of more dims than NumPy has (Tile's: repeats)."""
    rank = _length(node.inputs[-1]) if node.inputs else None
    if rank is not None and rank > MAX_RANK:
        raise ValueError(f"its shape has {rank} dims; at most {MAX_RANK} are supported")
    known(context, node)


def _unknown(
    operand: int,
    dims: Callable[[ShapeInferenceContext, onnx_ir.Node, onnx_ir.Shape], onnx_ir.Shape | None],
    known: Infer,
    context: ShapeInferenceContext,
    node: onnx_ir.Node,
) -> None:
    """Ask the library only where an operand is absent or constant; else `dims` tells what stays."""
    value = node.inputs[operand] if len(node.inputs) > operand else None
    if value is None or convenience.get_const_tensor(value) is not None:
        known(context, node)
        return
    data = node.inputs[0]
    assert data is not None
    for result in node.outputs:
        shape = None if data.shape is None else dims(context, node, data.shape)
        context.set_shape_and_dtype(result, shape, data.dtype)


def _of_parts(
    context: ShapeInferenceContext, node: onnx_ir.Node, data: onnx_ir.Shape
) -> onnx_ir.Shape | None:
    axis, dims = node.attributes.get_int("axis", 0), list(data.dims)
    if not -len(dims) <= axis < len(dims):
        return None
    dims[axis] = context.new_symbolic_dim()
    return onnx_ir.Shape(dims)


split = partial(_unknown, 1, _of_parts)
#: Not even the rank is known: axes may be listed twice, counted from both ends.
squeeze = partial(_unknown, 1, lambda _context, _node, _data: None)
pad = partial(
    _unknown,
    3,
    lambda context, _, data: onnx_ir.Shape([context.new_symbolic_dim() for _ in data]),
)
