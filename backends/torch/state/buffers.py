"""Writing over tensors in place: buffers get their next contents, gradients become others' sums."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from itertools import pairwise

import torch
from torch import Tensor


def write_buffers(buffers: Mapping[str, Tensor], contents: Mapping[str, Tensor]) -> None:
    """Write contents over buffers, views of any buffers or not, unless they lie there already."""

    def place(x: Tensor) -> tuple[object, ...]:
        return x.data_ptr(), x.shape, x.stride(), x.dtype

    contents = {n: x for n, x in contents.items() if place(x) != place(buffers[n])}
    written = {memory_of(buffers[name]) for name in contents}
    apart = {name: without_views(tensor, written) for name, tensor in contents.items()}
    with torch.no_grad():
        for name, tensor in apart.items():
            buffers[name].copy_(tensor)


def memory_of(tensor: Tensor) -> int:
    """The address where the memory begins that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def without_views(tensor: Tensor, written: Collection[int]) -> Tensor:
    """The tensor, or a copy if it is a view of memory (see `memory_of`) that is written over."""
    return tensor.clone() if memory_of(tensor) in written else tensor


def apart(tensors: Mapping[str, Tensor], others: Collection[Tensor] = ()) -> dict[str, Tensor]:
    """The tensors, so that one can be written to without the rest, by name.

    One that has memory of one before it, or of `others`, is copied. Parameters that are added
    together have one gradient.
    """
    taken = sorted([(x.data_ptr(), extent(x)) for x in (*others, *tensors.values())])
    if all(start + size <= behind for (start, size), (behind, _) in pairwise(taken)):
        return dict(tensors)
    ends: dict[int, int] = {}  # of what is written to, by its address
    starts: list[int] = []  # ascending

    def own(tensor: Tensor) -> Tensor:
        start = tensor.data_ptr()
        end = start + extent(tensor)
        place = bisect_left(starts, end)
        if place and start < end and ends[starts[place - 1]] > start:
            return tensor.clone()
        if start < end:
            starts.insert(place, start)
            ends[start] = end
        return tensor

    for other in others:
        own(other)
    return {name: own(tensor) for name, tensor in tensors.items()}


def extent(tensor: Tensor) -> int:
    """Bytes from its first element in memory to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
