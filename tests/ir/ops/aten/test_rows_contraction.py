"""Matrix products of PyTorch."""

import numpy as np
import pytest
import transformers.integrations.moe  # noqa: F401 - registers its grouped products

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_opaque, check_row, f32

#: Where the groups of seven rows end; the second one is empty.
OFFSETS = np.array([3, 3, 7], np.int32)
CASES = [
    aten(
        "_trilinear",
        *(f32(4, 6), f32(8, 6, 5), f32(4, 5), [1, 3], [0], [1, 2], [2, 3]),
        options={"min_cuts": 4},
    ),
    aten("addr", f32(4, 6), f32(4), f32(6), options={"min_cuts": 2}),
    aten("addbmm", f32(8), f32(4, 6, 4), f32(4, 4, 8), options={"min_cuts": 4}),
    aten("addmm", f32(8), f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
    aten("addmm", f32(6, 8), f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
    aten("bmm", f32(3, 4, 5), f32(3, 5, 1), options={"min_cuts": 4}),
    aten("bmm", f32(3, 1, 4), f32(3, 4, 5), options={"min_cuts": 4}),
    aten(
        "transformers::grouped_mm_fallback",
        *(f32(7, 4), f32(3, 4, 6), OFFSETS),
        options={"min_cuts": 2},
    ),
    aten(
        "transformers::grouped_mm_fallback_backward",
        *(f32(7, 4), f32(3, 4, 6), OFFSETS, f32(7, 6)),
        options={"min_cuts": 2},
    ),
    aten("addmm", f32(6, 1), f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
    aten("addmv", f32(6), f32(6, 4), f32(4), options={"min_cuts": 2}),
    aten("baddbmm", f32(4, 1, 8), f32(4, 6, 4), f32(4, 4, 8), options={"min_cuts": 4}),
    aten("bmm", f32(4, 6, 4), f32(4, 4, 8), options={"min_cuts": 4}),
    aten("dot", f32(6), f32(6), options={"min_cuts": 1}),
    aten("linear", f32(4, 6, 4), f32(8, 4), f32(8), options={"min_cuts": 4}),
    aten("linear", f32(4), f32(8, 4), None, options={"min_cuts": 2}),
    aten("matmul", f32(4, 6, 4), f32(4, 8), options={"min_cuts": 4}),
    aten("mm", f32(6, 4), f32(4, 8), options={"min_cuts": 3}),
    aten("linalg_inv_ex", f32(4, 5, 3, 3), options={"min_cuts": 2, "tolerance": 1e-3}),
    aten("linalg_lu_factor_ex", f32(5, 3, 4), options={"min_cuts": 1, "tolerance": 1e-3}),
    aten("linalg_cholesky_ex", f32(5, 1, 1, low=0.5), options={"min_cuts": 1}),
    aten("mv", f32(6, 4), f32(4), options={"min_cuts": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_a_scaled_bias_has_no_rule() -> None:
    scaled = aten("baddbmm", f32(2, 3, 5), f32(2, 3, 4), f32(2, 4, 5), beta=2)
    assert check_opaque(scaled) == "beta or alpha is not 1"
