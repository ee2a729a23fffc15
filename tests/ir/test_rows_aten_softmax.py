"""Softmax and its relatives in PyTorch."""

import pytest
from aten_rows import aten
from rows import Case, check_row, f32

CASES = [
    aten("_log_softmax", f32(4, 6, 5), 1, False, options={"min_cuts": 2}),
    aten(
        "_log_softmax_backward_data",
        *(f32(4, 6, 5), f32(4, 6, 5, low=-3.0, high=-0.1), -1, "float32"),
        options={"min_cuts": 3},
    ),
    aten("_safe_softmax", f32(4, 6, 5), -1, options={"min_cuts": 2}),
    aten("_softmax", f32(4, 6, 5), -1, False, options={"min_cuts": 2}),
    aten("_softmax", f32(4, 6), 0, False),
    aten(
        "_softmax_backward_data",
        *(f32(4, 6, 5), f32(4, 6, 5, low=0.0, high=0.4), 1, "float32"),
        options={"min_cuts": 3},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
