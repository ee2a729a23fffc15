"""Parts of a dim put together and taken apart, moved and repeated, by PyTorch's operators."""

from typing import Any

import pytest
from aten_rows import aten
from rows import Case, check_opaque, check_row, f32, flags, ints

TWO: dict[str, Any] = {"min_cuts": 2}
THREE: dict[str, Any] = {"min_cuts": 3}
FOUR: dict[str, Any] = {"min_cuts": 4}
END = 2**63 - 1

CASES = [
    aten("cat", [f32(4, 6), f32(4, 3)], 1, options=FOUR),
    aten("cat", [f32(4, 6), f32(3, 6), f32(8, 6)], options={"min_cuts": 5}),
    aten("cat", [f32(4, 6), f32(4, 0)], -1, options=THREE),
    aten("cat", [f32(0), f32(4, 6), f32(4, 3)], -1, options=FOUR),
    aten("cat", [f32(0), f32(6)], options=TWO),
    aten("cat", [ints(4, 6), ints(4, 6)], -1, options=FOUR),
    aten("cat", [flags(4, 6), flags(4, 6)], -1, options=THREE),
    aten("stack", [f32(4, 6), f32(4, 6), f32(4, 6)], options=THREE),
    aten("stack", [f32(4, 6), f32(4, 6)], -1, options=THREE),
    aten("stack", [f32(), f32()], options={"min_cuts": 1}),
    aten("split.Tensor", f32(4, 12), 4, -1, results=3, options={"min_cuts": 5}),
    aten("split.Tensor", f32(10, 6), 4, results=3, options={"min_cuts": 5}),
    aten("split.Tensor", f32(12, 6), 4, results=3, absent=(1,), options={"min_cuts": 5}),
    aten("split.Tensor", f32(4, 6), 8, 1, results=1, options=THREE),
    aten("split_with_sizes", f32(4, 12), [8, 4], 1, results=2, options=FOUR),
    aten("split_with_sizes", f32(9, 6), [0, 6, 3], results=3, options=FOUR),
    aten("split_with_sizes", f32(9, 6), [3, 6], results=2, absent=(0,), options=FOUR),
    aten("slice.Tensor", f32(4, 12), 1, 4, 8, options={"min_cuts": 5}),
    aten("slice.Tensor", f32(12, 6), 0, 4, END, options=FOUR),
    aten("slice.Tensor", f32(12, 6), 0, None, -4, options=FOUR),
    aten("slice.Tensor", f32(4, 6), options=THREE),
    aten("slice.Tensor", f32(4, 6), 1, 0, END, options=THREE),
    aten("slice.Tensor", f32(4, 6), -1, 0, END, 2, options=TWO),
    aten("slice.Tensor", f32(4, 6), 1, 6, END, options=TWO),
    aten("slice.Tensor", flags(4, 6), 1, 3, END, options=THREE),
    aten("slice_backward", f32(4, 6), [4, 12], 1, 3, 9, 1, options={"min_cuts": 5}),
    aten("slice_backward", f32(4, 6), [12, 6], 0, -8, -4, 1, options={"min_cuts": 5}),
    aten("slice_backward", f32(4, 6), [4, 12], 1, 0, END, 2, options=TWO),
    aten("slice_backward", f32(4, 6), [4, 6], 1, 0, END, 1, options=THREE),
    aten("slice_scatter", f32(4, 12), f32(4, 4), 1, 4, 8, options={"min_cuts": 5}),
    aten("slice_scatter", f32(4, 12), f32(4, 6), -1, 1, END, 2, options=TWO),
    aten("select_backward", f32(4, 3), [4, 6, 3], 1, 2, options=THREE),
    aten("select_backward", f32(), [4], 0, -1, options={"min_cuts": 1}),
    aten("select_scatter", f32(4, 6), f32(4), 1, -1, options=TWO),
    aten("constant_pad_nd", f32(4, 6), [3, 3], options={"min_cuts": 5}),
    aten("constant_pad_nd", f32(4, 6), [0, 3, 2, 0], 0.0, options={"min_cuts": 5}),
    aten("constant_pad_nd", f32(4, 6), [0, 3], -100.0, options=THREE),
    aten("constant_pad_nd", f32(4, 12), [-3, -3, 0, 0], options={"min_cuts": 5}),
    aten("constant_pad_nd", f32(4, 12), [3, -3], options={"min_cuts": 5}),
    aten("constant_pad_nd", f32(4, 6), [0, 0, 0, 0], options=THREE),
    aten("constant_pad_nd", ints(4, 6), [0, 4], -100, options=THREE),
    aten("repeat", f32(4, 6), [3, 1, 2], options={"min_cuts": 5}),
    aten("repeat", f32(4, 1), [1, 4], options=THREE),
    aten("repeat", f32(), [4], options=TWO),
    aten("roll", f32(4, 6, 4), [1, -2], [0, 1], options=TWO),
    aten("roll", f32(4, 6), [5], options={"min_cuts": 1}),
    aten("flip", f32(4, 6), [-1], options=TWO),
    aten("flip", f32(4, 6), [], options=THREE),
    aten("tril", f32(4, 5, 5), options=TWO),
    aten("triu", flags(4, 5, 5), 1, options={"min_cuts": 1}),
    aten("diagonal_backward", f32(6, 4), [4, 4, 6], 0, 0, 1, options=TWO),
    aten("diagonal_backward", f32(6, 3), [6, 4, 4], 1, -2, -1, options=TWO),
    aten("unfold_backward", f32(4, 2, 3), [4, 6], 1, 3, 3, options=TWO),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_a_pad_that_leaves_nothing_has_no_rule() -> None:
    reason = check_opaque(aten("constant_pad_nd", f32(4, 6), [-6, 3]))
    assert reason == "nothing of the operand is left"
