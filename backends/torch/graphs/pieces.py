"""Parts of tensors in graphs: reading a region of one, and assembling one of parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from partitioner.backends.regions import boxes, is_whole, region_shape
from partitioner.ir.exchange import Region

aten = torch.ops.aten


def take(graph: fx.Graph, tensor: fx.Node, region: Region, shape: tuple[int, ...]) -> fx.Node:
    """The region of a tensor of this shape, as views and, where it has gaps, a copy."""
    for dim, intervals in enumerate(region):
        if is_whole((intervals,), (shape[dim],)):
            continue
        slices = [
            graph.call_function(aten.slice.Tensor, (tensor, dim, start, start + length))
            for start, length in intervals or ((0, 0),)
        ]
        tensor = (
            slices[0] if len(slices) == 1 else graph.call_function(aten.cat.default, (slices, dim))
        )
    return tensor


def join(
    graph: fx.Graph, parts: Sequence[tuple[Region, fx.Node]], shape: tuple[int, ...]
) -> fx.Node:
    """The tensor of this shape whose regions are the parts, which tile it."""
    if len(parts) == 1 and is_whole(parts[0][0], shape):
        return parts[0][1]
    dim = _stacked(parts, shape)
    if dim is not None:
        ordered = sorted(parts, key=lambda part: part[0][dim][0][0])
        return graph.call_function(aten.cat.default, ([part for _, part in ordered], dim))
    regions = tuple(region for region, _ in parts)
    tensors = [part for _, part in parts]
    return graph.call_function(assemble, (tensors, regions, shape))


def _stacked(parts: Sequence[tuple[Region, fx.Node]], shape: tuple[int, ...]) -> int | None:
    """The dim along which parts without gaps make up the tensor; None if there is none."""
    split = {
        dim
        for region, _ in parts
        for dim, intervals in enumerate(region)
        if not is_whole((intervals,), (shape[dim],))
    }
    if len(split) != 1:
        return None
    (dim,) = split
    return dim if all(len(region[dim]) == 1 for region, _ in parts) else None


def assemble(parts: Sequence[Tensor], regions: Sequence[Region], shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape with each part written to its region."""
    whole = parts[0].new_empty(shape)
    for part, region in zip(parts, regions, strict=True):
        dense = part.reshape(region_shape(region))
        for index, packed in boxes(region):
            whole[index] = dense[packed]
    return whole
