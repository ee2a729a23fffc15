"""Normalizations of PyTorch, whole and in parts, and their gradients."""

import numpy as np
import pytest

from helpers.op_rows.aten_rows import aten
from helpers.op_rows.rows import Case, Draw, check_row, f32

X = f32(4, 6, 5)
IMAGES = f32(4, 6, 3, 3)


def positive(*shape: int) -> Draw:
    return f32(*shape, low=0.5, high=2.0)


def sums(channels: int) -> np.ndarray:
    """Of 36 elements a channel: variances are not negative."""
    values = np.random.default_rng(3).normal(2, 1, (36, channels))
    return np.stack((values.sum(0), (values**2).sum(0)))


def group_sums(images: int, groups: int) -> np.ndarray:
    return sums(images * groups).reshape(2, images, groups)


def ways(cuts: int) -> dict[str, float]:
    return {"min_cuts": cuts, "tolerance": 4e-6}


CASES = [
    aten("_fused_rms_norm", X, [5], f32(5), 1e-5, options=ways(2)),
    aten("_fused_rms_norm", X, [6, 5], None, None, options=ways(1)),
    aten(
        "_native_batch_norm_legit_no_training",
        *(IMAGES, f32(6), f32(6), f32(6), positive(6), 0.1, 1e-5),
        options=ways(4),
    ),
    aten(
        "_native_batch_norm_legit_no_training",
        *(f32(4, 6), None, None, f32(6), positive(6), 0.1, 1e-5),
        absent=(1, 2),
        options=ways(2),
    ),
    aten("native_group_norm", f32(4, 8, 5), f32(8), f32(8), 4, 8, 5, 4, 1e-5, options=ways(2)),
    aten(
        "native_group_norm",
        *(f32(4, 8, 3, 3), None, None, 4, 8, 9, 1, 1e-5),
        absent=(1, 2),
        options=ways(1),
    ),
    aten("native_layer_norm", X, [5], f32(5), f32(5), 1e-5, options=ways(2)),
    aten("native_layer_norm", X, [6, 5], f32(6, 5), None, 1e-5, options=ways(1)),
    aten(
        "partitioner::batch_norm_apply",
        *(IMAGES, f32(6), positive(6), f32(6), f32(6), 1e-5),
        options=ways(4),
    ),
    aten(
        "partitioner::batch_norm_apply",
        *(IMAGES, None, positive(6), f32(6), None, 1e-5),
        options=ways(5),  # and pending sums
    ),
    aten(
        "partitioner::batch_norm_grad_input",
        *(IMAGES, f32(4, 6, 3, 3), f32(6), positive(6), f32(6), f32(2, 6), 36),
        options=ways(5),
    ),
    aten(
        "partitioner::batch_norm_grad_input",
        *(f32(4, 6), f32(4, 6), f32(6), positive(6), None, f32(2, 6), 4),
        options=ways(3),
    ),
    aten(
        "partitioner::batch_norm_grad_sums",
        *(IMAGES, f32(4, 6, 3, 3), f32(6), positive(6)),
        options=ways(5),
    ),
    aten(
        "partitioner::batch_norm_running",
        *(f32(6), positive(6), f32(6), positive(6), 36, 0.1),
        options=ways(1),
    ),
    aten("partitioner::batch_norm_statistics", sums(6), 36, 1e-5, "float32", options=ways(1)),
    aten("partitioner::batch_norm_sums", IMAGES, options=ways(4)),
    aten("partitioner::batch_norm_sums", f32(6, 4), options=ways(2)),
    aten(
        "partitioner::group_norm_apply",
        *(f32(4, 8, 3, 5), f32(4, 4), positive(4, 4), f32(8), f32(8)),
        options=ways(5),
    ),
    aten(
        "partitioner::group_norm_apply",
        *(f32(2, 6, 5), f32(2, 1), positive(2, 1), None, None),
        options=ways(3),
    ),
    aten(
        "partitioner::group_norm_grad_planes",
        *(IMAGES, f32(4, 6, 3, 3), f32(4, 2), positive(4, 2), f32(6), f32(2, 4, 6), 27),
        options=ways(4),
    ),
    aten(
        "partitioner::group_norm_grad_planes",
        *(f32(2, 6, 5), f32(2, 6, 5), f32(2, 6), positive(2, 6), None, f32(2, 2, 6), 5),
        options=ways(3),
    ),
    aten(
        "partitioner::group_norm_grad_sums",
        *(IMAGES, f32(4, 6, 3, 3), f32(4, 2), positive(4, 2)),
        options=ways(5),
    ),
    aten(
        "partitioner::group_norm_statistics", group_sums(4, 3), 36, 1e-5, "float32", options=ways(2)
    ),
    aten("partitioner::group_norm_sums", IMAGES, 2, options=ways(5)),
    aten("partitioner::group_norm_sums", IMAGES, 1, options=ways(4)),
    aten("partitioner::group_norm_sums", IMAGES, 6, options=ways(4)),
    aten(
        "partitioner::group_norm_grad_input",
        *(f32(4, 8, 5), f32(4, 8, 5), f32(4, 4), positive(4, 4), f32(8), 4),
        options=ways(3),
    ),
    aten(
        "partitioner::group_norm_grad_weight",
        *(f32(4, 8, 5), f32(4, 8, 5), f32(4, 4), positive(4, 4), 4, "float32"),
        options=ways(5),
    ),
    aten(
        "partitioner::layer_norm_grad_input",
        *(X, X, [5], f32(4, 6, 1), positive(4, 6, 1), f32(5)),
        options=ways(3),
    ),
    aten(
        "partitioner::layer_norm_grad_weight",
        *(X, X, [6, 5], f32(4, 1, 1), positive(4, 1, 1), "float32"),
        options=ways(4),
    ),
    aten(
        "partitioner::layer_norm_grad_weight",
        *(X, X, [5], f32(4, 6, 1), positive(4, 6, 1), "float32"),
        absent=(1,),
        options=ways(4),
    ),
    aten("partitioner::rms_norm", X, [5], f32(5), 1e-5, options=ways(2)),
    aten(
        "partitioner::rms_norm_grad_input",
        *(X, X, [5], positive(4, 6, 1), f32(5)),
        options=ways(3),
    ),
    aten(
        "partitioner::rms_norm_grad_weight",
        *(X, X, [5], positive(4, 6, 1), "float32"),
        options=ways(4),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)
