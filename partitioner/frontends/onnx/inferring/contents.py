"""Contents of small integer tensors, element by element, as ONNX Runtime computes them.

Shapes depend on sizes that a model computes: Shape, Gather, Concat, arithmetic. The library
onnx_shape_inference follows them, but as flat lists of unlimited integers: it takes a row of a
matrix for an element, divides sizes that were cast to floats without the fraction, knows no
overflow and loses the first element of a reversed vector. Here its rules infer types alone, and
NumPy computes the contents. An element that is not known is a symbol.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir
from onnx_ir import DataType, convenience
from onnx_shape_inference import ShapeInferenceContext

#: Most elements of a tensor whose contents are followed.
MOST_FOLLOWED = 256
#: Ends of a Slice that mean the end of the dim.
TO_THE_END = (2**31 - 1, 2**63 - 1)

#: The library's inference of an operator.
Infer: TypeAlias = Callable[[ShapeInferenceContext, onnx_ir.Node], None]
Elements: TypeAlias = "np.ndarray[Any, np.dtype[np.object_]]"  #: Integers, truth values, symbols.


@dataclass(frozen=True)
class _Call:
    """A node with the contents of its operands."""

    node: onnx_ir.Node
    #: Their contents, as far as they are known; None where an operand is absent.
    operands: Sequence[Elements | None]
    unknown: Callable[[], onnx_ir.SymbolicDim]  #: Makes a new symbol.

    def axis(self) -> int:
        return int(self.node.attributes.get_int("axis", 0))

    def shape(self, index: int = 0) -> tuple[int, ...]:
        shape = self.node.outputs[index].shape
        assert shape is not None
        return shape.numpy()


#: The contents of a node's results; None where they cannot be told.
Contents: TypeAlias = Callable[[_Call], "Sequence[Elements] | None"]


def followed(
    contents: Contents, infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node
) -> None:
    """Let the library infer the types of results, and tell their contents."""
    infer(_TypesOnly(context), node)
    if any(value.dtype not in _LIMITS or _followed_shape(value) is None for value in node.outputs):
        return
    known = [_contents(context, value) for value in node.inputs]
    if all(elements is None for elements in known):
        return
    operands = []
    for value, elements in zip(node.inputs, known, strict=True):
        if value is not None and elements is None:
            shape = _followed_shape(value)
            if shape is None:
                return
            symbols = [context.new_symbolic_dim() for _ in range(math.prod(shape))]
            elements = _array(symbols, shape)
        operands.append(elements)
    results = contents(_Call(node, operands, context.new_symbolic_dim))
    for value, result in zip(node.outputs, results or (), strict=False):
        _tell(context, value, result)


class _TypesOnly:
    """A context of inference that keeps no contents."""

    def __init__(self, context: ShapeInferenceContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> object:
        return getattr(self._context, name)

    def set_symbolic_value(self, value: onnx_ir.Value, data: object) -> None:
        """Keep nothing: these are the library's contents."""


def known_integers(context: ShapeInferenceContext, value: onnx_ir.Value | None) -> list[int] | None:
    """The elements of an integer operand, in order; None unless all are known."""
    elements = _contents(context, value, most=None)
    return None if elements is None else _integers(elements)


