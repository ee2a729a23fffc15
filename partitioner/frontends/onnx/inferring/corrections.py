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
from functools import partial

import onnx_ir
from onnx_ir import DataType, serde
from onnx_shape_inference import ShapeInferenceContext, registry

from partitioner.frontends.onnx.inferring.check_nodes import is_static
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

Infer = Callable[
    [ShapeInferenceContext, onnx_ir.Node], None
]  #: The library's inference of an operator.


def _zero_point(index: int) -> Callable[[onnx_ir.Node], DataType | None]:
    """The type of the result's zero point, float without one."""

    def dtype(node: onnx_ir.Node) -> DataType | None:
        value = node.inputs[index] if index < len(node.inputs) else None
        return DataType.FLOAT if value is None else value.dtype

    return dtype


#: Element type of the first result; None while it is not known.
_RESULTS: dict[str, Callable[[onnx_ir.Node], DataType | None]] = {
    "QEmbedLayerNormalization": lambda _: DataType.FLOAT,
    "QGemm": _zero_point(8),
    "QLinearConcat": _zero_point(1),
}

#: The windows of an operator, by its node and the sizes of its operand and result.
Counts = Callable[[onnx_ir.Node, Sizes, Sizes], list[Size]]
_COUNTS: dict[str, Counts] = {
    **dict.fromkeys(POOLS, pool_counts),
    "ConvTranspose": transposed_counts,
}


def correct_inference() -> None:
    """Put the corrections before the library's own inference, which keeps a type that it finds."""
    registry.collect()
    for domain, op in runtime_operators():
        infer = registry.get(domain, op, 1) if domain == _DOMAIN else None
        if infer is not None:
            ask = _group_query if op == "GroupQueryAttention" else _ask
            registry.register(domain, op)(partial(ask, infer))
    for op, dtype in _RESULTS.items():
        _register(op, dtype)
    registry.register("", "MelWeightMatrix", 17)(_leave)
    resize = registry.get("", "Resize", 18)
    assert resize is not None
    registry.register("", "Resize", 18)(partial(_resize, resize))
    for op, counts in _COUNTS.items():
        windows = registry.get("", op, 1)
        assert windows is not None
        registry.register("", op, 1)(partial(_windows, counts, windows))
    attention = registry.get("", "Attention", 23)
    assert attention is not None
    registry.register("", "Attention", 23)(partial(_attention, attention))
    loop = registry.get("", "Loop", 1)
    assert loop is not None
    registry.register("", "Loop", 1)(partial(_loop, loop))


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
                dtype = onnx_ir.DataType(type_.tensor_type.elem_type)
                context.set_shape_and_dtype(value, shape, dtype)
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


def _leave(_: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    """Infer nothing."""


def _resize(infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
    policy = node.attributes.get("keep_aspect_ratio_policy")
    if policy is None or policy.as_string() == "stretch":
        infer(context, node)


def _windows(
    counts: Counts, infer: Infer, context: ShapeInferenceContext, node: onnx_ir.Node
) -> None:
    """The spatial dims of the result have as many elements as ONNX Runtime counts windows."""
    for value in node.outputs:
        value.shape = None  # of an earlier turn
    infer(context, node)
    image, result = node.inputs[0], node.outputs[0].shape
    if image is None or image.shape is None or result is None:
        return
    dims = list(result)
    sizes = counts(node, list(image.shape)[2:], dims[2:])
    for value in node.outputs:
        value.shape = onnx_ir.Shape([*dims[:2], *sizes])


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
    for value, shape in zip(node.outputs[1:3], shapes, strict=False):
        if shape is not None:
            value.shape = None
    infer(context, node)
    for value, shape in zip(node.outputs[1:3], shapes, strict=False):
        if shape is not None:
            value.shape = shape


def _by_heads(node: onnx_ir.Node, operand: int, past: int) -> onnx_ir.Shape | None:
    """The shape of packed keys or values by heads; None with past ones, or where it is not known.

    Sizes that are not known yet are found by a later turn.
    """
    value, heads = node.inputs[operand], node.attributes.get("kv_num_heads")
    is_past = len(node.inputs) > past and node.inputs[past] is not None
    if is_past or heads is None or value is None or value.shape is None or len(value.shape) != 3:
        return None
    (batch, positions, width), count = value.shape, heads.as_int()
    if not isinstance(width, int) or count < 1 or width % count:
        return None
    return onnx_ir.Shape([batch, count, positions, width // count])


def _register(op: str, dtype: Callable[[onnx_ir.Node], DataType | None]) -> None:
    infer = registry.get(_DOMAIN, op, 1)
    assert infer is not None

    def typed(context: ShapeInferenceContext, node: onnx_ir.Node) -> None:
        result = dtype(node)
        if node.outputs and node.outputs[0].dtype is None and result is not None:
            node.outputs[0].dtype = result
        infer(context, node)

    registry.register(_DOMAIN, op)(typed)
