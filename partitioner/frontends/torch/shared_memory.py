"""Refuses tensors of a module that lie in one memory, where an optimizer writes to one of them.

A trace tells tensors from each other by identity, and ranks hold each by itself: in the module a
write to one of them is a write to the others, on ranks it is not. (What the forward pass itself
writes, PyTorch's trace tells: see `capture`.)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from partitioner.frontends.errors import FrontendError


def check_memory_apart(tensors: Mapping[str, Tensor], written: Collection[str]) -> None:
    """Refuse two tensors with an element in common, one of which a step writes to.

    Args:
        tensors: Parameters, buffers and other tensors of a module.
        written: Names of those that a step writes to.

    Raises:
        FrontendError: There are two such tensors; the message names them.
    """
    for one, other in _meeting(tensors):
        if tensors[one] is tensors[other] or {one, other}.isdisjoint(written):
            continue
        if _overlap(tensors[one], tensors[other]):
            raise FrontendError(
                f"{other} lies in the memory of {one} and is another tensor, so that what a step "
                f"writes to {one if one in written else other} would not reach the other on ranks: "
                "give one parameter or buffer both names (a.weight = b.weight, not .data), compute "
                "one from the other in forward, or clone() one of them"
            )


def _meeting(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of tensors of one storage, where one begins between the other's first and last byte."""
    by_storage: dict[int, list[tuple[range, int, str]]] = {}
    for order, (name, tensor) in enumerate(tensors.items()):
        if tensor.layout is torch.strided and tensor.numel():
            storage = tensor.untyped_storage()._cdata
            by_storage.setdefault(storage, []).append((_bytes_of(tensor), order, name))
    for places in by_storage.values():
        places.sort(key=lambda place: place[0].start)
        for at, (span, order, name) in enumerate(places):
            for other_span, other_order, other in itertools.islice(places, at + 1, None):
                if other_span.start >= span.stop:
                    break
                yield (name, other) if order < other_order else (other, name)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage whose bytes meet have an element in common."""
    first, second = _bytes_of(one), _bytes_of(other)
    is_dense = all(x.numel() * x.element_size() == len(_bytes_of(x)) for x in (one, other))
    if is_dense or one.element_size() != other.element_size():
        return True
    end = max(first.stop, second.stop) // one.element_size()
    return bool((_elements(one, end) & _elements(other, end)).any())


def _bytes_of(tensor: Tensor) -> range:
    """The bytes of the storage from a tensor's first element to its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start, item = tensor.storage_offset(), tensor.element_size()
    return range(start * item, (start + last + 1) * item)


def _elements(tensor: Tensor, end: int) -> Tensor:
    """Which of the first `end` elements of its storage a tensor has."""
    marks = torch.zeros(end, dtype=torch.bool)
    sizes = [
        size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    marks.as_strided(sizes, tensor.stride(), tensor.storage_offset()).fill_(True)
    return marks
