"""Rows of elementwise ops and of quantised storage."""

import numpy as np
import pytest

from helpers.op_rows.rows import (
    Case,
    Draw,
    case,
    check_opaque,
    check_row,
    f32,
    flags,
    ints,
    make_trial,
    scalar,
    vec,
)
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule

#: Domain of definition of the unary ops that are not defined on [-2, 2].
POSITIVE = {"low": 0.1, "high": 3.0}
UNIT = {"low": -0.9, "high": 0.9}
ABOVE_ONE = {"low": 1.1, "high": 3.0}

#: (op, oldest opset of this form, newest that ONNX Runtime runs).
UNARY = (
    *(("Abs", 6, 26), ("Ceil", 6, 26), ("Floor", 6, 26), ("Neg", 6, 26), ("Relu", 6, 26)),
    *(("Round", 11, 26), ("Sign", 9, 26), ("Exp", 6, 26), ("Erf", 9, 26), ("Identity", 1, 26)),
    *(("Atan", 7, 26), ("Cos", 7, 26), ("Sin", 7, 26), ("Tan", 7, 26), ("Tanh", 6, 26)),
    *(("Asinh", 9, 26), ("Cosh", 9, 26), ("Sinh", 9, 26), ("Sigmoid", 6, 26)),
    *(("Softplus", 1, 26), ("Softsign", 1, 26), ("HardSwish", 14, 26), ("Mish", 18, 26)),
    *(("IsNaN", 9, 26), ("IsInf", 10, 26), ("Selu", 6, 26), ("Gelu", 20, 26)),
    *(("com.microsoft::Gelu", 1, 1), ("com.microsoft::QuickGelu", 1, 1)),
    ("com.microsoft::FastGelu", 1, 1),
)
LIMITED = (
    *(("Log", POSITIVE), ("Sqrt", POSITIVE), ("Reciprocal", POSITIVE)),
    *(("Acos", UNIT), ("Asin", UNIT), ("Atanh", UNIT), ("Acosh", ABOVE_ONE)),
)
WITH_ATTRS = (
    ("Celu", {"alpha": 1.5}, 12),
    ("Elu", {"alpha": 0.5}, 6),
    ("Gelu", {"approximate": "tanh"}, 20),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}, 6),
    ("LeakyRelu", {"alpha": 0.1}, 6),
    ("Selu", {"alpha": 1.2, "gamma": 1.3}, 6),
    ("Shrink", {"bias": 0.1, "lambd": 0.5}, 9),
    ("ThresholdedRelu", {"alpha": 0.5}, 10),
    ("IsInf", {"detect_negative": 0}, 10),
    ("Cast", {"to": 7}, 13),
    ("Cast", {"to": 10}, 9),
    ("Cast", {"to": 9}, 25),
    ("Clip", {"min": -0.5, "max": 1.0}, 6),
)
COMPARISONS = ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")


def i8(*shape: int) -> Draw:
    """Quantised contents."""
    return ints(*shape, low=-120, high=120, dtype="int8")


def scales(*shape: int) -> Draw:
    """Quantisation steps."""
    return f32(*shape, low=0.01, high=0.1)


