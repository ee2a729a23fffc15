"""Parts of whole tensors by rank, and whole tensors of parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from partitioner.backends.errors import BackendError
from partitioner.backends.regions import region_shape, write_region
from partitioner.ir.exchange import Region
from partitioner.ir.layout import Placement


def part_of(whole: torch.Tensor, region: Region | None) -> torch.Tensor:
    """The region of a tensor, dense; the tensor itself for None."""
    if region is None:
        return whole
    part = whole
    for dim, intervals in enumerate(region):
        if intervals == ((0, whole.shape[dim]),):
            continue
        pieces = [part.narrow(dim, start, length) for start, length in intervals]
        part = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return part.contiguous()


def region_on(at: Placement, rank: int) -> Region:
    """Which part of a value a rank of its placement holds."""
    return dict(at.parts())[rank]


def whole_of(
    parts: Iterable[tuple[Region | None, torch.Tensor]], shape: tuple[int, ...]
) -> torch.Tensor:
    """The tensor that parts make up; parts may be held several times.

    Raises:
        BackendError: The parts leave a gap.
    """
    whole: torch.Tensor | None = None
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