def part_of(size: int, start: int, end: int, step: int) -> tuple[int, int]:
    """The first place and the number of places that Slice takes of a dim in ONNX Runtime."""
    first = start + size if start < 0 else start
    first = min(max(first, 0), size - 1 if step < 0 else size)
    if end in TO_THE_END:
        last = -1 if step < 0 else size
    else:
        last = min(max(end + size if end < 0 else end, -1 if step < 0 else 0), size)
    return first, max(0, -((first - last) // step))


def _followed_shape(value: onnx_ir.Value) -> tuple[int, ...] | None:
    if value.shape is None or not value.shape.is_static():
        return None
    shape = value.shape.numpy()
    return shape if math.prod(shape) <= MOST_FOLLOWED else None


def _contents(
    context: ShapeInferenceContext, value: onnx_ir.Value | None, most: int | None = MOST_FOLLOWED
) -> Elements | None:
    """Return the known elements of an operand of integers or truth values."""
    if value is None or value.dtype not in _LIMITS:
        return None
    tensor = convenience.get_const_tensor(value)
    if tensor is not None:
        is_small = most is None or tensor.size <= most
        return tensor.numpy().astype(object) if is_small else None
    shape, elements = _followed_shape(value), context.get_symbolic_value(value)
    if shape is None or elements is None or math.prod(shape) != len(elements):
        return None
    return _array(elements, shape)


def _array(elements: Sequence[object], shape: tuple[int, ...]) -> Elements:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _tell(context: ShapeInferenceContext, value: onnx_ir.Value, elements: Elements) -> None:
    """Keep the contents of a result: as a constant where all are known."""
    assert value.shape is not None
    if elements.shape != value.shape.numpy():
        return
    flat = [int(x) if isinstance(x, bool | int | np.integer) else x for x in elements.reshape(-1)]
    if all(isinstance(x, int) for x in flat):
        assert value.dtype is not None
        array = np.array(flat, value.dtype.numpy()).reshape(elements.shape)
        value.const_value = onnx_ir.Tensor(array, name=value.name)
    if elements.ndim <= 1:
        context.set_symbolic_value(value, flat)


def _integers(elements: Elements | None) -> list[int] | None:
    if elements is None or not all(_is_known(x) for x in elements.reshape(-1)):
        return None
    return [int(x) for x in elements.reshape(-1)]


def _is_known(element: object) -> bool:
    return not isinstance(element, onnx_ir.SymbolicDim)


#: Least and largest number of each type whose contents are followed.
_LIMITS: Mapping[DataType | None, tuple[int, int]] = {
    DataType.BOOL: (0, 1),
    **{
        DataType[f"{sign}INT{bits}"]: (least, least + 2**bits - 1)
        for bits in (8, 16, 32, 64)
        for sign, least in (("", -(2 ** (bits - 1))), ("U", 0))
    },
}


def _each(call: _Call, operation: Callable[..., object], *operands: Elements) -> Elements:
    """Elements computed one by one, with the operands broadcast against each other."""
    dtype = call.node.outputs[0].dtype
    low, high = _LIMITS[dtype]

    def one(*elements: object) -> object:
        result = operation(*elements)
        if isinstance(result, int):  # bits beyond the type's are lost
            is_bool = dtype == DataType.BOOL
            return int(result != 0) if is_bool else (result - low) % (high - low + 1) + low
        return result if isinstance(result, onnx_ir.SymbolicDim) else call.unknown()

    arrays = np.broadcast_arrays(*operands)
    flat = zip(*(array.reshape(-1) for array in arrays), strict=True)
    return _array([one(*elements) for elements in flat], arrays[0].shape)


def _folded(operation: Callable[[Any, Any], object], call: _Call) -> Sequence[Elements] | None:
    first, *others = (elements for elements in call.operands if elements is not None)
    for other in others:
        first = _each(call, operation, first, other)
    return [first]


def _divided(call: _Call) -> Sequence[Elements] | None:
    """Integers without the fraction; ONNX Runtime ends at a division by 0 or an overflow."""
    dividend, divisor = call.operands
    assert dividend is not None
    assert divisor is not None
    low = _LIMITS[call.node.outputs[0].dtype][0]
    if 0 in divisor or (-1 in divisor and low in dividend):
        return None

    def quotient(a: object, b: object) -> object:
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        return abs(a) // abs(b) if (a < 0) == (b < 0) else -(abs(a) // abs(b))

    return _folded(quotient, call)


def _extreme(choose: Callable[[int, int], int]) -> Contents:
    def chosen(a: object, b: object) -> object:
        if isinstance(a, int) and isinstance(b, int):
            return choose(a, b)
        return a if _same(a, b) else None

    return partial(_folded, chosen)


def _same(a: object, b: object) -> bool:
    """Tell whether two elements are surely equal."""
    if isinstance(a, onnx_ir.SymbolicDim) and isinstance(b, onnx_ir.SymbolicDim):
        return a.value is not None and a.value == b.value
    return _is_known(a) and _is_known(b) and a == b


def _chosen(condition: object, a: object, b: object) -> object:
    if _is_known(condition):
        return a if condition else b
    return a if _same(a, b) else None


def _mapped(operation: Callable[..., object], call: _Call) -> Sequence[Elements] | None:
    return [_each(call, operation, *(x for x in call.operands if x is not None))]


def _cast(call: _Call) -> Sequence[Elements] | None:
    elements = call.operands[0]
    assert elements is not None
    symbols_stay = call.node.outputs[0].dtype == DataType.INT64
    return [_each(call, lambda x: x if _is_known(x) or symbols_stay else None, elements)]


def _rearranged(call: _Call) -> Sequence[Elements] | None:
    elements = call.operands[0]
    if elements is None or elements.size != math.prod(call.shape()):
        return None
    return [elements.reshape(call.shape())]


def _gathered(call: _Call) -> Sequence[Elements] | None:
    data, places = call.operands
    indices, axis = _integers(places), call.axis()
    if data is None or places is None or indices is None or not -data.ndim <= axis < data.ndim:
        return None
    size = data.shape[axis]
    if not all(-size <= index < size for index in indices):
        return None
    taken = np.take(data, np.array(indices, np.int64).reshape(places.shape), axis)
    return [np.asarray(taken, object)]


def _cut(call: _Call) -> Sequence[Elements] | None:
    data, *bounds = call.operands
    if data is None or len(bounds) < 2:
        return None
    starts, ends, axes, steps = (
        _integers(bounds[index]) if index < len(bounds) and bounds[index] is not None else default
        for index, default in enumerate((None, None, list(range(data.ndim)), None))
    )
    if starts is None or ends is None or axes is None:
        return None
    if len(bounds) > 3 and bounds[3] is not None and steps is None:
        return None
    steps = [1] * len(starts) if steps is None else steps
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=False):
        if not -data.ndim <= axis < data.ndim or not step:
            return None
        first, count = part_of(data.shape[axis], start, end, step)
        places = first + step * np.arange(count)
        data = np.take(data, places, axis)
    return [data]


def _parts(call: _Call) -> Sequence[Elements] | None:
    data, axis = call.operands[0], call.axis()
    if data is None or not -data.ndim <= axis < data.ndim:
        return None
    sizes = [call.shape(index)[axis] for index in range(len(call.node.outputs))]
    return np.split(data, np.cumsum(sizes)[:-1], axis) if sum(sizes) == data.shape[axis] else None


#: The contents of the results of operators. Those of floats are not followed: ONNX Runtime computes
#: them when all operands are constant.
CONTENTS: Mapping[str, Contents] = {
    "Add": partial(_folded, operator.add),
    "Cast": _cast,
    **dict.fromkeys(("Ceil", "Floor", "Sum"), lambda _: None),
    "Concat": lambda call: [
        np.concatenate([x for x in call.operands if x is not None], call.axis())
    ],
    "Div": _divided,
    "Gather": _gathered,
    "Identity": _rearranged,
    "Max": _extreme(max),
    "Min": _extreme(min),
    "Mul": partial(_folded, operator.mul),
    "Neg": partial(_mapped, lambda x: -x if isinstance(x, int) else None),
    "Reshape": _rearranged,
    "Slice": _cut,
    "Split": _parts,
    "Squeeze": _rearranged,
    "Sub": partial(_folded, operator.sub),
    "Unsqueeze": _rearranged,
    "Where": partial(_mapped, _chosen),
}
