"""Elementwise operators with broadcasting, and their gradients.

A number in place of a tensor is an attribute, not an operand. Sums, differences and products by
numbers are linear: a pending sum passes through them. A product or quotient of tensors is linear
in the first, as long as the other is whole. Gradients are linear in the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL, elementwise, flops_of
from partitioner.ir.ops.signature import names, replaced
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def _overloads(overloads: str, *ops: str) -> list[str]:
    return [f"{op}.{overload}" for op in ops for overload in overloads.split()]


#: Functions that are not linear; `flops_of` gives their FLOPs.
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
    *("angle", "deg2rad", "digamma", "erfinv", "frexp.Tensor", "gcd", "heaviside", "i0", "igamma"),
    *("igammac", "isposinf", "lcm", "ldexp.Tensor", "lgamma", "logaddexp", "logaddexp2"),
    *("mvlgamma", "nextafter", "polygamma", "rad2deg", "sinc", "special_entr", "special_erfcx"),
    *("special_i0e", "special_i1", "special_i1e", "special_log_ndtr", "special_ndtri"),
    "special_xlog1py",
    *_overloads("Scalar", "add", "rsub", "sub"),
    *_overloads("Scalar Tensor", "eq", "ge", "gt", "le", "lt", "ne", "copysign", "fmod"),
    *_overloads("Scalar Scalar_Tensor Tensor", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *_overloads("Scalar Scalar_Tensor Tensor", "remainder"),
    *_overloads("Scalar_Tensor Tensor Tensor_Scalar", "bitwise_left_shift", "bitwise_right_shift"),
)

#: Operands in which an operator is jointly linear.
LINEAR: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("_conj_physical", "_to_copy", "clone", "div.Scalar", "div.Tensor"), (0,)),
    **dict.fromkeys(("lift_fresh_copy", "mul.Scalar", "mul.Tensor", "neg"), (0,)),
    **dict.fromkeys(("addcdiv", "addcmul", "lerp.Scalar", "lerp.Tensor"), (0, 1)),
    "copy": (1,),
    "masked_fill.Tensor": (0, 2),
}

#: FLOPs a result element of gradients.
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


#: Products and quotients.
SCALES: Mapping[str, Literal["times", "over"]] = {
    **dict.fromkeys(("mul.Scalar", "mul.Tensor"), "times"),
    **dict.fromkeys(("div.Scalar", "div.Tensor"), "over"),
}
#: Sums and differences with a number.
SHIFTS = frozenset(_overloads("Scalar", "add", "rsub", "sub"))


def _glu(view: OpView, *, backward: bool = False) -> Rule:
    """``(s d) -> d``: half of a dim gates the other half; backward ``d, (s d) -> (s d)``."""
    dims = names("d", view.rank())
    dim = view.dim("dim", -1)
    halves = replaced(dims, dim, f"(s {dims[dim]})")
    return view.rule(
        [dims, halves] if backward else [halves],
        [halves if backward else dims],
        sizes={"s": 2},
        whole="s",
        points=dims,
        flops=TRANSCENDENTAL + (8 if backward else 3),
        sums=[0] if backward else [],
    )


def _row(
    flops: float,
    sums: tuple[int, ...] = (),
    scales: Literal["", "times", "over"] = "",
    *,
    shifts: bool = False,
) -> OpRow:
    return OpRow(partial(elementwise, flops=flops, sums=sums), scales=scales, shifts=shifts)


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": _row(flops_of(op), shifts=op in SHIFTS) for op in FUNCTIONS},
    **{
        f"aten::{op}": _row(flops_of(op), operands, SCALES.get(op, ""))
        for op, operands in LINEAR.items()
    },
    **{f"aten::{op}": _row(flops, (0,)) for op, flops in GRADIENTS.items()},
    **{
        f"aten::{op}.Tensor": OpRow(  # linear unless a number is added
            lambda view: elementwise(view, sums=() if "other" in view.node.attrs else (0, 1)),
            shifts=True,
        )
        for op in ("add", "rsub", "sub")
    },
    **{f"aten::{op}.Tensor": _row(1.0) for op in ("clamp_max", "clamp_min")},
    "aten::glu": OpRow(_glu),
    "aten::glu_backward": OpRow(partial(_glu, backward=True)),
    "aten::masked_fill.Scalar": OpRow(  # linear if the masked elements become 0
        lambda view: elementwise(view, 0.0, sums=[0] if view.attr("value") == 0 else [])
    ),
}
