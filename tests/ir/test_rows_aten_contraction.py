"""Matrix products of PyTorch."""

import pytest
from aten_rows import aten
from rows import Case, check_row, f32

CASES = [
    aten("addmm", f32(8), f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
    aten("addmm", f32(6, 8), f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
    aten("addmm", f32(6, 1), f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
    aten("bmm", f32(4, 6, 4), f32(4, 4, 8), options={"min_cuts": 4}),
    aten("mm", f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
