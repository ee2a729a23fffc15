"""Elementwise operators with broadcasting.

A number in place of a tensor is an attribute, so operands are what is left. Sums, differences and
products by numbers are linear: a pending sum passes through them. A product or quotient of
tensors is linear in the first, as long as the other is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.contraction import broadcast_dims
from partitioner.ir.ops.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

#: FLOPs a result element of operators with one tensor operand; moving or re-typing bits costs 0.
UNARY: Mapping[str, float] = {
    **dict.fromkeys(("abs", "bitwise_not", "ceil", "floor", "frac", "logical_not", "neg"), 1.0),
    **dict.fromkeys(("isinf", "isnan", "nan_to_num", "round", "round.decimals"), 1.0),
    **dict.fromkeys(("reciprocal", "relu", "sgn", "sign", "signbit", "sqrt", "trunc"), 1.0),
    **dict.fromkeys(("hardshrink", "threshold"), 1.0),
    **dict.fromkeys(("clamp", "clamp_max", "clamp_min", "hardtanh", "leaky_relu"), 2.0),
    **dict.fromkeys(("rsqrt", "softshrink"), 2.0),
    "hardsigmoid": 3.0,
    "hardswish": 4.0,
    **dict.fromkeys(("acos", "asin", "atan", "cos", "sin", "tan"), TRANSCENDENTAL),
    **dict.fromkeys(("acosh", "asinh", "atanh", "cosh", "sinh", "tanh"), TRANSCENDENTAL),
    **dict.fromkeys(("erf", "erfc", "exp", "exp2", "expm1"), TRANSCENDENTAL),
    **dict.fromkeys(("log", "log10", "log1p", "log2"), TRANSCENDENTAL),
    **dict.fromkeys(("celu", "elu", "logit", "sigmoid", "softplus"), TRANSCENDENTAL + 2),
    "silu": TRANSCENDENTAL + 3,
    "gelu": TRANSCENDENTAL + 4,
    "log_sigmoid_forward": 2 * TRANSCENDENTAL,  # log(1 + exp -|x|)
    "mish": 3 * TRANSCENDENTAL,  # x tanh(log(1 + exp x))
    **dict.fromkeys(("pow.Scalar", "pow.Tensor_Scalar"), 2 * TRANSCENDENTAL),  # exp(y log x)
}

#: Likewise of operators with several; each of these names is an overload.
JOINT: Mapping[str, float] = {
    **dict.fromkeys(("div.Tensor_mode", "div.Scalar_mode"), 1.0),
    **dict.fromkeys(("floor_divide", "floor_divide.Scalar"), 1.0),
    **dict.fromkeys(("fmax", "fmin", "maximum", "minimum"), 1.0),
    **dict.fromkeys(("clamp_max.Tensor", "clamp_min.Tensor"), 1.0),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), 1.0),
    **dict.fromkeys(("_prelu_kernel", "where.self"), 1.0),
    "clamp.Tensor": 2.0,
    "hypot": 4.0,
    "atan2": TRANSCENDENTAL,
    **dict.fromkeys(("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self"), TRANSCENDENTAL),
    "pow.Tensor_Tensor": 2 * TRANSCENDENTAL,
}

#: One FLOP a result element, with a tensor or a number on the right.
COMPARED = ("eq", "ge", "gt", "le", "lt", "ne", "copysign", "fmod")
#: With a number on either side.
EITHER_SIDE = ("bitwise_and", "bitwise_or", "bitwise_xor", "remainder")
SHIFTED = ("bitwise_left_shift", "bitwise_right_shift")

#: FLOPs of linear operators, and the operands in which they are, taken together.
LINEAR: Mapping[str, tuple[float, tuple[int, ...]]] = {
    "_conj_physical": (1.0, (0,)),
    "_to_copy": (0.0, (0,)),
    "addcdiv": (3.0, (0, 1)),
    "addcmul": (3.0, (0, 1)),
    "clone": (0.0, (0,)),
    "copy": (0.0, (1,)),
    "div.Scalar": (1.0, (0,)),
    "div.Tensor": (1.0, (0,)),
    "lerp.Scalar": (3.0, (0, 1)),
    "lerp.Tensor": (3.0, (0, 1)),
    "lift_fresh_copy": (0.0, (0,)),
    "masked_fill.Tensor": (0.0, (0, 2)),
    "mul.Scalar": (1.0, (0,)),
    "mul.Tensor": (1.0, (0,)),
    "neg": (1.0, (0,)),
}


def pointwise(view: OpView, flops: float = 1.0, linear: tuple[int, ...] = ()) -> Rule:
    """Every operand broadcasts to the result; each result element costs `flops`."""
    out = next(shape for shape in view.out_shapes if shape is not None)
    operands = [None if shape is None else broadcast_dims(shape, len(out)) for shape in view.shapes]
    results = [broadcast_dims(out, len(out)) if name else None for name in view.node.outputs]
    return Rule.of(operands, results, view.shapes, view.out_shapes, flops=flops, linear=linear)


def total(view: OpView) -> Rule:
    """A sum or difference of tensors: linear unless a number is added."""
    numbers = "other" in view.node.attrs
    return pointwise(view, 1.0, () if numbers else sums(view, 0, 1))


def masked_fill(view: OpView) -> Rule:
    """Linear if the masked elements become 0."""
    return pointwise(view, 0.0, sums(view, 0) if view.attr("value") == 0 else ())


def costs(flops: float, linear: tuple[int, ...] = ()) -> Callable[[OpView], Rule]:
    """Rule of an operator that costs so many FLOPs a result element, linear in some operands."""
    return lambda view: pointwise(view, flops, sums(view, *linear))


def _overloads(names: tuple[str, ...], *kinds: str) -> dict[str, OpRow]:
    return {f"aten::{name}.{kind}": OpRow(costs(1)) for name in names for kind in kinds}


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(costs(flops)) for op, flops in {**UNARY, **JOINT}.items()},
    **_overloads(COMPARED, "Scalar", "Tensor"),
    **_overloads(EITHER_SIDE, "Scalar", "Scalar_Tensor", "Tensor"),
    **_overloads(SHIFTED, "Scalar_Tensor", "Tensor", "Tensor_Scalar"),
    **{f"aten::{op}": OpRow(costs(*linear)) for op, linear in LINEAR.items()},
    **{f"aten::{op}.Tensor": OpRow(total) for op in ("add", "rsub", "sub")},
    **{f"aten::{op}.Scalar": OpRow(costs(1)) for op in ("add", "rsub", "sub")},
    "aten::masked_fill.Scalar": OpRow(masked_fill),
}
