"""Bags of rows in PyTorch: every cut of rows, channels, indices and bags."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the usual name

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, check_row, f32, ints

ROWS, CHANNELS, COUNT, BAGS = 7, 4, 11, 5
PADDING = 2
#: The third bag is empty.
OFFSETS = np.array([0, 4, 5, 5, 9])
INDICES = ints(COUNT, low=0, high=ROWS - 1)


def _settings(mode: int, padding: int = -1) -> tuple[Any, ...]:
    return (mode, BAGS, padding, ROWS, COUNT, [0], [ROWS], [0], [COUNT], [0], [BAGS])


def _bag(op: str, *tensors: object, mode: int, cuts: int, padding: int = -1) -> Case:
    weights = f32(COUNT) if mode == 0 else None
    call = (*tensors, INDICES, OFFSETS, weights, *_settings(mode, padding))
    return aten(f"partitioner::embedding_bag{op}", *call, options={"min_cuts": cuts})


TABLE, OUT = f32(ROWS, CHANNELS), f32(BAGS, CHANNELS)
PLACES = np.array([[0, 3, 2, 1], [4] * 4, [COUNT] * 4, [5, 8, 7, 6], [10, 9, 9, 10]])
#: Settings of a part of the rows, indices and bags of a larger call.
OF_MORE = (0, BAGS, -1, ROWS + 3, COUNT, [2], [ROWS], [1, 6], [3, 3], [0, 3], [1, 2])
CASES = [
    _bag("", TABLE, mode=0, cuts=5),
    _bag("", TABLE, mode=1, cuts=4, padding=PADDING),
    _bag("", TABLE, mode=2, cuts=3, padding=PADDING),
    _bag("_backward", OUT, mode=0, cuts=5),
    _bag("_backward", OUT, mode=1, cuts=4, padding=PADDING),
    _bag("_weights_backward", OUT, TABLE, mode=0, cuts=4),
    _bag("_places", OUT, TABLE, mode=2, cuts=3),
    _bag("_max_backward", OUT, PLACES, mode=2, cuts=3),
    *(
        aten(
            f"partitioner::embedding_bag{op}",
            *(*tensors, ints(6, low=0, high=ROWS + 2), OFFSETS, f32(6), *OF_MORE),
            options={"min_cuts": 4},
        )
        for op, tensors in (
            ("", [TABLE]),
            ("_backward", [f32(3, CHANNELS)]),
            ("_weights_backward", [f32(3, CHANNELS), TABLE]),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_results_and_gradients_are_those_of_pytorch(
    mode: str, padding: int | None, last: bool
) -> None:
    torch.manual_seed(0)
    table = torch.randint(0, 3, (ROWS, CHANNELS)).double()  # maxima are met more than once
    table.requires_grad_()
    weights = torch.randn(COUNT, dtype=torch.float64, requires_grad=True) if mode == "sum" else None
    indices = torch.randint(0, ROWS, (COUNT,))
    offsets = torch.tensor([*OFFSETS, COUNT] if last else OFFSETS)
    number = ["sum", "mean", "max"].index(mode)
    slopes = torch.randn(BAGS, CHANNELS, dtype=torch.float64)
    plain = F.embedding_bag(
        *(indices, table, offsets),
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=last,
        padding_idx=padding,
    )
    settings = _settings(number, -1 if padding is None else padding)
    ours = torch.ops.partitioner.embedding_bag(table, indices, offsets, weights, *settings)
    torch.testing.assert_close(ours, plain)
    leaves = [table] if weights is None else [table, weights]
    for expected, actual in zip(
        *(torch.autograd.grad((out * slopes).sum(), leaves) for out in (plain, ours)), strict=True
    ):
        torch.testing.assert_close(actual, expected)


def test_offsets_that_leave_indices_out_are_refused() -> None:
    """PyTorch's kernels differ in what they do with these."""
    bag = torch.ops.partitioner.embedding_bag
    table, indices = torch.zeros(ROWS, CHANNELS), torch.zeros(COUNT, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="embedding_bag: the first offset is not 0"):
        bag(table, indices, torch.ones(BAGS), None, *_settings(0))
    offsets = torch.tensor([*OFFSETS, COUNT - 1])
    with pytest.raises(RuntimeError, match="the last offset is not the number of indices, 11"):
        bag(table, indices, offsets, None, *_settings(0))
