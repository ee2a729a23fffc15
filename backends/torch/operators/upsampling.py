"""Upsampling as one operator with one gradient, for all modes and numbers of dims.

PyTorch has an operator for each mode and number of dims, which a trace of a training step
decomposes into dozens of index computations. This pair stays whole and calls PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import gradient, operator

#: Kernel by mode and number of spatial dims.
KERNELS: Mapping[tuple[str, int], str] = {
    ("nearest", 1): "upsample_nearest1d",
    ("nearest", 2): "upsample_nearest2d",
    ("nearest", 3): "upsample_nearest3d",
    ("nearest-exact", 1): "_upsample_nearest_exact1d",
    ("nearest-exact", 2): "_upsample_nearest_exact2d",
    ("nearest-exact", 3): "_upsample_nearest_exact3d",
    ("linear", 1): "upsample_linear1d",
    ("linear", 2): "upsample_bilinear2d",
    ("linear", 3): "upsample_trilinear3d",
    ("cubic", 2): "upsample_bicubic2d",
    ("linear-antialias", 2): "_upsample_bilinear2d_aa",
    ("cubic-antialias", 2): "_upsample_bicubic2d_aa",
}


def _settings(
    mode: str, output_size: Sequence[int], align_corners: bool, scales: Sequence[float]
) -> list[Any]:
    """The kernel's arguments after the sizes: nearest modes take no `align_corners`."""
    corners = [] if mode.startswith("nearest") else [align_corners]
    factors: Sequence[float | None] = scales or [None] * len(output_size)
    return [*corners, *factors]


@operator(
    "upsample(Tensor x, str mode, SymInt[] output_size, bool align_corners, float[] scales)"
    " -> Tensor",
    lambda x, _mode, output_size, *_: x.new_empty([*x.shape[:2], *output_size]),
)
def upsample(
    x: Tensor, mode: str, output_size: Sequence[int], align_corners: bool, scales: Sequence[float]
) -> Tensor:
    """The spatial dims resized; `scales` sets the grid's factors, empty for those of the sizes."""
    kernel = getattr(torch.ops.aten, KERNELS[mode, len(output_size)]).default
    resized: Tensor = kernel(x, output_size, *_settings(mode, output_size, align_corners, scales))
    return resized


@operator(
    "upsample_backward(Tensor grad_out, str mode, SymInt[] output_size, SymInt[] input_size,"
    " bool align_corners, float[] scales) -> Tensor",
    lambda grad_out, _mode, _output_size, input_size, *_: grad_out.new_empty(list(input_size)),
)
def upsample_backward(
    grad_out: Tensor,
    mode: str,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales: Sequence[float],
) -> Tensor:
    """Gradient of the data."""
    kernel = getattr(torch.ops.aten, f"{KERNELS[mode, len(output_size)]}_backward").default
    settings = _settings(mode, output_size, align_corners, scales)
    gradient: Tensor = kernel(grad_out, output_size, input_size, *settings)
    return gradient


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, ctx.mode, ctx.output_size, ctx.align_corners, ctx.scales = inputs
    ctx.input_size = list(x.shape)


def _gradient(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    grad = torch.ops.partitioner.upsample_backward(
        grad_out, ctx.mode, ctx.output_size, ctx.input_size, ctx.align_corners, ctx.scales
    )
    return grad, None, None, None, None


gradient("upsample", _gradient, _save)
