"""Sizes of results as ONNX Runtime rounds and clamps them, where onnx_shape_inference does not.

Slice clamps the start of a negative step to the first place. Its axes and steps may be computed at
run time, and of a dim of unknown size not even a constant end tells the size: the library guesses.
Resize and Upsample multiply sizes by scales in float32, Range computes in doubles.
Grids of all of them are compared with ONNX Runtime (tests/frontends/onnx/inferring/test_sizes.py).
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import onnx_ir
from onnx_ir import convenience
from onnx_shape_inference import ShapeInferenceContext, registry

from partitioner.frontends.onnx.inferring.contents import Rule, known_integers, part_of

#: Ends that mean the end of the dim, for a positive step.
_TO_THE_END = (2**31 - 1, 2**63 - 1)


def size_as_onnx_runtime() -> None:
    """Register these rules in the registry of onnx_shape_inference, once a process."""
    registry.collect()
    registry.register("", "Slice", 10)(_slice)
    for op_type in ("Range", "Resize", "Upsample"):
        for since in registry.version_boundaries("", op_type):
            known = registry.get("", op_type, since)
            assert known is not None
            rule = _range if op_type == "Range" else _scaled
            registry.register("", op_type, since)(partial(rule, known))


def _slice(context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
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
    count = _length(bounds[0], firsts)
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
        elif start == 0 and step == 1 and end in _TO_THE_END:
            dims[axis] = size


def _length(value: onnx_ir.Value | None, known: list[int] | None) -> int | None:
    if known is not None:
        return len(known)
    size = None if value is None or value.shape is None else value.shape[0]
    return size if isinstance(size, int) else None


def _scaled(known: Rule, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """The sizes of Resize and Upsample by scales: products in float32, without the fraction."""
    data = node.inputs[0]
    index = 1 if node.op_type == "Upsample" or len(node.inputs) == 2 else 2
    by_sizes = len(node.inputs) > 3 and node.inputs[3] is not None
    operand = node.inputs[index] if len(node.inputs) > index and not by_sizes else None
    tensor = None if operand is None else convenience.get_const_tensor(operand)
    if data is None or data.shape is None or tensor is None:
        known(context, node)
        return
    scales = tensor.numpy().ravel()
    dims: list[int | onnx_ir.SymbolicDim] = list(data.shape.dims)
    named = node.attributes.get("axes")
    axes = list(range(len(dims))) if named is None else list(named.as_ints())
    if len(axes) != len(scales):
        known(context, node)
        return
    for axis, scale in zip(axes, scales, strict=True):
        size = dims[axis]
        dims[axis] = (
            int(np.float32(size) * np.float32(scale))
            if isinstance(size, int)
            else context.new_symbolic_dim()
        )
    context.set_shape_and_dtype(node.outputs[0], onnx_ir.Shape(dims), data.dtype)


def _range(known: Rule, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """The length of a Range of constants, in doubles."""
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
