"""Writes of rows to a part of a tensor, as of new keys and values to a cache that is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import operator
from partitioner.backends.torch.operators.vocabulary import check_ids, local_places


@operator(
    "index_write_part(Tensor data, Tensor index, Tensor source, int dim, bool from_end, int size, "
    "int[] starts, int[] lengths) -> Tensor",
    lambda data, *_: torch.empty_like(data),
)
def index_write_part(data: Tensor, *rows: Any) -> Tensor:
    """The part with rows of the source at those positions that lie in it, as `write_part` does."""
    return write_part(data.clone(), *rows)


def write_part(
    data: Tensor,
    index: Tensor,
    source: Tensor,
    dim: int,
    from_end: bool,
    size: int,
    starts: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    """Write rows of the source to a part, at those positions that lie in it; returns the part.

    No position waits for the device: one outside the part writes again what the last one inside
    writes or, if none is inside, what is there.

    Args:
        data: The part, which is written to.
        index: Positions in the whole dim.
        source: The rows; they broadcast to one for each position.
        dim: The dim that is written.
        from_end: Whether negative positions count from the end; they are out of range otherwise.
        size: Size of the whole dim.
        starts: First position of each piece of the part.
        lengths: Positions of each piece.
    """
    wanted = (torch.where(index < 0, index + size, index) if from_end else index).long()
    check_ids(wanted, size, "index of a write")
    shape = [*data.shape]
    if not shape[dim] or not index.numel():
        return data
    shape[dim] = index.numel()
    places, inside = local_places(wanted, starts, lengths)
    order = torch.arange(index.numel(), device=index.device)
    last = torch.where(inside, order, 0).amax()
    chosen = torch.where(inside, order, last)
    places = places[chosen]
    there = data.index_select(dim, places)
    rows = source.expand(shape).index_select(dim, chosen)
    return data.index_copy_(dim, places, torch.where(inside.any(), rows, there))
