"""Elementwise operators with broadcasting, and their gradients.

A number in place of a tensor is an attribute, so operands are what is left. Sums, differences and
products by numbers are linear: a pending sum passes through them. A product or quotient of
tensors is linear in the first, as long as the other is whole. Gradients are linear in the gradient
that comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from partitioner.ir.ops.rules.dims import names, replaced
from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL, elementwise, flops_of
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

#: Functions that are not linear; FLOPs are `flops_of` them.
FUNCTIONS = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_not", "ceil"),
    *("celu", "clamp", "clamp.Tensor", "clamp_max", "clamp_min", "cos", "cosh", "div.Scalar_mode"),
    *("div.Tensor_mode", "elu", "erf", "erfc", "exp", "exp2", "expm1", "floor", "floor_divide"),
    *("floor_divide.Scalar", "fmax", "fmin", "frac", "gelu", "hardshrink", "hardsigmoid"),
    *("hardswish", "hardtanh", "hypot", "isinf", "isnan", "leaky_relu", "log", "log10", "log1p"),
    *("log2", "log_sigmoid_forward", "logical_and", "logical_not", "logical_or", "logical_xor"),
    *("logit", "maximum", "minimum", "mish", "nan_to_num", "pow.Scalar", "pow.Tensor_Scalar"),
    *("pow.Tensor_Tensor", "_prelu_kernel", "reciprocal", "relu", "round", "round.decimals"),
    *("rsqrt", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinh", "softplus"),
    *("softshrink", "sqrt", "tan", "tanh", "threshold", "trunc", "where.self"),
    *("xlogy.Scalar_Other", "xlogy.Scalar_Self", "xlogy.Tensor"),
)

#: Overloads of functions of one FLOP, with a tensor or a number on either side.
OVERLOADS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("eq", "ge", "gt", "le", "lt", "ne", "copysign", "fmod"): ("Scalar", "Tensor"),
    ("clamp_max", "clamp_min"): ("Tensor",),
    ("bitwise_and", "bitwise_or", "bitwise_xor", "remainder"): (
        *("Scalar", "Scalar_Tensor", "Tensor"),
    ),
    ("bitwise_left_shift", "bitwise_right_shift"): ("Scalar_Tensor", "Tensor", "Tensor_Scalar"),
    ("add", "rsub", "sub"): ("Scalar",),
}

#: Operands in which linear operators are so, taken together.
LINEAR: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("_conj_physical", "_to_copy", "clone", "div.Scalar", "div.Tensor"), (0,)),
    **dict.fromkeys(("lift_fresh_copy", "mul.Scalar", "mul.Tensor", "neg"), (0,)),
    **dict.fromkeys(("addcdiv", "addcmul", "lerp.Scalar", "lerp.Tensor"), (0, 1)),
    "copy": (1,),
    "masked_fill.Tensor": (0, 2),
}

#: FLOPs an element of gradients.
GRADIENTS: Mapping[str, float] = {
    **dict.fromkeys(("hardshrink_backward", "softshrink_backward", "threshold_backward"), 1.0),
    **dict.fromkeys(("hardsigmoid_backward", "hardtanh_backward", "leaky_relu_backward"), 2.0),
    **dict.fromkeys(("native_dropout_backward", "_prelu_kernel_backward"), 2.0),
    **dict.fromkeys(("sigmoid_backward", "tanh_backward"), 3.0),
    **dict.fromkeys(("hardswish_backward", "logit_backward"), 4.0),
    "elu_backward": TRANSCENDENTAL + 2,
    "log_sigmoid_backward": TRANSCENDENTAL + 4,
    "softplus_backward": TRANSCENDENTAL + 4,
    "silu_backward": TRANSCENDENTAL + 6,
    "gelu_backward": 2 * TRANSCENDENTAL + 6,
    "mish_backward": 3 * TRANSCENDENTAL,
}


def _sum(view: OpView) -> Rule:
    """A sum or difference of tensors: linear unless a number is added."""
    return elementwise(view, sums=() if "other" in view.node.attrs else (0, 1))


def _masked_fill(view: OpView) -> Rule:
    """Linear if the masked elements become 0."""
    return elementwise(view, 0.0, sums=[0] if view.attr("value") == 0 else [])


def _glu(view: OpView) -> Rule:
    """``(s d) -> d``: halves of a dim, one the gate of the other."""
    halves, dims = _halved(view, 0)
    flops = TRANSCENDENTAL + 3
    return view.rule([halves], [dims], sizes={"s": 2}, whole="s", points=dims, flops=flops)


def _glu_backward(view: OpView) -> Rule:
    """``d, (s d) -> (s d)``."""
    halves, dims = _halved(view, 1)
    return view.rule(
        [dims, halves],
        [halves],
        sizes={"s": 2},
        whole="s",
        points=dims,
        flops=TRANSCENDENTAL + 8,
        sums=[0],
    )


def _halved(view: OpView, operand: int) -> tuple[list[str], list[str]]:
    """Dims with both halves, and dims of one half."""
    dims = names("d", view.rank(operand))
    dim = view.dim("dim", -1, len(dims))
    return replaced(dims, dim, f"(s {dims[dim]})"), dims


def _row(flops: float, sums: tuple[int, ...] = ()) -> OpRow:
    return OpRow(partial(elementwise, flops=flops, sums=sums))


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": _row(flops_of(op)) for op in FUNCTIONS},
    **{
        f"aten::{op}.{overload}": _row(1.0)
        for ops, overloads in OVERLOADS.items()
        for op in ops
        for overload in overloads
    },
    **{f"aten::{op}": _row(flops_of(op), operands) for op, operands in LINEAR.items()},
    **{f"aten::{op}": _row(flops, (0,)) for op, flops in GRADIENTS.items()},
    **{f"aten::{op}.Tensor": OpRow(_sum) for op in ("add", "rsub", "sub")},
    "aten::glu": OpRow(_glu),
    "aten::glu_backward": OpRow(_glu_backward),
    "aten::masked_fill.Scalar": OpRow(_masked_fill),
}
