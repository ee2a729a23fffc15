"""Stored values and norms of the whole model, whichever ranks the parts of it lie on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from partitioner.ir.layout import Placement


def whole_value(
    held: torch.Tensor | None,
    holders: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A stored value on every rank; all ranks must call it.

    Args:
        held: This rank's DTensor; None if it has no part of it.
        holders: Ranks that have one.
        shape: Sizes of all of it.
        dtype: Of its elements.
        device: Where ranks compute.
    """
    full: torch.Tensor | None = None
    if held is not None:
        part = held.detach()
        assert isinstance(part, DTensor)
        full = part.full_tensor()
    if len(holders) == dist.get_world_size():
        assert full is not None
        return full
    first = min(holders)
    if full is None or dist.get_rank() != first:
        full = torch.empty(tuple(shape), dtype=dtype, device=device)
    if full.numel():
        dist.broadcast(full.contiguous().view(-1).view(torch.uint8), src=first)
    return full


def counts(at: Placement, rank: int) -> bool:
    """Whether a rank is the first one of those that hold the same part of a value as it."""
    parts = dict(at.parts())
    return rank == min(other for other, region in parts.items() if region == parts[rank])


def total_norm(tensors: Iterable[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The norm of what all ranks have; all ranks must call it.

    Args:
        tensors: This rank's; what several ranks have counts several times.
        order: Of the norm.
        device: Where ranks compute.

    Returns:
        The same float64 scalar on all ranks.
    """
    norms = [
        torch.linalg.vector_norm(one, order, dtype=torch.promote_types(one.dtype, torch.float32))
        for one in tensors
    ]
    own = torch.zeros(1, dtype=torch.float64, device=device)
    if norms:
        own[0] = torch.linalg.vector_norm(torch.stack([one.double() for one in norms]), order)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    found: torch.Tensor = torch.linalg.vector_norm(torch.cat(every), order)
    return found
