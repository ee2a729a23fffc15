"""Convolutions, pools, upsampling and samples at a grid in PyTorch, and their gradients."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, Draw, check_row, f32
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops.aten.windows import UPSAMPLING

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


CONVOLUTIONS = [
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

PLANES = np.random.default_rng(5).permuted(np.arange(2 * 4 * 36).reshape(2, 4, 36) % 36, axis=2)


def places(*shape: int) -> np.ndarray:
    """Places in 6x6 planes, no two alike in a plane."""
    count = shape[2] * shape[3]
    return np.ascontiguousarray(PLANES[: shape[0], : shape[1], :count]).reshape(shape)


def maxima(shape: Sequence[int], *settings: Any) -> np.ndarray:
    """Places of the maxima of windows over random planes."""
    x = torch.rand(*shape, generator=torch.Generator().manual_seed(3))
    pool = getattr(torch.ops.aten, f"max_pool{len(shape) - 2}d_with_indices")
    return pool(x, *settings)[1].numpy()


def max_backward(shape: Sequence[int], *settings: Any, cuts: int) -> Case:
    """The gradient of a max pool of planes of this shape."""
    places = maxima(shape, *settings)
    name = f"max_pool{len(shape) - 2}d_with_indices_backward"
    operands = f32(*places.shape), f32(*shape)
    return aten(name, *operands, *settings, places, options=ways(cuts))


def ways(cuts: int) -> dict[str, int]:
    return {"min_cuts": cuts}


POOLS = [
    aten("_adaptive_avg_pool2d", f32(4, 6, 5, 5), [2, 3], options=ways(3)),
    aten("_adaptive_avg_pool2d_backward", f32(4, 6, 2, 3), f32(4, 6, 5, 5), options=ways(3)),
    aten("_adaptive_avg_pool3d", f32(4, 6, 3, 5, 5), [2, 2, 3], options=ways(3)),
    aten(
        "_adaptive_avg_pool3d_backward",
        *(f32(4, 6, 2, 2, 3), f32(4, 6, 3, 5, 5)),
        options=ways(3),
    ),
    aten("adaptive_max_pool2d", f32(4, 6, 5, 5), [2, 3], options=ways(2)),
    aten(
        "adaptive_max_pool2d_backward",
        *(f32(2, 4, 2, 3), f32(2, 4, 6, 6), places(2, 4, 2, 3)),
        options=ways(3),
    ),
    aten("adaptive_max_pool3d", f32(4, 6, 3, 5, 5), [2, 2, 3], options=ways(2)),
    aten(
        "adaptive_max_pool3d_backward",
        *(f32(2, 4, 1, 2, 3), f32(2, 4, 1, 6, 6), places(2, 4, 2, 3)[:, :, None]),
        options=ways(3),
    ),
    aten("avg_pool2d", f32(4, 6, 5, 5), [3, 3], [2, 2], [1, 1], options=ways(3)),
    aten("avg_pool2d", f32(6, 5, 5), [2], options=ways(2)),
    aten(
        "avg_pool2d_backward",
        *(f32(4, 6, 3, 3), f32(4, 6, 5, 5), [3, 3], [2, 2], [1, 1], False, True, None),
        options=ways(3),
    ),
    aten("avg_pool3d", f32(4, 6, 4, 4, 4), [2, 2, 2], options=ways(3)),
    aten(
        "avg_pool3d_backward",
        *(f32(4, 6, 2, 2, 2), f32(4, 6, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0]),
        *(False, True, None),
        options=ways(3),
    ),
    aten("channel_shuffle", f32(4, 12, 5), 3, options=ways(4)),
    aten("col2im", f32(4, 24, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1], options=ways(3)),
    aten("im2col", f32(4, 6, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1], options=ways(3)),
    aten("im2col", f32(6, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1], options=ways(2)),
    aten("max_pool2d_with_indices", f32(4, 6, 5, 5), [3, 3], [2, 2], [1, 1], options=ways(2)),
    aten("max_pool2d_with_indices", f32(6, 5, 5), [2, 2], options=ways(1)),
    aten("max_pool2d_with_indices", f32(4, 6, 5, 5), [2, 2], absent=(1,), options=ways(2)),
    aten(
        "partitioner::max_pool_part",
        *(f32(2, 4, 8, 9), [3, 2], [2, 1], [1, 2], [1, 0, 0, 1], [4, 0], [12, 9]),
        options=ways(2),
    ),
    aten(
        "partitioner::max_pool_grad_part",
        *(f32(2, 4, 3, 4), places(2, 4, 3, 4), [1, 0], [4, 5], [6, 6]),
        options=ways(2),
    ),
    max_backward((2, 4, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, cuts=5),
    max_backward((2, 4, 7, 8), [3, 3], [2, 2], [1, 1], [1, 1], False, cuts=5),
    max_backward((2, 4, 8, 7), [3, 3], [2, 2], [0, 1], [1, 1], True, cuts=5),
    max_backward((2, 3, 9, 7), [2, 2], [1, 3], [1, 0], [2, 1], False, cuts=5),
    aten("max_pool3d_with_indices", f32(4, 6, 3, 5, 5), [2, 2, 2], options=ways(2)),
    max_backward((2, 4, 1, 6, 6), [1, 2, 2], [1, 2, 2], [0] * 3, [1] * 3, False, cuts=5),
    aten("max_unpool2d", f32(2, 4, 3, 3), places(2, 4, 3, 3), [6, 6], options=ways(2)),
    aten("pixel_shuffle", f32(4, 12, 3, 5), 2, options=ways(5)),
    aten("pixel_shuffle", f32(12, 3, 5), 2, options=ways(4)),
    aten("pixel_unshuffle", f32(4, 3, 6, 10), 2, options=ways(5)),
]

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


SAMPLES = [
    *(case for name, (_, space) in UPSAMPLING.items() for case in pytorchs(name, space)),
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


def slid_forward(
    shape: tuple[int, ...], kernel: tuple[int, ...], *settings: Sequence[int], outer: int = 1
) -> list[Case]:
    """A convolution of one channel, its two gradients, and that which it is the gradient of."""
    space = len(kernel)
    stride, padding, dilation = settings
    full = [stride, padding, dilation, False, [0] * space]
    data, weight = f32(1, 1, *shape), f32(outer, 1, *kernel)
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(shape, kernel, *settings, strict=True)
    ]
    grad = f32(1, outer, *sizes)
    more = [
        n - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
        for n, o, k, s, p, d in zip(shape, sizes, kernel, *settings, strict=True)
    ]
    back = [stride, padding, dilation, True, more]
    return [
        forward(data, weight, full, 1, space),
        grad_input(grad, weight, [1, 1, *shape], full, 1, space),
        grad_weight(grad, data, [outer, 1, *kernel], full, 1, space),
        forward(grad, weight, back, 1, space),
        grad_input(data, weight, [1, outer, *sizes], back, 1, space),
        grad_weight(data, grad, [outer, 1, *kernel], back, 1, space),
    ]


SLID = [
    *(
        case
        for size, kernel, stride, padding, dilation in (
            (11, 1, 2, 0, 1),
            (12, 2, 1, 0, 1),
            (13, 3, 1, 1, 1),
            (11, 3, 2, 1, 1),
            (10, 3, 3, 0, 1),
            (14, 3, 1, 2, 2),
            (13, 4, 2, 1, 1),
            (12, 5, 1, 2, 1),
            (17, 7, 2, 3, 1),
            (17, 7, 3, 2, 1),
            (17, 2, 3, 0, 2),
        )
        for case in slid_forward((size,), (kernel,), [stride], [padding], [dilation])
    ),
    *slid_forward((9, 7), (3, 4), [2, 1], [1, 2], [1, 1], outer=2),
    *slid_forward((5, 8, 6), (3, 2, 3), [1, 2, 1], [1, 0, 1], [1, 1, 2]),
    aten("avg_pool2d", f32(2, 2, 9, 8), [3, 2], [2, 1], [1, 1], False, False, options=ways(4)),
    aten("avg_pool2d", f32(2, 2, 9, 8), [3, 3], [2, 2], [1, 1], True, True, options=ways(4)),
    aten("avg_pool2d", f32(2, 2, 8, 8), [3, 3], [2, 2], [0, 1], True, False, options=ways(4)),
    aten("avg_pool2d", f32(2, 2, 8, 8), [3, 3], [2, 2], [1, 1], True, True, 5, options=ways(4)),
    *(
        aten(
            "avg_pool2d_backward",
            *(f32(2, 2, *out), f32(2, 2, 9, 8), [3, 2], [2, 3], [1, 0], ceil, include, divisor),
            options=ways(4),
        )
        for ceil, out in ((False, (5, 3)), (True, (5, 3)))
        for include in (False, True)
        for divisor in (None, 7)
    ),
    aten(
        "avg_pool2d_backward",
        *(f32(2, 2, 4, 5), f32(2, 2, 8, 9), [3, 3], [2, 2], [0, 1], True, True, None),
        options=ways(4),
    ),
    aten(
        "partitioner::max_pool_part",
        *(f32(2, 4, 8, 9), [3, 2], [2, 1], [1, 2], [1, 0, 0, 1], [4, 0], [12, 9]),
        options=ways(4),
    ),
    aten("max_pool2d_with_indices", f32(2, 2, 9, 8), [3], [2], [1], [1], True, options=ways(4)),
    aten(
        "max_pool2d_with_indices",
        *(f32(2, 2, 9, 9), [3, 2], [1, 2], [1, 0], [2, 3]),
        absent=(1,),
        options=ways(4),
    ),
]

LINES = ({"tp": 2}, {"tp": 3}, {"tp": 4}, {"tp": 5}, {"dp": 2, "tp": 3})
WIDE = tuple(DeviceMesh.of(axes) for axes in LINES)

CASES = [*CONVOLUTIONS, *POOLS, *SAMPLES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


@pytest.mark.parametrize("case", SLID, ids=str)
def test_space_is_cut_with_a_halo(case: Case) -> None:
    check_row(case, WIDE)


def test_indices_of_maxima_stay_inside_the_plane() -> None:
    """A window of nothing but -inf has its first element, not the padding, as its maximum."""
    plane = np.full((1, 1, 6, 6), -np.inf, np.float32)
    check_row(aten("max_pool2d_with_indices", plane, [3, 3], [1, 1], [1, 1], options=ways(2)))
