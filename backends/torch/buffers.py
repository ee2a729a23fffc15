"""Writing the next contents of buffers over the contents that a step began with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


def write_buffers(buffers: Mapping[str, Tensor], contents: Mapping[str, Tensor]) -> None:
    """Write the next contents of some buffers, which may be views of any buffers, over them.

    Contents that were written in place lie there already.
    """
    contents = {n: tensor for n, tensor in contents.items() if not _is_same(tensor, buffers[n])}
    written = {memory_of(buffers[name]) for name in contents}
    apart = {name: without_views(tensor, written) for name, tensor in contents.items()}
    with torch.no_grad():
        for name, tensor in apart.items():
            buffers[name].copy_(tensor)


def memory_of(tensor: Tensor) -> int:
    """The address where the memory begins that a tensor is a view of."""
    return tensor.untyped_storage().data_ptr()


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same elements of the same memory."""
    places = [(x.data_ptr(), x.shape, x.stride(), x.dtype) for x in (a, b)]
    return places[0] == places[1]


def without_views(tensor: Tensor, written: Collection[int]) -> Tensor:
    """The tensor, or a copy if it is a view of memory (see `memory_of`) that is written over."""
    return tensor.clone() if memory_of(tensor) in written else tensor
