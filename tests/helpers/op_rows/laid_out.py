"""Tensors of the same contents with other strides, as shards and views have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Lay = Callable[[Tensor], Tensor]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def sliced(x: Tensor) -> Tensor:
    """A part of a larger tensor: gaps between rows."""
    if not x.dim():
        return x
    whole = x.new_ones([size + 3 for size in x.shape])
    return whole[tuple(slice(1, 1 + size) for size in x.shape)].copy_(x)


def every_second(x: Tensor) -> Tensor:
    """Every second element of a larger tensor: gaps in rows too."""
    if not x.dim():
        return x
    whole = x.new_ones([2 * size + 3 for size in x.shape])
    return whole[tuple(slice(1, 1 + 2 * size, 2) for size in x.shape)].copy_(x)


def transposed(x: Tensor) -> Tensor:
    """The last dim outermost in memory."""
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


def channels_last(x: Tensor) -> Tensor:
    """Channels last, for images and volumes."""
    return x.contiguous(memory_format=CHANNELS_LAST.get(x.dim(), torch.contiguous_format))


def sliced_channels_last(x: Tensor) -> Tensor:
    """A part of a larger tensor that has its channels last."""
    if x.dim() not in CHANNELS_LAST:
        return x
    whole = x.new_ones([size + 2 for size in x.shape]).contiguous(
        memory_format=CHANNELS_LAST[x.dim()]
    )
    return whole[tuple(slice(1, 1 + size) for size in x.shape)].copy_(x)


def stretched(x: Tensor) -> Tensor:
    """Dims whose elements are all equal, without strides: expanded tensors."""
    for dim in range(x.dim()):
        if x.shape[dim] > 1 and torch.equal(x, x.narrow(dim, 0, 1).expand_as(x)):
            x = x.narrow(dim, 0, 1).expand(x.shape)
    return x


#: Layouts that keep contents, by name.
LAYOUTS: Mapping[str, Lay] = {
    lay.__name__: lay
    for lay in (
        *(sliced, every_second, transposed, channels_last, sliced_channels_last),
        stretched,
    )
}


def expanded(x: Tensor, dim: int) -> Tensor:
    """Other contents: the first element of a dim in place of all."""
    if x.dim() <= dim or not x.shape[dim]:
        return x
    return x.narrow(dim, 0, 1).expand(x.shape)
