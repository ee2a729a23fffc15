"""Pools and other windows of PyTorch."""

import numpy as np
import pytest
from aten_rows import aten
from rows import Case, check_row, f32

PLANES = np.random.default_rng(5).permuted(np.arange(2 * 4 * 36).reshape(2, 4, 36) % 36, axis=2)


def places(*shape: int) -> np.ndarray:
    """Places in 6x6 planes, no two alike in a plane."""
    count = shape[2] * shape[3]
    return np.ascontiguousarray(PLANES[: shape[0], : shape[1], :count]).reshape(shape)


def ways(cuts: int) -> dict[str, int]:
    return {"min_cuts": cuts}


CASES = [
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
        "max_pool2d_with_indices_backward",
        *(f32(2, 4, 3, 3), f32(2, 4, 6, 6), [2, 2], [2, 2], [0, 0], [1, 1], False),
        places(2, 4, 3, 3),
        options=ways(3),
    ),
    aten("max_pool3d_with_indices", f32(4, 6, 3, 5, 5), [2, 2, 2], options=ways(2)),
    aten(
        "max_pool3d_with_indices_backward",
        *(f32(2, 4, 1, 3, 3), f32(2, 4, 1, 6, 6), [1, 2, 2], [1, 2, 2], [0] * 3, [1] * 3, False),
        places(2, 4, 3, 3)[:, :, None],
        options=ways(3),
    ),
    aten("max_unpool2d", f32(2, 4, 3, 3), places(2, 4, 3, 3), [6, 6], options=ways(2)),
    aten("pixel_shuffle", f32(4, 12, 3, 5), 2, options=ways(5)),
    aten("pixel_shuffle", f32(12, 3, 5), 2, options=ways(4)),
    aten("pixel_unshuffle", f32(4, 3, 6, 10), 2, options=ways(5)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
