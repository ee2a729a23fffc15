"""Reading and writing regions (products of interval lists) of NumPy arrays and torch tensors."""

from __future__ import annotations

import itertools
from functools import lru_cache
from types import EllipsisType
from typing import Any, TypeVar

import numpy as np

from partitioner.ir.exchange import Region
from partitioner.ir.layout import Interval

#: A NumPy array or a torch tensor: both index and assign by slices in the same way.
ArrayT = TypeVar("ArrayT", bound=Any)
Index = tuple[slice | EllipsisType, ...]


def region_shape(region: Region) -> tuple[int, ...]:
    """Sizes of a region packed densely.

    >>> region_shape((((0, 2), (5, 1)), ((0, 4),)))
    (3, 4)
    """
    return tuple(sum(length for _, length in intervals) for intervals in region)


def whole_region(shape: tuple[int, ...]) -> Region:
    """The region that is all of a tensor."""
    return tuple(((0, size),) for size in shape)


def is_whole(region: Region | None, shape: tuple[int, ...]) -> bool:
    """Test whether a region is all of a tensor, in its own order."""
    return region is None or (
        region_shape(region) == shape
        and all(start == at for intervals in region for start, _, at in _placed(intervals))
    )


@lru_cache(maxsize=1024)  # each call of a rank takes the same parts
def boxes(region: Region) -> tuple[tuple[Index, Index], ...]:
    """The contiguous boxes of a region: (index in the tensor, index in the packed part)."""
    found: list[tuple[Index, Index]] = []
    for box in itertools.product(*map(_placed, region)):
        tensor = tuple(slice(start, start + length) for start, length, _ in box)
        packed = tuple(slice(at, at + length) for _, length, at in box)
        found.append(((*tensor, ...), (*packed, ...)))
    return tuple(found)


def _placed(intervals: tuple[Interval, ...]) -> list[tuple[int, int, int]]:
    """(start, length, start in the packed part) of each interval."""
    placed, at = [], 0
    for start, length in intervals:
        placed.append((start, length, at))
        at += length
    return placed


def box_view(tensor: ArrayT, region: Region) -> ArrayT | None:
    """A view of a region that is one box; None if it is several."""
    found = boxes(region)
    return tensor[found[0][0]] if len(found) == 1 else None


def read_region(tensor: ArrayT, region: Region, part: ArrayT) -> None:
    """Copy a region of `tensor` into the packed `part` (written in place)."""
    for index, packed in boxes(region):
        part[packed] = tensor[index]


def write_region(tensor: ArrayT, region: Region, part: ArrayT) -> None:
    """Copy the packed `part` into a region of `tensor` (written in place)."""
    for index, packed in boxes(region):
        tensor[index] = part[packed]


def cut(array: np.ndarray, region: Region | None) -> np.ndarray:
    """A region of an array: a view where it is one box, a packed copy elsewhere."""
    if region is None:
        return array
    view = box_view(array, region)
    if view is not None:
        return view
    part = np.empty(region_shape(region), array.dtype)
    read_region(array, region, part)
    return part


def packed(tensor: ArrayT, region: Region) -> ArrayT:
    """A region of a torch tensor, dense: a view if it lies together in memory."""
    view = box_view(tensor, region)
    if view is not None:
        dense: ArrayT = view.contiguous()
        return dense
    part: ArrayT = tensor.new_empty(region_shape(region))
    read_region(tensor, region, part)
    return part


def view_within(tensor: ArrayT, region: Region | None) -> ArrayT | None:
    """A dense view of a region of a torch tensor; None if there is none."""
    view = None if region is None else box_view(tensor, region)
    return view if view is not None and view.is_contiguous() else None
