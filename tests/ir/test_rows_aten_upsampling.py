"""Upsampling of PyTorch, all modes, and its gradients."""

from typing import Any

import pytest
from aten_rows import aten
from rows import Case, check_row, f32

from partitioner.ir.ops.aten.upsampling import OPERATORS

MODES = {
    "nearest": (1, 2, 3),
    "nearest-exact": (1, 2, 3),
    "linear": (1, 2, 3),
    "cubic": (2,),
    "linear-antialias": (2,),
    "cubic-antialias": (2,),
}
OPTIONS = {"min_cuts": 3, "tolerance": 4e-6}


def corners(operator: str) -> list[Any]:
    return [] if "nearest" in operator else [False]


def sizes(space: int) -> tuple[list[int], list[int]]:
    return [3, 4, 2][:space], [6, 8, 4][:space]


def pytorchs(operator: str, space: int) -> list[Case]:
    """The operator, its form with factors, and its gradient."""
    small, large = sizes(space)
    corner = corners(operator)
    return [
        aten(operator, f32(4, 6, *small), large, *corner, options=OPTIONS),
        aten(f"{operator}.vec", f32(4, 6, *small), None, *corner, [2.0] * space, options=OPTIONS),
        aten(
            f"{operator}_backward",
            *(f32(4, 6, *large), large, [4, 6, *small], *corner),
            options=OPTIONS,
        ),
    ]


def ours(mode: str, space: int) -> list[Case]:
    """Our pair."""
    small, large = sizes(space)
    return [
        aten(
            "partitioner::upsample",
            *(f32(4, 6, *small), mode, large, False, [2.0] * space),
            options=OPTIONS,
        ),
        aten(
            "partitioner::upsample_backward",
            *(f32(4, 6, *large), mode, large, [4, 6, *small], False, []),
            options=OPTIONS,
        ),
    ]


CASES = [
    *(case for name, (_, space) in OPERATORS.items() for case in pytorchs(name, space)),
    aten(
        "grid_sampler_2d",
        *(f32(4, 6, 5, 5), f32(4, 3, 2, 2, low=-1.2, high=1.2), 0, 0, False),
        options=OPTIONS,
    ),
    aten(
        "grid_sampler_2d_backward",
        *(f32(4, 6, 3, 2), f32(4, 6, 5, 5), f32(4, 3, 2, 2, low=-1.2, high=1.2), 0, 0, False),
        [True, True],
        options={"min_cuts": 2, "tolerance": 4e-6},
    ),
    aten(
        "grid_sampler_2d_backward",
        *(f32(4, 6, 3, 2), f32(4, 6, 5, 5), f32(4, 3, 2, 2, low=-1.2, high=1.2), 0, 0, False),
        [True, False],
        absent=(1,),
        options=OPTIONS,
    ),
    *(case for mode, spaces in MODES.items() for space in spaces for case in ours(mode, space)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
