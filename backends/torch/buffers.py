"""Writing the next contents of buffers over the contents that a step began with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor


def write_buffers(buffers: Mapping[str, Tensor], contents: Mapping[str, Tensor]) -> None:
    """Write the next contents of some buffers, which may be views of any buffers, over them."""
    written = memory_of(buffers[name] for name in contents)
    apart = {name: without_views(tensor, written) for name, tensor in contents.items()}
    with torch.no_grad():
        for name, tensor in apart.items():
            buffers[name].copy_(tensor)


def memory_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Where the memory begins that some tensors are views of."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def without_views(tensor: Tensor, written: Collection[int]) -> Tensor:
    """The tensor, or a copy if it is a view of memory (see `memory_of`) that is written over."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() in written else tensor
