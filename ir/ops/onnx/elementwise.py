"""Elementwise ops with NumPy broadcasting, and QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from partitioner.ir.ops.rules.elementwise import elementwise, flops_of
from partitioner.ir.ops.signature import OpaqueError, broadcast, names, replaced
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

#: One result element is made of one element an operand.
FUNCTIONS = (
    *("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitCast"),
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu"),
    *("Clip", "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater"),
    *("GreaterOrEqual", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Less"),
    *("LessOrEqual", "Log", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow"),
    *("Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh"),
    *("Softplus", "Softsign", "Sqrt", "Sub", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where"),
    *("Xor", "com.microsoft::BiasGelu", "com.microsoft::FastGelu", "com.microsoft::Gelu"),
    "com.microsoft::QuickGelu",
)


def _cast_like(view: OpView) -> Rule:
    """The second operand gives its element type only, whatever its shape."""
    dims = broadcast(view.shape(), names("b", view.rank()))
    return view.rule([dims, dims if view.shape(1) == view.shape() else None], [dims])


def _dropout(view: OpView) -> Rule:
    """Inference: the result is the operand, the mask is all true."""
    if view.type(2) is not None and bool(view.constant(2).reshape(-1)[0]):
        raise OpaqueError("training_mode is on: the mask is drawn at random")
    return elementwise(view, 0.0)


def _quantize(view: OpView) -> Rule:
    """Scales and zero points lie along the dim they are given for; a block shares one scale."""
    shape, scale = view.shape(), view.shape(1)
    dims = broadcast(shape, names("d", len(shape)))
    dim = view.int_attr("axis", 1) % max(len(shape), 1)
    if not (len(scale) == len(shape) > 1 and view.int_attr("block_size", 0)):
        settings = [_along(view, index, dims[dim : dim + 1]) for index in (1, 2)]
        return view.rule([dims, *settings], [dims], flops=3)
    setting = replaced(dims, dim, "blocks")
    if shape[dim] % scale[dim]:  # The last block is short: its boundaries are not a factor's.
        whole = {dims[dim], "blocks"}
        points = [name for name in dims if name != "1"]
        return view.rule([dims, setting, setting], [dims], whole=whole, points=points, flops=3)
    dims, sizes = replaced(dims, dim, "(blocks block)"), {"block": shape[dim] // scale[dim]}
    return view.rule([dims, setting, setting], [dims], sizes=sizes, whole=["block"], flops=3)


def _along(view: OpView, index: int, line: list[str]) -> list[str] | None:
    """Dims of a scale or zero point, one for all ([] or [1]) or along a dim, each as it is."""
    setting = view.type(index)
    if setting is None:
        return None
    if setting.rank > 1:
        raise OpaqueError(f"operand {index} of shape {setting.shape} is not along one dim")
    return broadcast(setting.shape, line or ["1"])


ROWS: Mapping[str, OpRow] = {
    **{op: OpRow(partial(elementwise, flops=flops_of(op))) for op in FUNCTIONS},
    **{
        op: OpRow(lambda view: elementwise(view, float(len(view.types))))
        for op in ("Max", "Mean", "Min", "Sum")
    },
    "CastLike": OpRow(_cast_like),
    "DequantizeLinear": OpRow(_quantize),
    "Dropout": OpRow(_dropout),
    "Identity": OpRow(partial(elementwise, flops=0.0), view=True),
    "QuantizeLinear": OpRow(_quantize),
}
