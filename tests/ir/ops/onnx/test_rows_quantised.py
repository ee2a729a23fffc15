"""Rows of operators of quantised elements that ONNX Runtime writes, and of fused convolutions."""

import pytest

from helpers.op_rows.rows import (
    Case,
    Draw,
    case,
    check_opaque,
    check_row,
    f32,
    ints,
    make_trial,
    scalar,
)
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule

MS = "com.microsoft::"
STEP, FINE = scalar(0.05, "float32"), scalar(0.03, "float32")


def u8(*shape: int) -> Draw:
    """Quantised contents."""
    return ints(*shape, low=0, high=255, dtype="uint8")


def zero(value: int = 120) -> object:
    return scalar(value, "uint8")


def on_data(op: str, data: Draw, min_cuts: int, **attrs: object) -> Case:
    """An operator of one operand, with both scales and zero points."""
    operands = (data, STEP, zero(), FINE, zero(3))
    return case(f"{MS}{op}", *operands, attrs=attrs, opset=1, min_cuts=min_cuts)


def pair(op: str, a: Draw, b: Draw, min_cuts: int) -> Case:
    operands = (a, STEP, zero(), b, FINE, zero(7), STEP, zero(9))
    return case(f"{MS}{op}", *operands, opset=1, min_cuts=min_cuts)


def fused(*operands: Draw, min_cuts: int, **attrs: object) -> Case:
    return case(f"{MS}FusedConv", *operands, attrs=attrs, opset=1, min_cuts=min_cuts)


def last(
    weight: tuple[int, ...], min_cuts: int, scale: Draw | object = STEP, **attrs: object
) -> Case:
    """A QLinearConv with channels last."""
    bias = ints(weight[0], dtype="int32")
    wide = weight[1] * int(attrs.get("group", 1))  # type: ignore[call-overload]
    operands = (u8(3, 5, 6, wide), STEP, zero(), u8(*weight), scale, zero(9), FINE, zero(3), bias)
    options = {"channels_last": 1, **attrs}
    return case(
        f"{MS}QLinearConv", *operands, attrs=options, opset=1, min_cuts=min_cuts, constants=(4, 5)
    )


SAME = {"pads": (1, 1, 1, 1), "activation": "Relu"}
WINDOW = {"kernel_shape": (2, 2), "strides": (2, 1)}

CASES = (
    *(on_data(op, u8(3, 4, 5), 3) for op in ("QLinearLeakyRelu", "QLinearSigmoid")),
    *(pair(op, u8(3, 4, 5), u8(4, 1), 3) for op in ("QLinearAdd", "QLinearMul")),
    on_data("QLinearSoftmax", u8(3, 4, 5), 2, axis=1, opset=13),
    on_data("QLinearSoftmax", u8(3, 4, 5), 1, axis=1, opset=12),
    on_data("QLinearAveragePool", u8(3, 4, 5, 6), 2, **WINDOW),
    on_data("QLinearAveragePool", u8(3, 5, 6, 4), 2, channels_last=1, **WINDOW),
    on_data("QLinearAveragePool", u8(3, 4, 5), 2, kernel_shape=(5,)),
    on_data("QLinearGlobalAveragePool", u8(3, 4, 5, 6), 2, channels_last=0),
    on_data("QLinearGlobalAveragePool", u8(3, 5, 6, 4), 2, channels_last=1),
    case(f"{MS}NhwcMaxPool", u8(3, 5, 6, 4), attrs=WINDOW, opset=1, min_cuts=2),
    case(
        f"{MS}QLinearConcat",
        *(STEP, zero(), u8(3, 4, 5), FINE, zero(3), u8(3, 2, 5), STEP, zero(9)),
        attrs={"axis": 1},
        opset=1,
        min_cuts=2,
    ),
    case(
        f"{MS}QLinearWhere",
        *(ints(3, 4, low=0, high=1, dtype="bool"), u8(3, 4), FINE, zero(3), u8(4), STEP, zero(9)),
        *(STEP, zero(5)),
        opset=1,
        min_cuts=2,
    ),
    last((4, 5, 3, 3), 2, pads=(1, 1, 1, 1)),
    last((6, 1, 2, 2), 1, group=6),
    fused(f32(3, 5, 6, 6), f32(4, 5, 3, 3), f32(4), min_cuts=4, **SAME),
    fused(f32(3, 5, 6, 6), f32(4, 5, 3, 3), f32(4), f32(3, 4, 6, 6), min_cuts=4, **SAME),
    fused(f32(2, 6, 5, 5), f32(6, 1, 3, 3), f32(6), min_cuts=2, group=6, **SAME),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_a_convolution_of_ours_with_channels_first_is_opaque() -> None:
    assert "channels_last is 0" in check_opaque(last((4, 5, 3, 3), 0, channels_last=0))


IMAGE = 2 * 3 * 8 * 8
WINDOW_OF_6 = {"kernel_shape": (3, 2)}
SETTINGS = (STEP, zero(), u8(2, 3), FINE, zero(3), u8(2, 5), STEP, zero(9))


@pytest.mark.parametrize(
    ("case", "flops"),
    [
        (on_data("QLinearAveragePool", u8(2, 3, 8, 8), 2, **WINDOW_OF_6), 2 * 3 * 6 * 7 * 6),
        (
            case(f"{MS}NhwcMaxPool", u8(2, 8, 8, 3), attrs=WINDOW_OF_6, opset=1),
            2 * 3 * 6 * 7 * 6,
        ),
        (on_data("QLinearGlobalAveragePool", u8(2, 3, 8, 8), 2, channels_last=0), IMAGE),
        (case(f"{MS}QLinearConcat", *SETTINGS, attrs={"axis": 1}, opset=1), 2 * (2 * 8)),
    ],
    ids=str,
)
def test_flops_are_of_the_points_that_are_computed(case: Case, flops: float) -> None:
    """Of a window those of each element of the result, whatever the sizes before it."""
    trial = make_trial(case)
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule)
    assert rule.flops == flops
