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

A comparison with all those schemas, and with the results of ONNX's own node cases, finds these
(tests/frontends/onnx/inferring/test_corrections.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import onnx_ir
from onnx_ir import DataType, serde
from onnx_shape_inference import ShapeInferenceContext, registry

from partitioner.frontends.onnx.inferring import sizes
from partitioner.frontends.onnx.inferring.check_nodes import is_static
from partitioner.frontends.onnx.inferring.contents import CONTENTS, Infer, followed
from partitioner.frontends.onnx.inferring.window_counts import (
    POOLS,
    Size,
    Sizes,
    pool_counts,
    transposed_counts,
)
from partitioner.frontends.onnx.reading.runtime import (
    infer_by_runtime,
    runtime_operators,
    shares_buffer,
)

_DOMAIN = "com.microsoft"


@cache
def correct_inference() -> None:
    """Put the corrections before the library's own rules, which keep a type that they find."""
    registry.collect()
    _put_before("Slice", sizes.slice_, 10)
    _put_before("Range", sizes.range_)
    _put_before("Resize", sizes.scaled)
    _put_before("Upsample", sizes.scaled)
    for domain, op in runtime_operators():
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
    _put_before("Pad", sizes.pad, 18)
    _put_before("Split", sizes.split, 13)
    _put_before("Squeeze", sizes.squeeze, 13)
    for op, since in (("ConstantOfShape", 9), ("Expand", 8), ("Reshape", 5), ("Tile", 6)):
        _put_before(op, sizes.shaped, since)
    _put_before("Concat", sizes.concat, 4)
    _put_before("If", sizes.if_, 1)


def _put_before(op: str, rule: sizes.Rule, *since: int, domain: str = "") -> None:
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
        is_given = zero_point is not None and zero_point < len(node.inputs)
        value = node.inputs[zero_point] if zero_point is not None and is_given else None
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
    """Present keys and values are ``batch heads position channel`` also of packed operands."""
    shapes = [_by_heads(node, operand, 3 + operand) for operand in (1, 2)]
    by_heads = [
        (value, shape)
        for value, shape in zip(node.outputs[1:3], shapes, strict=False)
        if shape is not None
    ]
    for value, _ in by_heads:
        value.shape = None
    infer(context, node)
    for value, shape in by_heads:
        value.shape = shape


def _by_heads(node: onnx_ir.Node, operand: int, past: int) -> onnx_ir.Shape | None:
    """The shape of packed keys or values by heads; None with past ones, or where it is not known.

    Sizes that are not known yet are found by a later turn.
    """
    value, count = node.inputs[operand], node.attributes.get_int("kv_num_heads", 0)
    is_past = len(node.inputs) > past and node.inputs[past] is not None
    if is_past or value is None or value.shape is None or len(value.shape) != 3:
        return None
    batch, positions, width = value.shape
    if not isinstance(width, int) or count < 1 or width % count:
        return None
    return onnx_ir.Shape([batch, count, positions, width // count])
