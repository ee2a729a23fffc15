"""Rows of matrix products."""

import pytest
from rows import Case, case, check_row, f32

CASES = (
    case("MatMul", f32(5, 4), f32(4, 3), min_cuts=3),
    case("MatMul", f32(7), f32(7, 3), min_cuts=2),
    case("MatMul", f32(5, 7), f32(7), min_cuts=2),
    case("MatMul", f32(7), f32(7), min_cuts=1),
    case("MatMul", f32(2, 1, 5, 4), f32(3, 4, 3), min_cuts=5, opset=13),
    case("MatMul", f32(4, 3), f32(6, 3, 2), min_cuts=4, opset=9),
    case("Gemm", f32(5, 4), f32(4, 3), f32(3), min_cuts=3),
    case("Gemm", f32(4, 5), f32(3, 4), f32(5, 1), attrs={"transA": 1, "transB": 1}, min_cuts=3),
    case("Gemm", f32(5, 4), f32(4, 3), f32(), attrs={"alpha": 0.5, "beta": 2.0}, min_cuts=3),
    case("Gemm", f32(5, 7), f32(7, 3), f32(1, 3), min_cuts=3),
    case("Gemm", f32(5, 7), f32(7, 3), f32(1), min_cuts=3),
    case("Gemm", f32(5, 7), f32(7, 3), f32(5, 3), min_cuts=3, opset=9),
    case("Gemm", f32(5, 7), f32(7, 3), min_cuts=3, opset=11),
    case("Gemm", f32(5, 7), f32(7, 3), None, min_cuts=3, opset=13),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_cut_gives_the_whole_result(case: Case) -> None:
    check_row(case)
