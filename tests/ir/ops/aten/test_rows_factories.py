"""Tensors that PyTorch makes from numbers and shapes."""

import math
from typing import Any

import pytest
import torch

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_row, f32, flags, ints

NONE: dict[str, Any] = {"min_cuts": 0}
ONE: dict[str, Any] = {"min_cuts": 1}
TWO: dict[str, Any] = {"min_cuts": 2}
THREE: dict[str, Any] = {"min_cuts": 3}

CASES = [
    aten("full", [4, 6], 1.5, dtype=torch.float32, options=TWO),
    aten("full", [], -math.inf, dtype=torch.float32, options=NONE),
    aten("ones", [4, 6], dtype=torch.bool, options=TWO),
    aten("zeros", [4, 6], dtype=torch.int64, options=TWO),
    aten("scalar_tensor", 2.5, dtype=torch.float32, options=NONE),
    aten("empty.memory_format", [0, 6], dtype=torch.float32, options=ONE),
    aten("eye", 4, options=NONE),
    aten("eye.m", 4, 6, options=NONE),
    aten("linspace", 0.0, 1.0, 7, options=NONE),
    aten("arange", 7, options=ONE),
    aten("arange", 8, dtype=torch.float32, options=ONE),
    aten("arange", 0, options=NONE),
    aten("arange", 7.5, dtype=torch.float32, options=ONE),
    aten("arange.start", 3, 11, dtype=torch.int32, options=ONE),
    aten("arange.start", 0.5, 8, options=NONE),
    aten("arange.start_step", 2, 19, 3, options=ONE),
    aten("arange.start_step", 9, -3, -1, options=ONE),
    aten("arange.start_step", 0, 1, 0.125, options=NONE),
    aten("full_like", f32(4, 6), 3, options=TWO),
    aten("full_like", f32(4, 6), True, dtype=torch.bool, options=TWO),
    aten("ones_like", f32(4, 6), dtype=torch.int64, options=TWO),
    aten("zeros_like", f32(4, 6), options=THREE),
    aten("zeros_like", flags(4, 6), options=TWO),
    aten("empty_like", f32(0, 6), options=ONE),
    aten("fill.Scalar", f32(4, 6), 2.0, options=TWO),
    aten("fill.Tensor", f32(4, 6), f32(), options=THREE),
    aten("new_full", f32(3, 4), [4, 6], 2.0, options={"min_cuts": 4}),
    aten("new_ones", ints(3), [4, 6], dtype=torch.bool, options=THREE),
    aten("new_ones", f32(4, 6), [4, 6], options=TWO),
    aten("new_zeros", f32(3, 4), [4, 6], options={"min_cuts": 5}),
    aten("new_zeros", f32(4, 6), [4, 6], options=THREE),
    aten("new_empty", f32(4), [0, 6], options=TWO),
    aten("new_empty_strided", f32(4), [4, 0, 6], [1, 4, 4], options=THREE),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
