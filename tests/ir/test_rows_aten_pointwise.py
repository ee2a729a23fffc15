"""Elementwise operators of PyTorch."""

import pytest
from aten_rows import aten
from rows import Case, check_row, f32

CASES = [
    aten("add.Tensor", f32(4, 6), f32(6), options={"min_cuts": 3}),
    aten("add.Tensor", f32(4, 6), 2.0, options={"min_cuts": 2}),
    aten("relu", f32(4, 6), options={"min_cuts": 2}),
    aten("sub.Tensor", f32(4, 6), f32(4, 1), options={"min_cuts": 3}, alpha=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
