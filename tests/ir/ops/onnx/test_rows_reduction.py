"""Rows of reductions and of ops that need a whole dim."""

import pytest

from helpers.op_rows.rows import Case, Draw, case, check_opaque, check_row, f32, ints, scalar, vec

JOINED = ("ReduceL1", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")
ROOTED = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
POSITIVE = {"low": 0.5, "high": 1.5}


def by_input(op: str, x: Draw, *axes: int, opset: int = 18, min_cuts: int, **attrs: int) -> Case:
    """A reduction whose axes are an operand."""
    return case(op, x, vec(*axes), attrs=attrs, constants=(1,), opset=opset, min_cuts=min_cuts)


def by_attr(op: str, x: Draw, *axes: int, opset: int = 11, min_cuts: int, **attrs: int) -> Case:
    """A reduction whose axes are an attribute."""
    return case(op, x, attrs={"axes": axes, **attrs}, opset=opset, min_cuts=min_cuts)


X = f32(2, 5, 7, **POSITIVE)
REDUCE_CASES = (
    *(by_attr(op, X, 1, min_cuts=3) for op in (*JOINED, "ReduceSumSquare")),
    *(by_input(op, X, -1, 0, min_cuts=3, keepdims=0) for op in (*JOINED, "ReduceSumSquare")),
    *(by_attr(op, X, -2, min_cuts=2, keepdims=0) for op in ROOTED),
    *(by_input(op, X, 0, 2, min_cuts=1) for op in ROOTED),
    *(case(op, X, opset=9, min_cuts=3) for op in JOINED),
    *(case(op, X, attrs={"keepdims": 0}, opset=20, min_cuts=3) for op in JOINED),
    *(case(op, X, opset=7, min_cuts=0) for op in ROOTED),
    by_attr("ReduceMean", X, 0, 1, min_cuts=3, opset=13, keepdims=0),
    by_attr("ReduceMean", X, -1, min_cuts=3, opset=17),
    by_input("ReduceMean", ints(4, 6, dtype="int32"), 1, min_cuts=1),
    by_input("ReduceSum", ints(4, 6), 1, min_cuts=2, opset=13),
    by_input("ReduceMax", ints(4, 6, dtype="int32"), 1, min_cuts=2, opset=20),
    by_input("ReduceSum", X, min_cuts=3, opset=13, noop_with_empty_axes=1),
    by_input("ReduceSum", X, min_cuts=3, opset=13),
    by_input("ReduceMean", f32(1, 5), 0, min_cuts=1),
    case("ReduceSum", f32(1, 5), None, opset=13, min_cuts=1),
)

OVER_AXIS = ("Hardmax", "LogSoftmax", "Softmax")
AXIS_CASES = (
    *(case(op, f32(3, 5, 4), opset=11, min_cuts=1) for op in OVER_AXIS),
    *(case(op, f32(3, 5, 4), attrs={"axis": -1}, opset=9, min_cuts=2) for op in OVER_AXIS),
    *(case(op, f32(3, 5, 4), attrs={"axis": 2}, opset=11, min_cuts=2) for op in OVER_AXIS),
    *(case(op, f32(3, 5, 4), opset=13, min_cuts=2) for op in OVER_AXIS),
    *(case(op, f32(3, 5, 4), attrs={"axis": 1}, opset=26, min_cuts=2) for op in OVER_AXIS),
    *(case(op, f32(3, 5, 4), opset=7) for op in ("ArgMax", "ArgMin")),
    *(
        case(op, f32(3, 5, 4), attrs={"axis": -1, "keepdims": 0}, opset=13, min_cuts=2)
        for op in ("ArgMax", "ArgMin")
    ),
    case(
        "ArgMax",
        ints(5, 4, high=2),
        attrs={"axis": 1, "select_last_index": 1},
        opset=12,
        min_cuts=1,
    ),
    case("CumSum", f32(3, 5), scalar(1), constants=(1,), opset=11),
    case("CumSum", f32(3, 5, 2), scalar(-2), attrs={"reverse": 1}, constants=(1,), min_cuts=2),
    case("CumSum", ints(5, 3), vec(0), attrs={"exclusive": 1}, constants=(1,), opset=14),
    case("CumProd", f32(3, 5), scalar(1), constants=(1,), opset=26, reference=True),
    case("TopK", f32(3, 7), attrs={"k": 2}, outputs=2, opset=9),
    case("TopK", f32(3, 7), vec(3), constants=(1,), outputs=2, opset=10),
    case(
        "TopK",
        f32(7, 3, 2),
        vec(3),
        attrs={"axis": 0, "largest": 0},
        constants=(1,),
        outputs=2,
        opset=11,
        min_cuts=2,
    ),
    case("TopK", f32(3, 7), vec(3), outputs=2, opset=24),
)
CASES = (*REDUCE_CASES, *AXIS_CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


@pytest.mark.parametrize("op", ["ReduceSum", "CumSum"])
def test_computed_axes_are_opaque(op: str) -> None:
    assert "operand 1 ('in1') is not a constant" in check_opaque(case(op, f32(3, 4), vec(1)))
