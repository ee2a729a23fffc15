"""Rows of tensors made from shapes and scalars."""

import pytest

from helpers.op_rows.rows import Case, case, check_row, f32, scalar, vec

CASES = (
    case("Shape", f32(4, 5), min_cuts=2),
    case("Shape", f32(4, 5, 6), attrs={"start": -2, "end": 2}, min_cuts=3, opset=15),
    case("Shape", f32(4, 5, 6), attrs={"start": 1}, min_cuts=3, opset=15),
    case("Size", f32(4, 5), min_cuts=2),
    case("ConstantOfShape", vec(4, 5), constants=(0,), min_cuts=2),
    case("ConstantOfShape", vec(4, 5), attrs={"value": vec(3)}, min_cuts=2, opset=9),
    case("Range", scalar(1), scalar(9), scalar(2), min_cuts=0),
    case("EyeLike", f32(4, 5), attrs={"k": 1}, min_cuts=0),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
