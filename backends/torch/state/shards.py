"""Shards of whole tensors by rank, and whole tensors of shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from partitioner.backends.errors import BackendError
from partitioner.backends.regions import packed, region_shape, view_within, write_region
from partitioner.ir.exchange import Region
from partitioner.ir.layout import Placement


def part_of(whole: Tensor, region: Region | None) -> Tensor:
    """The region of a tensor, dense; the tensor itself for None."""
    return whole if region is None else packed(whole, region)


def region_within(inner: Placement, outer: Placement, rank: int) -> Region | None:
    """Where a rank's part of a placement lies in its part of another; None if it does not."""
    region: list[tuple[tuple[int, int], ...]] = []
    for of_inner, of_outer in zip(region_on(inner, rank), region_on(outer, rank), strict=True):
        if len(of_outer) != 1:
            return None
        ((begin, size),) = of_outer
        if any(not begin <= start <= start + length <= begin + size for start, length in of_inner):
            return None
        region.append(tuple((start - begin, length) for start, length in of_inner))
    return tuple(region)


def region_on(placement: Placement, rank: int) -> Region:
    """The region of a value that a rank of its placement holds."""
    return dict(placement.parts())[rank]


def part_and_rest(
    whole: Tensor, place: Placement, home: Placement, rank: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Copy a rank's part of a whole value, and what it keeps of it between steps.

    It has its `place` while a step runs, its `home` between steps. The part is a view of what is
    kept if it can be; what is kept is None if that is the part.
    """
    part = _copy_of(whole, place, rank, device)
    if home == place:
        return part, None
    kept = _copy_of(whole, home, rank, device)
    view = view_within(kept, region_within(place, home, rank))
    return part if view is None else view, kept.detach()


def _copy_of(whole: Tensor, place: Placement, rank: int, device: torch.device) -> Tensor:
    """Copy a rank's part of a whole value into memory of its own."""
    part = part_of(whole.detach(), region_on(place, rank)).to(device)
    is_shared = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return part.clone() if is_shared else part


def whole_of(parts: Iterable[tuple[Region | None, Tensor]], shape: tuple[int, ...]) -> Tensor:
    """The tensor that parts make up without a gap; replicas of a part may be among them."""
    whole: Tensor | None = None
    seen: set[Region] = set()
    count = 0
    for region, part in parts:
        if region is None:
            return part
        if region in seen:
            continue
        seen.add(region)
        if whole is None:
            whole = part.new_empty(shape)
        write_region(whole, region, part.reshape(region_shape(region)))
        count += part.numel()
    if whole is None or count != whole.numel():
        raise BackendError(f"parts have {count} elements, the whole tensor of {shape} more")
    return whole


def gathered_value(
    shard: Tensor | None,
    holders: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A stored value, whole on every rank, of the shards of its `holders`; all must call it."""
    full: Tensor | None = None
    if shard is not None:
        tensor = shard.detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if len(holders) == dist.get_world_size():
        assert full is not None
        return full
    first = min(holders)
    if full is None or dist.get_rank() != first:
        full = torch.empty(tuple(shape), dtype=dtype, device=device)
    if full.numel():
        dist.broadcast(full.contiguous().view(-1).view(torch.uint8), src=first)
    return full


def total_norm(tensors: Iterable[Tensor], order: float, device: torch.device) -> Tensor:
    """The float64 norm of all ranks' tensors, each counted as often as given; all must call it."""
    norms = [
        torch.linalg.vector_norm(x, order, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in tensors
    ]
    local = torch.zeros(1, dtype=torch.float64, device=device)
    if norms:
        local[0] = torch.linalg.vector_norm(torch.stack([x.double() for x in norms]), order)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    norm: Tensor = torch.linalg.vector_norm(torch.cat(gathered), order)
    return norm