CASES = (
    *(case(op, f32(2, 5, 3), opset=old, min_cuts=3) for op, old, _ in UNARY),
    *(case(op, f32(1, 7), opset=new) for op, old, new in UNARY if new != old),
    *(case(op, f32(2, 5, 1, **limits), min_cuts=2) for op, limits in LIMITED),
    *(case(op, f32(3, 5), attrs=attrs, opset=o, min_cuts=2) for op, attrs, o in WITH_ATTRS),
    case("Swish", f32(3, 5), attrs={"alpha": 1.5}, opset=24, min_cuts=2, reference=True),
    case("Not", flags(4, 5), min_cuts=2),
    case("BitwiseNot", ints(4, 5), min_cuts=2),
    case("BitCast", f32(4, 5), attrs={"to": 6}, opset=26, min_cuts=2, reference=True),
    case("Relu", f32(), min_cuts=0),
    # Two operands.
    *(case(op, f32(2, 5, 3), f32(5, 1), min_cuts=3) for op in ("Add", "Sub", "Mul")),
    *(case(op, f32(5, 3), f32(5, 3), opset=7, min_cuts=2) for op in ("Add", "Sub", "Mul")),
    case("Div", f32(2, 1, 3), f32(5, 3, **POSITIVE), min_cuts=3),
    case("Div", ints(4, 5), ints(low=1), opset=7, min_cuts=2),
    case("Add", f32(5, 1), f32(1, 4), min_cuts=2, opset=14),
    case("Pow", f32(4, 5, **POSITIVE), f32(5), opset=7, min_cuts=2),
    case("Pow", f32(4, 5), ints(4, 1, low=0, high=3), opset=15, min_cuts=2),
    case("Mod", ints(4, 5), ints(5, low=1), opset=10, min_cuts=2),
    case("Mod", f32(4, 5), f32(4, 1, **POSITIVE), attrs={"fmod": 1}, opset=13, min_cuts=2),
    *(
        case(op, ints(4, 5, high=3), ints(5, high=3), opset=13, min_cuts=2)
        for op in COMPARISONS[:3]
    ),
    *(case(op, f32(4, 5), f32(4, 1), opset=16, min_cuts=2) for op in COMPARISONS),
    *(case(op, flags(4, 5), flags(5), opset=7, min_cuts=2) for op in ("And", "Or", "Xor")),
    *(
        case(op, ints(4, 5), ints(4, 1), opset=18, min_cuts=2)
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ),
    case(
        "BitShift",
        ints(4, 5, low=0, dtype="uint32"),
        ints(5, low=0, high=4, dtype="uint32"),
        attrs={"direction": "LEFT"},
        min_cuts=2,
    ),
    case("PRelu", f32(2, 5, 3), f32(5, 1), opset=9, min_cuts=3),
    case("PRelu", f32(2, 5, 3), f32(1), opset=16, min_cuts=3),
    case("com.microsoft::BiasGelu", f32(2, 3, 5), f32(5), opset=1, min_cuts=3),
    case("com.microsoft::FastGelu", f32(2, 3, 5), f32(5), opset=1, min_cuts=3),
    case("CastLike", f32(4, 5), ints(4, 5), opset=15, min_cuts=2),
    case("CastLike", f32(4, 5), ints(3), opset=21, min_cuts=2),
    # Three and more operands.
    case("Where", flags(4, 1), f32(2, 4, 5), f32(5), opset=9, min_cuts=3),
    case("Where", flags(4, 5), f32(), f32(4, 5), opset=16, min_cuts=2),
    case("Clip", f32(4, 5), f32(low=-1, high=0), f32(low=0.5, high=1), opset=11, min_cuts=2),
    case("Clip", f32(4, 5), None, f32(low=0.5, high=1), opset=13, min_cuts=2),
    case("Clip", ints(4, 5), scalar(-2), opset=13, min_cuts=2),
    *(case(op, f32(4, 5), f32(5), f32(4, 1), opset=8, min_cuts=2) for op in ("Max", "Min")),
    *(case(op, f32(4, 5), f32(5), f32(4, 1), opset=13, min_cuts=2) for op in ("Mean", "Sum")),
    case("Sum", f32(4, 5), opset=8, min_cuts=2),
    case("Dropout", f32(4, 5), attrs={"ratio": 0.3}, opset=7, min_cuts=2, exact=True),
    case("Dropout", f32(4, 5), outputs=2, opset=10, min_cuts=2, exact=True),
    case(
        "Dropout",
        f32(4, 5),
        scalar(0.3, "float32"),
        np.array(False),
        constants=(1, 2),
        outputs=2,
        opset=13,
        min_cuts=2,
    ),
    case("Dropout", f32(4, 5), None, None, outputs=("out", ""), opset=22, min_cuts=2),
    case("QuantizeLinear", f32(4, 5), scalar(0.05, "float32"), opset=10, min_cuts=2),
    case("QuantizeLinear", f32(4, 5), vec(0.05, dtype="float32"), ints(1, dtype="uint8", low=0)),
    # A static QDQ model has the scale and the zero point in different forms of one for all.
    case("QuantizeLinear", f32(4, 5), vec(0.05, dtype="float32"), ints(dtype="uint8", low=0)),
    case("QuantizeLinear", f32(4, 5), scalar(0.05, "float32"), ints(1, dtype="uint8", low=0)),
    case("DequantizeLinear", i8(4, 5), vec(0.05, dtype="float32"), i8(), min_cuts=2),
    case("DequantizeLinear", i8(4, 5), scalar(0.05, "float32"), i8(1), min_cuts=2),
    case(
        "QuantizeLinear",
        f32(2, 5, 3),
        scales(5),
        i8(5),
        opset=13,
        min_cuts=3,
    ),
    case(
        "QuantizeLinear",
        f32(3, 12),
        scales(3, 4),
        attrs={"axis": -1, "block_size": 3},
        opset=21,
        min_cuts=2,
    ),
    case("DequantizeLinear", i8(4, 5), scalar(0.05, "float32"), opset=10, min_cuts=2),
    case(
        "DequantizeLinear",
        i8(2, 3, 5),
        scales(5),
        i8(5),
        attrs={"axis": -1},
        opset=19,
        min_cuts=3,
    ),
    case(
        "DequantizeLinear",
        i8(8, 5),
        scales(4, 5),
        None,
        attrs={"axis": 0, "block_size": 2},
        opset=21,
        min_cuts=2,
    ),
    case(
        "DequantizeLinear",
        i8(7, 5),
        scales(4, 5),
        attrs={"axis": 0, "block_size": 2},
        opset=21,
        min_cuts=1,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


@pytest.mark.parametrize("rows", [7, 8])
def test_an_element_is_quantised_once_however_many_blocks_there_are(rows: int) -> None:
    attrs = {"axis": 0, "block_size": 2}
    node = case("DequantizeLinear", i8(rows, 5), scales(4, 5), attrs=attrs, opset=21)
    trial = make_trial(node)
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule)
    assert rule.flops == 3 * rows * 5


def test_dropout_in_training_is_opaque() -> None:
    training = np.array(True)
    node = case("Dropout", f32(4, 5), None, training, constants=(2,), opset=13)
    assert "drawn at random" in check_opaque(node)


def test_dropout_whose_mode_is_not_known_is_opaque() -> None:
    mode = np.array(False)
    assert "not a constant" in check_opaque(case("Dropout", f32(4, 5), None, mode, opset=13))
