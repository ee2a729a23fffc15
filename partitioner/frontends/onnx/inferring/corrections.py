"""Corrections of onnx_shape_inference, which is wrong on some operators.

ONNX Runtime itself is asked for the types of its own operators (com.microsoft): the library takes
pools of quantised elements for elementwise operators, and the present keys of a
GroupQueryAttention to be its past ones and new ones, which they are not in a shared buffer. Where
ONNX Runtime cannot tell, as on an operator without a kernel for processors, the library does; some
element types of it are corrected.

It takes the operands of MelWeightMatrix for each other, and knows no aspect ratio in Resize: these
shapes are left to ONNX's own inference. It counts other windows of some pools and transposed
convolutions than ONNX Runtime does. It gives present keys and values of an Attention of 3-D
operands without past ones the shape of the operand. It refuses a Loop without a condition.

Slice clamps the start of a negative step to the first place. Its axes and steps may be computed at
run time, and of a dim of unknown size not even a constant end tells the size: the library guesses.
Resize and Upsample multiply sizes by scales in float32, Range computes in doubles.

The library reads an operand that is computed at run time as an absent one: it takes Split's parts
to be equal, Squeeze's axes to be all dims of size 1, and fails on Pad's axes. Where the shape of
one branch of an If is unknown, it takes the other's. A guess is worse than no shape, because it
contradicts what the model declares. Here the unknown stays unknown.

Comparisons with all those schemas, with the results of ONNX's own node cases and with grids in
ONNX Runtime find these (tests/frontends/onnx/inferring/).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import onnx_ir
from onnx_ir import DataType, convenience, serde
from onnx_shape_inference import ShapeInferenceContext, registry

from partitioner.frontends.onnx.inferring.check_nodes import MAX_RANK, is_static
from partitioner.frontends.onnx.inferring.contents import (
    CONTENTS,
    MOST_FOLLOWED,
    TO_THE_END,
    Infer,
    followed,
    known_integers,
    part_of,
)
from partitioner.frontends.onnx.inferring.window_counts import (
    POOLS,
    Size,
    Sizes,
    pool_counts,
    transposed_counts,
)
from partitioner.frontends.onnx.reading.runtime import infer_by_runtime, shares_buffer

_DOMAIN = "com.microsoft"
#: A rule that stands before the library's own, which it gets first.
Rule = Callable[[Infer, ShapeInferenceContext, onnx_ir.Node], None]


@cache
def correct_inference() -> None:
    """Put the corrections before the library's own rules, which keep a type that they find."""
    registry.collect()
    _put_before("Slice", _slice, 10)
    _put_before("Range", _range)
    _put_before("Resize", _scaled)
    _put_before("Upsample", _scaled)
    for domain, op, _ in list(registry.iter_supported()):
        if domain == _DOMAIN:
            ask = _group_query if op == "GroupQueryAttention" else _ask
            _put_before(op, ask, 1, domain=_DOMAIN)
    for op, zero_point in (("QEmbedLayerNormalization", None), ("QGemm", 8), ("QLinearConcat", 1)):
        _put_before(op, partial(_typed, zero_point), 1, domain=_DOMAIN)
    _put_before("MelWeightMatrix", lambda _infer, _context, _node: None, 17)
    _put_before("Resize", _resize, 18)
    for op in POOLS:
        _put_before(op, partial(_windows, pool_counts), 1)
    _put_before("ConvTranspose", partial(_windows, transposed_counts), 1)
    _put_before("Attention", _attention, 23)
    _put_before("Loop", _loop, 1)
    for op, contents in CONTENTS.items():
        _put_before(op, partial(followed, contents))
    # first opsets with an operand for the pads' axes, the parts, the axes, the shape
    _put_before("Pad", partial(_unless_constant, 3), 18)
    _put_before("Split", partial(_unless_constant, 1), 13)
    _put_before("Squeeze", partial(_unless_constant, 1), 13)
    for op, since in (("ConstantOfShape", 9), ("Expand", 8), ("Reshape", 5), ("Tile", 6)):
        _put_before(op, _shaped, since)
    _put_before("Concat", _concat, 4)
    _put_before("If", _if, 1)


def _put_before(op: str, rule: Rule, *since: int, domain: str = "") -> None:
    """Register a rule from these opsets on, by default from each that the library tells apart."""
    for opset in since or dict.fromkeys(registry.version_boundaries(domain, op)):
        known = registry.get(domain, op, opset)
        if known is not None:
            registry.register(domain, op, opset)(partial(rule, known))


def _typed(
    zero_point: int | None, infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node
) -> None:
    """Give the first result the type of its zero point, an operand; float without one."""
    result = node.outputs[0] if node.outputs else None
    if result is not None and result.dtype is None:
        value = next(iter(node.inputs[zero_point:]), None) if zero_point is not None else None
        dtype = DataType.FLOAT if value is None else value.dtype
        if dtype is not None:
            result.dtype = dtype
    infer(context, node)


