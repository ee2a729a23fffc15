"""Elements moved, joined, cut out or repeated by PyTorch's operators, and views of them."""

from typing import Any

import numpy as np
import pytest
import torch

from helpers.op_rows import aten_rows
from helpers.op_rows.aten_calls import run_node
from helpers.op_rows.aten_rows import aten, run_torch
from helpers.op_rows.rows import Case, check_opaque, check_row, f32, flags, ints, make_trial
from partitioner.ir.graph import Node
from partitioner.ir.ops import row_of
from partitioner.ir.ops.signature import pattern
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView

TWO: dict[str, Any] = {"min_cuts": 2}
THREE: dict[str, Any] = {"min_cuts": 3}  # two dims, and pending sums
FOUR: dict[str, Any] = {"min_cuts": 4}
END = 2**63 - 1

CASES = [
    aten("alias", f32(4, 6), options=THREE),
    aten("detach", f32(4, 6), options=THREE),
    aten("detach", flags(4, 6), options=TWO),
    aten("detach", f32(), options={"min_cuts": 1}),
    aten("view", f32(4, 6, 8), [24, 8], options=FOUR),
    aten("view", f32(4, 24), [4, -1, 6], options=FOUR),
    aten("view", f32(4, 6), [24], options=THREE),
    aten("view", f32(1, 4, 6), [4, 1, 6, 1], options=THREE),
    aten("view", f32(6, 4), [8, 3], options=TWO),
    aten("view", f32(0, 4), [4, 0], options={"min_cuts": 1}),
    aten("view", f32(), [1, 1], options={"min_cuts": 1}),
    aten("view", ints(4, 6), [2, 2, 6], options=TWO),
    aten("_unsafe_view", f32(4, 6, 8), [4, 48], options=FOUR),
    aten("reshape", f32(4, 6, 8), [4, -1], options=FOUR),
    aten("t", f32(4, 6), options=THREE),
    aten("t", f32(4), options=TWO),
    aten("t", f32(), options={"min_cuts": 1}),
    aten("transpose.int", f32(4, 6, 3), 1, -1, options=FOUR),
    aten("transpose.int", f32(4, 6), 0, 0, options=THREE),
    aten("transpose.int", f32(), 0, -1, options={"min_cuts": 1}),
    aten("permute", f32(4, 6, 3), [2, 0, -2], options=FOUR),
    aten("permute", f32(), [], options={"min_cuts": 1}),
    aten("expand", f32(4, 1), [3, -1, 6], options=FOUR),
    aten("expand", f32(), [4, 6], options=THREE),
    aten("expand", flags(1, 6), [4, 6], options=TWO),
    aten("unsqueeze", f32(4, 6), 1, options=THREE),
    aten("unsqueeze", f32(4, 6), -1, options=THREE),
    aten("unsqueeze", f32(), 0, options={"min_cuts": 1}),
    aten("squeeze", f32(4, 1, 6, 1), options=THREE),
    aten("squeeze", f32(2, 3), options=THREE),
    aten("squeeze.dim", f32(4, 1, 6), 1, options=THREE),
    aten("squeeze.dim", f32(4, 6, 1), -1, options=THREE),
    aten("squeeze.dim", f32(2, 6), 0, options=THREE),
    aten("squeeze.dim", f32(), -1, options={"min_cuts": 1}),
    aten("squeeze.dims", f32(2, 1, 6, 1), [0, 1, -1], options=THREE),
    aten("select.int", f32(4, 6, 3), 1, 2, options=THREE),
    aten("select.int", f32(4, 6, 3), -1, -1, options=THREE),
    aten("select.int", f32(4), 0, 1, options={"min_cuts": 1}),
    aten("unbind.int", f32(3, 4, 6), options=THREE, results=3),
    aten("unbind.int", f32(4, 3), -1, options=TWO, results=3, absent=(0, 2)),
    aten("diagonal", f32(4, 4, 6), options=TWO),
    aten("diagonal", f32(2, 4, 6), 1, -2, -1, options=TWO),
    aten("unfold", f32(4, 6), 1, 3, 2, options=TWO),
    aten("unfold", f32(4, 6, 5), 0, 2, 1, options=THREE),
    aten("view_as_complex", f32(4, 6, 2), options=THREE),
    aten("view_as_real", ints(4, 6, dtype="complex64"), options=THREE),
    aten("cat", [f32(4, 6), f32(4, 3)], 1, options=FOUR),
    aten("cat", [f32(4, 6), f32(3, 6), f32(8, 6)], options={"min_cuts": 5}),
    aten("cat", [f32(4, 6), f32(4, 0)], -1, options=THREE),
    aten("cat", [f32(0), f32(4, 6), f32(4, 3)], -1, options=FOUR),
    aten("cat", [f32(0), f32(6)], options=TWO),
    aten("cat", [ints(4, 6), ints(4, 6)], -1, options=FOUR),
    aten("cat", [f32(2, 3, 7, 4), f32(2, 3, 1, 4)], 2, options={"min_cuts": 5}),
    aten("cat", [f32(1, 6), f32(7, 6), f32(1, 6)], options=FOUR),
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
    aten("slice_scatter", f32(4, 12), f32(4, 8), 1, 4, 12, options={"min_cuts": 4}),
    aten("slice_scatter", f32(4, 13), f32(4, 4), 1, 4, 8, options={"min_cuts": 2}),
    aten("slice_scatter", f32(9, 4), f32(3, 4), 0, -7, END, 3, options={"min_cuts": 2}),
    aten("slice_scatter", f32(4, 12), f32(4, 6), -1, 1, END, 2, options=TWO),
    aten("select_backward", f32(4, 3), [4, 6, 3], 1, 2, options=THREE),
    aten("select_backward", f32(), [4], 0, -1, options={"min_cuts": 1}),
    aten("select_scatter", f32(4, 6), f32(4), 1, -1, options={"min_cuts": 2}),
    aten("select_scatter", f32(3, 7, 4), f32(3, 4), 1, 5, options={"min_cuts": 3}),
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
    aten("unfold_backward", f32(1, 2, 3), [4, 6], 1, 3, 3, options={"min_cuts": 1}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_a_part_in_strides_that_view_refuses_is_copied() -> None:
    trial = make_trial(aten("view", f32(4, 6), [24]))
    row = row_of(trial.node)
    assert row is not None
    assert row.localize is not None
    local = row.localize(OpView(trial.node, trial.graph), LocalView({}, ((4, 3),), ((12,),)))
    columns = torch.arange(24.0).view(4, 6)[:, 3:]
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        columns.view(12)
    reshaped = run_node(local.nodes[0], {"in0": columns}, columns.device)[0]
    assert reshaped is not None
    np.testing.assert_array_equal(reshaped, columns.reshape(12))


def test_a_copy_that_is_said_to_be_a_view_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_rows, "ROWS", {"aten::clone": OpRow(pattern("d.. -> d.."), view=True)})
    node = Node("node", "aten::clone", ("x",), ("y",))
    with pytest.raises(AssertionError, match="aten::clone is no view"):
        run_torch(LocalOp((node,)), {"x": np.zeros(3, np.float32)})


def test_a_pad_that_leaves_nothing_has_no_rule() -> None:
    reason = check_opaque(aten("constant_pad_nd", f32(4, 6), [-6, 3]))
    assert reason == "nothing of the operand is left"
