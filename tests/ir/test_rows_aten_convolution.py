"""Convolutions of PyTorch and their gradients."""

from collections.abc import Sequence

import pytest
from aten_rows import aten
from rows import Case, Draw, check_row, f32

PLAIN = ([1, 1], [0, 0], [1, 1], False, [0, 0])  # stride, padding, dilation, transposed, ...
STRIDED = ([2, 2], [1, 1], [1, 1], False, [0, 0])
BACK = ([1, 1], [0, 0], [1, 1], True, [0, 0])
LINE = ([1], [0], [1], False, [0])
CUBE = ([1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0])


def forward(
    x: Draw, weight: Draw, settings: Sequence[object], groups: int, cuts: int, bias: int = 0
) -> Case:
    added = f32(bias) if bias else None
    options = {"min_cuts": cuts, "tolerance": 4e-6}
    return aten("convolution", x, weight, added, *settings, groups, options=options)


def grad_input(
    grad: Draw, weight: Draw, size: list[int], settings: Sequence[object], groups: int, cuts: int
) -> Case:
    return aten(
        "partitioner::convolution_grad_input",
        *(grad, weight, size, *settings, groups),
        options={"min_cuts": cuts, "tolerance": 4e-6},
    )


def grad_weight(
    grad: Draw, x: Draw, size: list[int], settings: Sequence[object], groups: int, cuts: int
) -> Case:
    return aten(
        "partitioner::convolution_grad_weight",
        *(grad, x, size, *settings, groups),
        options={"min_cuts": cuts, "tolerance": 4e-6},
    )


CASES = [
    forward(f32(4, 6, 5, 5), f32(8, 6, 3, 3), PLAIN, 1, 3, bias=8),
    forward(f32(4, 6, 5, 5), f32(8, 6, 3, 3), STRIDED, 1, 4),  # and pending sums
    forward(f32(4, 8, 5, 5), f32(8, 2, 3, 3), PLAIN, 4, 4, bias=8),
    forward(f32(4, 8, 5, 5), f32(8, 1, 3, 1), PLAIN, 8, 3),  # depthwise
    forward(f32(4, 6, 7), f32(4, 6, 3), LINE, 1, 3, bias=4),
    forward(f32(2, 4, 3, 3, 3), f32(4, 4, 2, 2, 2), CUBE, 1, 3, bias=4),
    forward(f32(4, 6, 4, 4), f32(6, 8, 3, 3), BACK, 1, 3, bias=8),
    forward(f32(4, 8, 4, 4), f32(8, 3, 2, 2), BACK, 4, 4),
    grad_input(f32(4, 8, 3, 3), f32(8, 6, 3, 3), [4, 6, 5, 5], PLAIN, 1, 4),
    grad_input(f32(4, 8, 3, 3), f32(8, 6, 3, 3), [4, 6, 6, 6], STRIDED, 1, 4),
    grad_input(f32(4, 8, 3, 3), f32(8, 2, 3, 3), [4, 8, 5, 5], PLAIN, 4, 5),
    grad_input(f32(4, 8, 3, 5), f32(8, 1, 3, 1), [4, 8, 5, 5], PLAIN, 8, 3),
    grad_input(f32(4, 4, 5), f32(4, 6, 3), [4, 6, 7], LINE, 1, 4),
    grad_input(f32(4, 8, 6, 6), f32(6, 8, 3, 3), [4, 6, 4, 4], BACK, 1, 4),
    grad_input(f32(4, 12, 5, 5), f32(8, 3, 2, 2), [4, 8, 4, 4], BACK, 4, 5),
    grad_weight(f32(4, 8, 3, 3), f32(4, 6, 5, 5), [8, 6, 3, 3], PLAIN, 1, 4),
    grad_weight(f32(4, 8, 3, 3), f32(4, 6, 6, 6), [8, 6, 3, 3], STRIDED, 1, 4),
    grad_weight(f32(4, 8, 3, 3), f32(4, 8, 5, 5), [8, 2, 3, 3], PLAIN, 4, 5),
    grad_weight(f32(4, 8, 3, 5), f32(4, 8, 5, 5), [8, 1, 3, 1], PLAIN, 8, 3),
    grad_weight(f32(4, 8, 6, 6), f32(4, 6, 4, 4), [6, 8, 3, 3], BACK, 1, 4),
    grad_weight(f32(4, 12, 5, 5), f32(4, 8, 4, 4), [8, 3, 2, 2], BACK, 4, 5),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