def _ask(infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """ONNX Runtime tells, and the library what ONNX Runtime does not."""
    if all(is_static(value) for value in node.outputs if value.name):
        return
    if all(value is None or is_static(value) for value in node.inputs):
        types = infer_by_runtime(node, context.opset_imports)
        for value in node.outputs:
            type_ = types.get(value.name or "")
            if type_ is not None:
                shape = serde.deserialize_type_proto_for_shape(type_)
                context.set_shape_and_dtype(value, shape, DataType(type_.tensor_type.elem_type))
    is_told = all(is_static(value) for value in node.outputs if value.name)
    if not is_told and not shares_buffer(node):  # the library takes each new key for one more
        infer(context, node)


def _group_query(infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Present keys are past ones, of a length that an operand tells: often only at run time."""
    past = node.inputs[3] if shares_buffer(node) else None
    if past is not None and past.shape is not None and len(past.shape) == 4:
        for value in node.outputs[1:3]:
            if value.shape is None:
                batch, heads, _, channels = past.shape
                shape = onnx_ir.Shape([batch, heads, context.new_symbolic_dim(), channels])
                context.set_shape_and_dtype(value, shape, past.dtype)
    _ask(infer, context, node)


def _resize(infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") == "stretch":
        infer(context, node)


def _windows(
    counts: Callable[[onnx_ir.Node, Sizes, Sizes], list[Size]],
    infer: Infer,
    context: ShapeInferenceContext,
    node: onnx_ir.Node,
) -> None:
    """The spatial dims of the result have as many elements as ONNX Runtime counts windows."""
    for value in node.outputs:
        value.shape = None  # of an earlier turn
    infer(context, node)
    image, result = node.inputs[0], node.outputs[0].shape
    if image is None or image.shape is None or result is None:
        return
    dims = list(result)
    spatial = counts(node, list(image.shape)[2:], dims[2:])
    for value in node.outputs:
        value.shape = onnx_ir.Shape([*dims[:2], *spatial])


def _loop(infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """The condition may be absent: such a loop runs as often as its first operand says."""
    if len(node.inputs) < 2 or node.inputs[1] is not None:
        infer(context, node)
        return
    node.replace_input_with(1, onnx_ir.Value(name="true"))
    try:
        infer(context, node)
    finally:
        node.replace_input_with(1, None)


def _attention(infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Present keys and values without past ones are ``batch heads position channel``, too."""
    count, by_heads = node.attributes.get_int("kv_num_heads", 0), []
    for operand, result in zip((1, 2), node.outputs[1:3], strict=False):
        value, past = node.inputs[operand], node.inputs[3 + operand : 4 + operand]
        shape = None if value is None or any(past) else value.shape
        width = shape[2] if shape is not None and len(shape) == 3 else None
        if shape is not None and isinstance(width, int) and count > 0 and width % count == 0:
            by_heads.append((result, [shape[0], count, shape[1], width // count]))
            result.shape = None
    infer(context, node)
    for result, sizes in by_heads:
        result.shape = onnx_ir.Shape(sizes)


def _slice(_: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
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
    if value is None or value.shape is None or len(value.shape) != 1:
        return None
    size = value.shape[0]
    return size if isinstance(size, int) else None


def _scaled(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
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
        if isinstance(size, int):
            dims[axis] = int(np.float32(size) * np.float32(scale))
        else:
            dims[axis] = context.new_symbolic_dim()
    context.set_shape_and_dtype(node.outputs[0], onnx_ir.Shape(dims), data.dtype)


def _range(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
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


def _concat(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Ask the library only where it follows few elements: it does so for every vector, as sizes."""
    lengths = [_length(value) for value in node.inputs]
    total = sum(length for length in lengths if length is not None)
    first = node.inputs[0]
    if first is None or total <= MOST_FOLLOWED or None in lengths:
        known(context, node)
    else:
        context.set_shape_and_dtype(node.outputs[0], onnx_ir.Shape([total]), first.dtype)


def _if(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Drop the shapes of results that one branch alone knows."""
    before = [value.shape for value in node.outputs]
    known(context, node)
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    results = zip(node.outputs, before, *(branch.outputs for branch in branches), strict=False)
    for value, shape, then, other in results:
        if (then.shape is None) != (other.shape is None):
            value.shape = shape


def _shaped(known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Refuse an operand that is a shape of more dims than NumPy has (Tile's: repeats)."""
    rank = _length(node.inputs[-1]) if node.inputs else None
    if rank is not None and rank > MAX_RANK:
        raise ValueError(f"its shape has {rank} dims; at most {MAX_RANK} are supported")
    known(context, node)


def _unless_constant(
    operand: int, known: Infer, context: ShapeInferenceContext, node: onnx_ir.Node
) -> None:
    """Ask the library only where an operand is absent or constant; else few sizes stay."""
    value = node.inputs[operand] if len(node.inputs) > operand else None
    if value is None or convenience.get_const_tensor(value) is not None:
        known(context, node)
        return
    data = node.inputs[0]
    assert data is not None
    axis = node.attributes.get_int("axis", 0)
    for result in node.outputs:
        dims = None if data.shape is None else list(data.shape.dims)
        if dims is None or node.op_type == "Squeeze":
            dims = None  # axes may be listed twice, counted from both ends
        elif node.op_type == "Pad":
            dims = [context.new_symbolic_dim() for _ in dims]
        elif -len(dims) <= axis < len(dims):  # of a Split
            dims[axis] = context.new_symbolic_dim()
        else:
            dims = None
        shape = None if dims is None else onnx_ir.Shape(dims)
        context.set_shape_and_dtype(result, shape, data.dtype)
