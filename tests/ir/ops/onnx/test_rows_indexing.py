"""Rows of elements found by index."""

import numpy as np
import pytest

from helpers.op_rows.rows import Case, case, check_row, f32, flags, ints, scalar, vec

CASES = (
    case("Gather", f32(7, 4), ints(3, 5, low=-7, high=6), min_cuts=4),
    case("Gather", f32(3, 7, 4), ints(5, low=0, high=6), attrs={"axis": 1}, min_cuts=3),
    case("Gather", f32(3, 7, 4), scalar(-1), attrs={"axis": -2}, constants=(1,), min_cuts=2),
    case("Gather", f32(3, 7), vec(5, 0, 2), attrs={"axis": 1}, constants=(1,), min_cuts=2),
    case("Gather", f32(7, 4), ints(1, 3, low=0, high=6, dtype="int32"), min_cuts=2, opset=11),
    case("Gather", f32(2, 5, 4), ints(3, 2, low=-5, high=4), attrs={"axis": 1}, min_cuts=5),
    case("Gather", f32(5, 9), ints(4, low=-9, high=8), attrs={"axis": 1}, min_cuts=3, opset=11),
    case("GatherElements", f32(5, 4), ints(5, 3, low=-4, high=3), attrs={"axis": 1}, min_cuts=2),
    case("GatherElements", f32(5, 9, 2), ints(3, 4, 2, low=0, high=4), min_cuts=4, opset=11),
    case("GatherND", f32(5, 4, 3), ints(6, 2, low=0, high=3), min_cuts=2, opset=11),
    case(
        "GatherND", f32(3, 5, 4), ints(3, 2, 1, low=-5, high=4), attrs={"batch_dims": 1}, min_cuts=3
    ),
    case("GatherND", f32(5, 4), ints(2, low=0, high=3), min_cuts=0, opset=12),
    case(
        "ScatterElements",
        f32(5, 4),
        np.array([[0, 2], [1, 0], [3, 1], [2, -1], [0, 1]]),
        f32(5, 2),
        attrs={"axis": -1},
        min_cuts=2,
    ),
    case(
        "ScatterElements",
        f32(2, 7, 4),
        np.array([[[0], [1], [1]]]).repeat(3, 2),
        f32(1, 3, 3),
        attrs={"reduction": "add"},
        min_cuts=3,
        opset=18,
    ),
    case("Scatter", f32(3, 5), np.array([[1, 2, 0, 1, 2]]), f32(1, 5), opset=9),
    case("ScatterND", f32(5, 4, 3), np.array([[0, 1], [4, 3]]), f32(2, 3), min_cuts=3, opset=11),
    case(
        "ScatterND",
        f32(5, 4, 3),
        np.array([[0], [4], [0]]),
        f32(3, 4, 3),
        attrs={"reduction": "mul"},
        min_cuts=3,
        opset=18,
    ),
    case(
        "TensorScatter",
        f32(3, 6, 5),
        f32(3, 2, 5),
        vec(1, 3, 0),
        attrs={"axis": 1},
        opset=24,
        min_cuts=3,
    ),
    case(
        "TensorScatter",
        f32(3, 2, 7, 5),
        f32(3, 2, 1, 5),
        vec(1, 9, 6),
        attrs={"mode": "circular"},
        opset=24,
        min_cuts=4,
    ),
    case("TensorScatter", f32(3, 2, 6, 5), f32(3, 2, 4, 5), opset=24, min_cuts=4),
    case("OneHot", ints(3, 5, low=0, high=6), scalar(7), vec(0, 1), constants=(1,), min_cuts=2),
    case("OneHot", ints(3, low=-7, high=6), vec(7), vec(2, 5), attrs={"axis": 0}, opset=9),
    case("Compress", f32(3, 5), np.array([True, False, True]), attrs={"axis": 0}, constants=(1,)),
    case("Compress", f32(3, 2), flags(6), min_cuts=0),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
