"""FLOPs that rules give, against the formulas that people quote."""

import pytest

from helpers.op_rows.rows import Case, case, f32, ints, make_trial, vec
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule

GROUPED = {"group": 2, "pads": (1, 1, 1, 1)}

FLOPS = (
    (case("MatMul", f32(3, 5, 4), f32(4, 7)), 2 * 3 * 5 * 4 * 7),
    (case("Gemm", f32(5, 4), f32(4, 7), f32(7)), 2 * 5 * 4 * 7),
    (case("Einsum", f32(5, 4), f32(4, 7), attrs={"equation": "ij,jk->ik"}), 2 * 5 * 4 * 7),
    (case("Conv", f32(2, 3, 8, 8), f32(5, 3, 3, 3)), 2 * 2 * 5 * 3 * 6 * 6 * 9),
    (case("Conv", f32(2, 4, 8, 8), f32(6, 2, 3, 3), attrs=GROUPED), 2 * 2 * 6 * 2 * 8 * 8 * 9),
    (case("Conv", f32(1, 4, 8), f32(4, 1, 1), attrs={"group": 4}), 2 * 4 * 8),
    # Each operand point meets each kernel point.
    (
        case("ConvTranspose", f32(2, 3, 4, 4), f32(3, 5, 2, 2), attrs={"strides": (2, 2)}),
        2 * 2 * 3 * 5 * 16 * 4,
    ),
    (case("MaxPool", f32(2, 3, 8, 8), attrs={"kernel_shape": (2, 2)}), 2 * 3 * 7 * 7 * 4),
    (case("ReduceSum", f32(2, 3, 4), vec(1), constants=(1,)), 2 * 3 * 4),
    (case("Add", f32(2, 1, 4), f32(3, 1)), 2 * 3 * 4),
    (case("Sum", f32(2, 4), f32(4), f32(2, 4)), 2 * 4 * 3),
    (case("Identity", ints(2, 4)), 0),
    (case("Cast", ints(2, 4), attrs={"to": 1}), 0),
    # 6 heads, 5 queries, 4 keys: two dot products of 8 channels and 13 for the softmax.
    (
        case("Attention", f32(2, 6, 5, 8), f32(2, 3, 4, 8), f32(2, 3, 4, 8), opset=23),
        2 * 6 * 5 * 4 * (2 * (8 + 8) + 13),
    ),
)


@pytest.mark.parametrize(("case", "flops"), FLOPS, ids=[str(case) for case, _ in FLOPS])
def test_flops(case: Case, flops: float) -> None:
    trial = make_trial(case)
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule)
    assert rule.flops == flops
