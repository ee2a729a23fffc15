"""Pools of a part of a plane: the indices of maxima count inside the whole plane."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import operator

Pair = tuple[Tensor, Tensor]


def _flat_pads(pads: Sequence[int]) -> list[int]:
    """Pads of `constant_pad_nd`, last dim first, from all befores and then all afters."""
    space = len(pads) // 2
    return [pads[dim + side] for dim in reversed(range(space)) for side in (0, space)]


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


def _least(x: Tensor) -> float | int:
    return -float("inf") if x.is_floating_point() else torch.iinfo(x.dtype).min


def _max_pool_fake(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    *_: object,
) -> Pair:
    space = len(kernel_size)
    sizes = [
        (size + before + after - (kernel - 1) * step - 1) // move + 1
        for size, before, after, kernel, step, move in zip(
            x.shape[-space:], pads[:space], pads[space:], kernel_size, dilation, stride, strict=True
        )
    ]
    shape = [*x.shape[:-space], *sizes]
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@operator(
    "max_pool_part(Tensor x, SymInt[] kernel_size, SymInt[] stride, SymInt[] dilation,"
    " SymInt[] pads, SymInt[] starts, SymInt[] whole) -> (Tensor, Tensor)",
    _max_pool_fake,
)
def max_pool_part(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    starts: Sequence[int],
    whole: Sequence[int],
) -> Pair:
    """Maxima of windows over a part of a plane, and their indices in the whole plane.

    Args:
        x: The part; its last dims are spatial, as many as `kernel_size` has.
        kernel_size: Points of the window in each dim.
        stride: Elements from one window to the next.
        dilation: Elements from one point to the next.
        pads: Padding before each dim, then after each.
        starts: First element of the part in the whole plane.
        whole: Sizes of the whole plane.
    """
    space = len(kernel_size)
    sizes = x.shape[-space:]
    padded = torch.constant_pad_nd(x, _flat_pads(pads), _least(x)) if any(pads) else x
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
    "max_pool_grad_part(Tensor grad_out, Tensor indices, SymInt[] starts, SymInt[] sizes,"
    " SymInt[] whole) -> Tensor",
    lambda grad_out, _indices, _starts, sizes, _whole: grad_out.new_empty(
        [*grad_out.shape[: -len(sizes)], *sizes]
    ),
)
def max_pool_grad_part(
    grad_out: Tensor,
    indices: Tensor,
    starts: Sequence[int],
    sizes: Sequence[int],
    whole: Sequence[int],
) -> Tensor:
    """The gradient of a part of a plane, from gradients of maxima, by their indices in the plane.

    Args:
        grad_out: Gradients; their last dims are spatial, as many as `sizes` has.
        indices: Index of each maximum in the whole plane.
        starts: First element of the part in the whole plane.
        sizes: Sizes of the part.
        whole: Sizes of the whole plane.
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
