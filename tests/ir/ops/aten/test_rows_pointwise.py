"""Elementwise operators of PyTorch and their gradients."""

from typing import Any

import pytest
import torch

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, Draw, check_row, f32, flags, ints, make_trial
from partitioner.ir.loops.factors import PENDING
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule

TWO: dict[str, Any] = {"min_cuts": 2}
LINEAR: dict[str, Any] = {"min_cuts": 3}  # two dims, and pending sums
BROADCAST: dict[str, Any] = {"min_cuts": 3}  # the dims of two operands
f16 = Draw((4, 6), "float16", -2, 2)
positive = f32(4, 6, low=0.1, high=3)
unit = f32(4, 6, low=0.05, high=0.95)

ANYWHERE = (
    *("abs", "ceil", "celu", "cos", "elu", "erf", "erfc", "exp", "exp2", "expm1", "floor"),
    *("frac", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "isinf", "isnan"),
    *("asinh", "atan", "leaky_relu", "mish", "nan_to_num", "relu", "round", "sgn", "sigmoid"),
    *("sign", "signbit", "silu", "sin", "sinh", "cosh", "softplus", "softshrink", "tan", "tanh"),
    *("logical_not", "log_sigmoid_forward", "trunc"),
    *("angle", "deg2rad", "frexp.Tensor", "i0", "isposinf", "rad2deg", "sinc", "special_erfcx"),
    *("special_i0e", "special_i1", "special_i1e", "special_log_ndtr"),
)
IN_UNIT = ("acos", "asin", "atanh", "erfinv", "logit", "special_entr", "special_ndtri")
POSITIVE = ("digamma", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sqrt")
COMPARED = ("eq", "ge", "gt", "le", "lt", "ne")
JOINT = (
    *("atan2", "fmax", "fmin", "heaviside", "hypot", "maximum", "minimum", "copysign.Tensor"),
    *("logaddexp", "logaddexp2", "nextafter"),
)
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor")
SHIFTS = ("bitwise_left_shift", "bitwise_right_shift")
#: Gradients of (gradient, operand), and what else they take.
GRADIENTS: dict[str, tuple[Any, ...]] = {
    "gelu_backward": (),
    "hardshrink_backward": (0.5,),
    "hardsigmoid_backward": (),
    "hardswish_backward": (),
    "hardtanh_backward": (-1.0, 1.0),
    "leaky_relu_backward": (0.1, False),
    "logit_backward": (0.1,),
    "mish_backward": (),
    "sigmoid_backward": (),
    "silu_backward": (),
    "softplus_backward": (1.0, 20.0),
    "softshrink_backward": (0.5,),
    "tanh_backward": (),
    "threshold_backward": (0.0,),
}

CASES = [
    *(aten(op, f32(4, 6), options=TWO) for op in ANYWHERE),
    *(aten(op, unit, options=TWO) for op in IN_UNIT),
    *(aten(op, positive, options=TWO) for op in POSITIVE),
    *(aten(f"{op}.Tensor", ints(4, 6), ints(6), options=TWO) for op in COMPARED),
    *(aten(f"{op}.Scalar", f32(4, 6), 0.5, options=TWO) for op in COMPARED),
    *(aten(op, f32(4, 6), f32(4, 1), options=TWO) for op in JOINT),
    *(aten(f"{op}.Tensor", ints(4, 6), ints(6), options=TWO) for op in BITS),
    *(aten(f"{op}.Scalar", ints(4, 6), 5, options=TWO) for op in BITS),
    *(aten(f"{op}.Scalar_Tensor", 5, ints(4, 6), options=TWO) for op in BITS),
    *(aten(f"{op}.Tensor", ints(4, 6), ints(6, low=0), options=TWO) for op in SHIFTS),
    *(aten(f"{op}.Tensor_Scalar", ints(4, 6), 3, options=TWO) for op in SHIFTS),
    *(aten(f"{op}.Scalar_Tensor", 3, ints(4, 6, low=0), options=TWO) for op in SHIFTS),
    *(aten(f"logical_{op}", flags(4, 6), flags(6), options=TWO) for op in ("and", "or", "xor")),
    aten("acosh", f32(4, 6, low=1, high=4), options=TWO),
    *(aten(op, ints(4, 6), ints(6), options=TWO) for op in ("gcd", "lcm")),
    *(aten(op, positive, f32(6, low=0.1), options=TWO) for op in ("igamma", "igammac")),
    aten("ldexp.Tensor", f32(4, 6), ints(6, low=-3, high=3), options=TWO),
    aten("mvlgamma", f32(4, 6, low=2, high=4), 3, options=TWO),
    aten("polygamma", 1, positive, options=TWO),
    aten("special_xlog1py", f32(4, 6), positive, options=TWO),
    aten("bitwise_and.Tensor", flags(2, 1, 4, 4), flags(4, 4), options=LINEAR),
    aten("bitwise_not", flags(4, 6), options=TWO),
    aten("bitwise_not", ints(4, 6), options=TWO),
    aten("round.decimals", f32(4, 6), decimals=1, options=TWO),
    aten("gelu", f32(4, 6), approximate="tanh", options=TWO),
    aten("threshold", f32(4, 6), 0.5, 2.0, options=TWO),
    aten("_prelu_kernel", f32(4, 6, 2), f32(6, 1), options=BROADCAST),
    aten("clamp", f32(4, 6), None, 1.0, options=TWO),
    aten("clamp", ints(4, 6), 0, 5, options=TWO),
    aten("clamp.Tensor", f32(4, 6), None, f32(6), options=TWO),
    aten("clamp.Tensor", f32(4, 6), f32(4, 1, high=0), f32(6, low=0), options=TWO),
    aten("clamp_max", f32(4, 6), 1, options=TWO),
    aten("clamp_max.Tensor", f32(4, 6), f32(6), options=TWO),
    aten("clamp_min", f32(4, 6), 1, options=TWO),
    aten("clamp_min.Tensor", f32(4, 6), f32(6), options=TWO),
    aten("copysign.Scalar", f32(4, 6), -1.0, options=TWO),
    aten("floor_divide", ints(4, 6), ints(6, low=1), options=TWO),
    aten("floor_divide.Scalar", ints(4, 6), 4, options=TWO),
    aten("div.Tensor_mode", f32(4, 6), positive, rounding_mode="floor", options=TWO),
    aten("div.Scalar_mode", ints(4, 6), 4, rounding_mode="trunc", options=TWO),
    aten("fmod.Scalar", f32(4, 6), 0.7, options=TWO),
    aten("fmod.Tensor", f32(4, 6), f32(6, low=0.5), options=TWO),
    aten("remainder.Scalar", ints(4, 6), 4, options=TWO),
    aten("remainder.Scalar_Tensor", 7, ints(4, 6, low=1), options=TWO),
    aten("remainder.Tensor", f32(4, 6), f32(6, low=0.5), options=TWO),
    aten("pow.Scalar", 2.0, f32(4, 6), options=TWO),
    aten("pow.Tensor_Scalar", f32(4, 6), 2, options=TWO),
    aten("pow.Tensor_Tensor", positive, f32(6), options=TWO),
    aten("xlogy.Scalar_Other", f32(4, 6), 2.0, options=TWO),
    aten("xlogy.Scalar_Self", 2.0, positive, options=TWO),
    aten("xlogy.Tensor", f32(4, 6), positive, options=TWO),
    aten("where.self", flags(4, 1), f32(6), f32(), options=TWO),
    aten("where.self", flags(4, 4), f32(2, 4, 4), f32(1), options=BROADCAST),
    aten("relu", f32(), options={"min_cuts": 0}),
    aten("relu", f32(1, 6), options={"min_cuts": 1}),
    # Linear ones.
    aten("add.Tensor", f32(4, 6), f32(6), options=LINEAR),
    aten("add.Tensor", f32(4, 6), f32(1, 1), options=LINEAR),
    aten("add.Tensor", f32(), f32(), options={"min_cuts": 1}),
    aten("add.Tensor", ints(4, 6), ints(6), options=LINEAR),
    aten("add.Tensor", f32(4, 6), 2.0, options=TWO),
    aten("add.Scalar", f32(4, 6), 2.0, options=TWO),
    aten("sub.Tensor", f32(4, 6), f32(4, 1), options=LINEAR, alpha=2),
    aten("sub.Scalar", f32(4, 6), 2.0, options=TWO),
    aten("rsub.Tensor", f32(4, 6), f32(6), options=LINEAR),
    aten("rsub.Scalar", f32(4, 6), 1.0, options=TWO),
    aten("mul.Tensor", f32(4, 6), f32(4, 1), options=LINEAR),
    aten("mul.Tensor", f32(6), f32(4, 6), options=LINEAR),
    aten("mul.Tensor", f32(4, 6), 0.5, options=LINEAR),
    aten("mul.Tensor", ints(4, 6), 0.5, options=TWO),
    aten("mul.Scalar", f32(4, 6), 2.0, options=LINEAR),
    aten("div.Tensor", f32(4, 6), f32(6, low=0.5), options=LINEAR),
    aten("div.Tensor", ints(4, 6), ints(6, low=1), options=TWO),
    aten("div.Scalar", f32(4, 6), 3, options=LINEAR),
    aten("neg", f32(4, 6), options=LINEAR),
    aten("neg", ints(4, 6), options=LINEAR),
    aten("_conj_physical", ints(4, 6, dtype="complex64"), options=LINEAR),
    aten("addcmul", f32(4, 6), f32(6), f32(4, 1), value=0.5, options=LINEAR),
    aten("addcdiv", f32(4, 6), f32(6), f32(4, 1, low=0.5), value=0.5, options=LINEAR),
    aten("lerp.Scalar", f32(4, 6), f32(6), 0.3, options=LINEAR),
    aten("lerp.Tensor", f32(4, 6), f32(6), f32(4, 1), options=LINEAR),
    aten("clone", f32(4, 6), options=LINEAR),
    aten("clone", flags(4, 6), memory_format=torch.contiguous_format, options=TWO),
    aten("clone", f32(2, 4, 3, 2), memory_format=torch.channels_last, options=LINEAR),
    aten("lift_fresh_copy", f32(4, 6), options=LINEAR),
    aten("copy", f32(4, 6), f32(6), options=LINEAR),
    aten("copy", f16, f32(6), options=TWO),
    aten("_to_copy", f32(4, 6), dtype=torch.float64, options=LINEAR),
    aten("_to_copy", f32(4, 6), options=LINEAR),
    aten("_to_copy", f16, dtype=torch.float32, options=LINEAR),
    aten("_to_copy", f32(4, 6), dtype=torch.int64, options=TWO),
    aten("_to_copy", f32(4, 6), dtype=torch.bool, options=TWO),
    aten("_to_copy", flags(4, 6), dtype=torch.float32, options=TWO),
    aten("masked_fill.Scalar", f32(2, 4, 6), flags(4, 6), 0, options={"min_cuts": 4}),
    aten("masked_fill.Scalar", f32(4, 6), flags(6), -1e9, options=TWO),
    aten("masked_fill.Tensor", f32(4, 6), flags(4, 1), f32(), options=LINEAR),
    # Gradients.
    *(aten(op, f32(4, 6), unit, *rest, options=LINEAR) for op, rest in GRADIENTS.items()),
    aten("elu_backward", f32(4, 6), 1.0, 1.0, 1.0, False, f32(4, 6), options=LINEAR),
    aten("gelu_backward", f32(4, 6), f32(4, 6), approximate="tanh", options=LINEAR),
    aten("log_sigmoid_backward", f32(4, 6), f32(4, 6), unit, options=LINEAR),
    aten("native_dropout_backward", f32(4, 6), flags(4, 6), 1.25, options=LINEAR),
    aten("_prelu_kernel_backward", f32(4, 6), f32(4, 6), f32(1, 6), options=LINEAR),
    aten("glu", f32(4, 12), options=TWO),
    aten("glu", f32(8, 6), 0, options=TWO),
    aten("glu_backward", f32(4, 6), f32(4, 12), -1, options=LINEAR),
    aten("glu_backward", f32(4, 6), f32(8, 6), 0, options=LINEAR),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


@pytest.mark.parametrize(
    "case",
    [
        aten("add.Scalar", f32(4, 6), 2.0),
        aten("add.Tensor", f32(4, 6), 2.0),
        aten("add.Tensor", flags(4, 6), flags(6)),
        aten("mul.Tensor", ints(4, 6), 0.5),
        aten("_to_copy", f32(4, 6), dtype=torch.int64),
        aten("_to_copy", f32(4, 6), dtype=torch.bool),
        aten("_to_copy", f32(4, 6), dtype=torch.float16),
        aten("_to_copy", f16, dtype=torch.bfloat16),
        aten("clone", flags(4, 6)),
        aten("masked_fill.Scalar", f32(4, 6), flags(6), 1.0),
        aten("relu", f32(4, 6)),
    ],
    ids=str,
)
def test_pending_sums_do_not_pass(case: Case) -> None:
    trial = make_trial(case)
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule)
    assert PENDING not in rule.factors


def test_a_product_takes_pending_sums_of_its_first_operand_only() -> None:
    trial = make_trial(aten("mul.Tensor", f32(4, 6), f32(6)))
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule)
    assert rule.linear == {0}


def test_a_number_in_place_of_a_tensor_has_no_dims() -> None:
    trial = make_trial(aten("add.Tensor", f32(4, 6), 2.0))
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule)
    assert rule.operands[1] is None
