"""Reductions of PyTorch."""

import math
from typing import Any

import pytest
import torch

from helpers.op_rows.aten_calls import run_node
from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, Draw, check_row, f32, flags, ints, make_trial
from partitioner.ir.ops import row_of
from partitioner.ir.ops.table import LocalView, OpView

ONE: dict[str, Any] = {"min_cuts": 1}
TWO: dict[str, Any] = {"min_cuts": 2}
THREE: dict[str, Any] = {"min_cuts": 3}
FOUR: dict[str, Any] = {"min_cuts": 4}
WHOLE: dict[str, Any] = {"min_cuts": 0}
half = Draw((6, 4), "float16", 0, 4)

CASES = [
    aten("sum", f32(4, 6), options=THREE),
    aten("sum", flags(4, 6), options=TWO),
    aten("sum", f32(), options=ONE),
    aten("sum", f32(4, 6), dtype=torch.float64, options=THREE),
    aten("sum.dim_IntList", f32(4, 6, 3), [0, -1], options=FOUR),
    aten("sum.dim_IntList", f32(4, 6), [1], True, options=THREE),
    aten("sum.dim_IntList", f32(4, 6), None, True, options=THREE),
    aten("sum.dim_IntList", f32(4, 6), [], options=THREE),
    aten("sum.dim_IntList", ints(4, 6), [0], options=THREE),
    aten("sum.dim_IntList", ints(4, 6, dtype="int32"), [0], options=TWO),
    aten("sum.dim_IntList", f32(), [0], options=ONE),
    aten("sum.dim_IntList", f32(4, 1), [-1], options=TWO),
    aten("mean", f32(4, 6), options=THREE),
    aten("mean", f32(), options=ONE),
    aten("mean.dim", f32(4, 7, 3), [1], options=FOUR),
    aten("mean.dim", f32(4, 7, 3), [-1, 0], True, options=FOUR),
    aten("mean.dim", f32(4, 6), None, options=THREE),
    aten("mean.dim", ints(4, 6), [1], dtype=torch.float32, options=TWO),
    aten("mean.dim", half, [0], options={**THREE, "tolerance": 4e-3}),
    aten("amax", f32(4, 6, 3), [1], options=THREE),
    aten("amax", f32(4, 6), options=TWO),
    aten("amax", ints(4, 6), [-1], True, options=TWO),
    aten("amin", f32(4, 6, 3), [0, 2], True, options=THREE),
    aten("amin", f32(), [0], options=WHOLE),
    aten("amax", flags(4, 6), [1], options=ONE),
    aten("max", f32(4, 6), options=TWO),
    aten("min", ints(4, 6), options=TWO),
    aten("max.dim", f32(4, 6), 1, options=ONE),
    aten("max.dim", f32(4, 6, 3), -2, True, options=TWO),
    aten("min.dim", f32(4, 6), 0, absent=(1,), options=ONE),
    aten("kthvalue", f32(4, 7), 3, 1, options=ONE),
    aten("median.dim", f32(4, 7, 3), 1, True, options=TWO),
    aten("mode", ints(4, 7), 0, options=ONE),
    aten("nanmedian.dim", f32(4, 7), 1, options=ONE),
    aten("aminmax", f32(4, 6), dim=-1, options=ONE),
    aten("aminmax", f32(4, 6), options=WHOLE),
    aten("prod", f32(4, 6), options=TWO),
    aten("prod.dim_int", f32(4, 6), -1, True, options=TWO),
    aten("prod.dim_int", ints(4, 6, low=1, high=3, dtype="int32"), 0, options=TWO),
    aten("count_nonzero", f32(4, 6), options=TWO),
    aten("count_nonzero", flags(4, 6), 1, options=TWO),
    aten("count_nonzero.dim_IntList", flags(4, 6, 3), [0, -1], options=THREE),
    *(aten(op, flags(4, 6), options=WHOLE) for op in ("any", "all")),
    *(aten(f"{op}.dim", flags(4, 6), -1, options=ONE) for op in ("any", "all")),
    *(aten(f"{op}.dims", flags(4, 6, 3), [0, 2], True, options=ONE) for op in ("any", "all")),
    *(aten(f"{op}.dims", flags(4, 6), [], options=TWO) for op in ("any", "all")),
    *(aten(f"{op}.dims", flags(4, 6), None, options=WHOLE) for op in ("any", "all")),
    *(aten(op, f32(4, 6), 1, options=ONE) for op in ("argmax", "argmin")),
    *(aten(op, f32(4, 6), -2, True, options=ONE) for op in ("argmax", "argmin")),
    aten("argmax", f32(4, 6), options=WHOLE),
    aten("var.correction", f32(4, 6, 3), [1], options=TWO),
    aten("var.correction", f32(4, 6), correction=0, options=WHOLE),
    aten("var_mean.correction", f32(4, 6, 3), [-1], keepdim=True, options=TWO),
    aten("std.correction", f32(4, 6), [0], correction=1, options=ONE),
    aten("std_mean.correction", f32(4, 6), [0], options=ONE),
    aten("linalg_vector_norm", f32(4, 6), options=WHOLE),
    aten("linalg_vector_norm", f32(4, 6), 1, [-1], True, options=ONE),
    aten("norm.Scalar", f32(4, 6), options=WHOLE),
    aten("norm.ScalarOpt_dim", f32(4, 6), 2, [1], True, options=ONE),
    aten("logsumexp", f32(4, 6, 3), [-1], options=TWO),
    aten("logsumexp", f32(4, 6), [0, 1], True, options=WHOLE),
    aten("cumsum", f32(4, 6), -1, options=TWO),
    aten("cumsum", flags(4, 6), 0, options=ONE),
    aten("cumsum", f32(), 0, options=ONE),
    aten("_fft_c2c", ints(4, 6, dtype="complex64"), [1], 0, True, options={"min_cuts": 1}),
    aten("_fft_c2r", ints(4, 3, dtype="complex64"), [1], 2, 5, options={"min_cuts": 1}),
    aten("_fft_r2c", f32(2, 4, 6), [1, 2], 0, True, options={"min_cuts": 1}),
    aten("histc", f32(4, 6), 5, -1, 1, options={"min_cuts": 2, "exact": True}),
    aten("histc", f32(4, 6), 5, options={"min_cuts": 0}),
    aten("cumprod", f32(4, 6), 1, options=ONE),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def of_nothing(case: Case) -> torch.Tensor:
    """What a device without elements of dim 0 gives."""
    trial = make_trial(case)
    row = row_of(trial.node)
    assert row is not None
    assert row.localize is not None
    whole = trial.operands[0]
    assert whole is not None
    part = whole[:0]
    shapes = LocalView({}, (part.shape,), (trial.graph.types["out0"].shape,))
    (node,) = row.localize(OpView(trial.node, trial.graph), shapes).nodes
    result = run_node(node, {"in0": torch.from_numpy(part)}, torch.device("cpu"))[0]
    assert result is not None
    assert result.shape == shapes.out_shapes[0]
    assert result.dtype == torch.from_numpy(whole).dtype
    return result


@pytest.mark.parametrize(
    ("case", "neutral"),
    [
        (aten("mean.dim", f32(4, 6), [0]), 0),
        (aten("mean", f32(4, 6)), 0),
        (aten("amax", f32(4, 6), [0], True), -math.inf),
        (aten("amin", f32(4, 6), [0]), math.inf),
        (aten("max", ints(4, 6)), -(2**63)),
        (aten("amin", ints(4, 6, dtype="int32"), [0]), 2**31 - 1),
    ],
    ids=str,
)
def test_a_device_without_elements_changes_nothing(case: Case, neutral: float) -> None:
    assert (of_nothing(case) == neutral).all()
