"""Operators of planes: gradients of convolutions, pools of a part of a plane, upsampling.

Gradients of a convolution are one operator each: each is sharded in its own way. The indices of
maxima of a pool count inside the whole plane. PyTorch has an operator of upsampling for each mode
and number of dims, which a trace of a training step decomposes into dozens of index computations:
the pair here stays whole, for all of them, and calls PyTorch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import gradient, operator

_BACKENDS = torch._C._ConvBackend  # type: ignore[attr-defined]  # missing in PyTorch's stubs
#: PyTorch's numbers for kernels of oneDNN: that of transposed ones, behind, has no name in Python.
_OF_ONEDNN = range(_BACKENDS.Mkldnn.value, _BACKENDS.MkldnnEmpty.value)


def _fake(grad_out: Tensor, _: Tensor, size: Sequence[int], *_settings: object) -> Tensor:
    return grad_out.new_empty(list(size))


@operator(_fake)
def convolution_grad_input(
    grad_out: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Gradient of the data.

    It is the transposed convolution (of a transposed one a convolution). Where oneDNN has it, that
    is what is called: PyTorch's gradient wants memory of the data's size, to read nothing of it.
    """
    space = len(input_size) - 2  # a setting of one number is that of all dims
    stride, padding, dilation = (
        numbers if len(numbers) == space else list(numbers) * space
        for numbers in (stride, padding, dilation)
    )
    windows = stride, padding, dilation
    swept, places = (grad_out.shape, input_size) if transposed else (input_size, grad_out.shape)
    dims = zip(swept[2:], places[2:], weight.shape[2:], *windows, strict=True)
    rest = [  # elements of each dim behind the last place of a window
        size + 2 * pad - (count - 1) * step - apart * (length - 1) - 1
        for size, count, length, step, pad, apart in dims
    ]
    if all(0 <= more < step for more, step in zip(rest, stride, strict=True)):
        settings = *windows, not transposed, [0] * space if transposed else rest, groups
        backend = torch._C._select_conv_backend(grad_out, weight, None, *settings)
        if backend.value in _OF_ONEDNN:
            spread: Tensor = torch.ops.aten.convolution(grad_out, weight, None, *settings)
            return spread.contiguous()
    data = grad_out.new_empty(list(input_size))
    gradient: Tensor = torch.ops.aten.convolution_backward(
        grad_out,
        data,
        weight,
        None,
        *windows,
        transposed,
        output_padding,
        groups,
        [True, False, False],
    )[0]
    return gradient


@operator(
    _fake,
    "convolution_grad_weight(Tensor grad_out, Tensor data, SymInt[] weight_size, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, "
    "SymInt[] output_padding, SymInt groups) -> Tensor",
)
def convolution_grad_weight(
    grad_out: Tensor, data: Tensor, weight_size: Sequence[int], *settings: object
) -> Tensor:
    """Gradient of the weight; the kernel reads only the weight's shape."""
    weight = grad_out.new_empty(list(weight_size))
    gradient: Tensor = torch.ops.aten.convolution_backward(
        grad_out, data, weight, None, *settings, [False, True, False]
    )[1]
    return gradient


def _coordinates(indices: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The coordinate along each dim of flat indices into a plane of these sizes."""
    left, coordinates = indices, []
    for size in reversed(sizes):
        coordinates.append(left % size)
        left = torch.div(left, size, rounding_mode="floor")
    return coordinates[::-1]


def _flat(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    flat = coordinates[0]
    for coordinate, size in zip(coordinates[1:], sizes[1:], strict=True):
        flat = flat * size + coordinate
    return flat


def _max_pool_fake(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    *_: object,
) -> tuple[Tensor, Tensor]:
    space = len(kernel_size)
    sizes = [
        (size + before + after - (kernel - 1) * step - 1) // move + 1
        for size, before, after, kernel, step, move in zip(
            x.shape[-space:], pads[:space], pads[space:], kernel_size, dilation, stride, strict=True
        )
    ]
    shape = [*x.shape[:-space], *sizes]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@operator(_max_pool_fake)
def max_pool_part(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    starts: Sequence[int],
    whole: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Maxima of windows over a part of a plane, and their indices in the whole plane.

    Args:
        x: The part; its last dims are spatial, as many as `kernel_size` has.
        stride: Elements from one window to the next.
        dilation: Elements from one point of a window to the next.
        pads: Padding before each dim, then after each.
        starts: First element of the part in the whole plane.
        whole: Sizes of the whole plane.
    """
    space = len(kernel_size)
    sizes = x.shape[-space:]
    padded = x
    if any(pads):  # last dim first, before and after
        flat = [pads[dim + side] for dim in reversed(range(space)) for side in (0, space)]
        least = -float("inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        padded = torch.constant_pad_nd(x, flat, least)
    pool = getattr(torch.ops.aten, f"max_pool{space}d_with_indices").default
    values, indices = pool(padded, kernel_size, stride, [0] * space, dilation, False)
    inside = [
        # a window of nothing but the least number has an element of the padding as its maximum
        (coordinate - before).clamp(0, size - 1) + start
        for coordinate, before, size, start in zip(
            _coordinates(indices, padded.shape[-space:]), pads[:space], sizes, starts, strict=True
        )
    ]
    return values, _flat(inside, whole)


@operator(
    lambda grad_out, _indices, _starts, sizes, _whole: grad_out.new_empty(
        [*grad_out.shape[: -len(sizes)], *sizes]
    )
)
def max_pool_grad_part(
    grad_out: Tensor,
    indices: Tensor,
    starts: Sequence[int],
    sizes: Sequence[int],
    whole: Sequence[int],
) -> Tensor:
    """The gradient of a part of a plane, from gradients of maxima, by their indices in the plane.

    The part has `sizes` from `starts` on in the `whole` plane; the last dims are spatial.
    """
    space = len(sizes)
    batch = grad_out.shape[:-space]
    shifted = [
        coordinate - start
        for coordinate, start in zip(_coordinates(indices, whole), starts, strict=True)
    ]
    inside = torch.ones_like(indices, dtype=torch.bool)
    for coordinate, size in zip(shifted, sizes, strict=True):
        inside &= (coordinate >= 0) & (coordinate < size)
    places = torch.where(inside, _flat(shifted, sizes), 0).flatten(-space)
    added = torch.where(inside, grad_out, 0).flatten(-space)
    part = grad_out.new_zeros([*batch, math.prod(sizes)])
    return part.scatter_add_(-1, places, added).view([*batch, *sizes])


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


@operator(lambda x, _mode, output_size, *_: x.new_empty([*x.shape[:2], *output_size]))
def upsample(
    x: Tensor, mode: str, output_size: Sequence[int], align_corners: bool, scales: Sequence[float]
) -> Tensor:
    """The spatial dims resized; `scales` sets the grid's factors, empty for those of the sizes."""
    kernel = getattr(torch.ops.aten, KERNELS[mode, len(output_size)]).default
    resized: Tensor = kernel(x, output_size, *_settings(mode, output_size, align_corners, scales))
    return resized


@operator(lambda grad_out, _mode, _output, input_size, *_: grad_out.new_empty([*input_size]))
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


@gradient("upsample", _save)
def _gradient(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    grad = torch.ops.partitioner.upsample_backward(
        grad_out, ctx.mode, ctx.output_size, ctx.input_size, ctx.align_corners, ctx.scales
    )
    return grad, None, None, None, None
