"""Refuses tensors of a module that lie in one memory, where an optimizer writes to one of them.

Ranks hold each tensor by itself: in the module a write to one is a write to the others, on ranks it
is not. (What the forward pass itself writes, PyTorch's trace tells: see `capture`.)
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from partitioner.backends.torch.state.buffers import extent
from partitioner.backends.torch.state.initialise import without_contents
from partitioner.frontends.errors import FrontendError


def check_memory_apart(tensors: Mapping[str, Tensor], written: Collection[str]) -> None:
    """Refuse, by name, two tensors with a common element, one of which a step writes to."""
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
    """Pairs of tensors in one memory, where one begins between the other's first and last byte."""
    by_memory: dict[int, list[tuple[range, int, str]]] = {}
    for order, (name, tensor) in enumerate(tensors.items()):
        if tensor.layout is torch.strided and tensor.numel():
            memory, span = _place_of(tensor)
            by_memory.setdefault(memory, []).append((span, order, name))
    for places in by_memory.values():
        places.sort(key=lambda place: place[0].start)
        for at, (span, order, name) in enumerate(places):
            for other_span, other_order, other in itertools.islice(places, at + 1, None):
                if other_span.start >= span.stop:
                    break
                yield (name, other) if order < other_order else (other, name)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Test whether tensors in one memory whose bytes meet have an element in common."""
    (_, first), (_, second) = _place_of(one), _place_of(other)
    is_dense = all(
        x.numel() * x.element_size() == len(span) for x, span in ((one, first), (other, second))
    )
    item, start = one.element_size(), min(first.start, second.start)
    if is_dense or item != other.element_size() or (first.start - second.start) % item:
        return True
    end = (max(first.stop, second.stop) - start) // item
    counts = torch.zeros(end, dtype=torch.int8)  # of the tensors that have each element
    for tensor, span in ((one, first), (other, second)):
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        sizes = [size if stride else 1 for size, stride in dims]
        marks = torch.zeros(end, dtype=torch.int8)
        marks.as_strided(sizes, tensor.stride(), (span.start - start) // item).fill_(1)
        counts += marks
    return bool((counts == 2).any())


def _place_of(tensor: Tensor) -> tuple[int, range]:
    """The memory (0, or the storage of a tensor without address) and bytes of a tensor."""
    address = 0 if without_contents(tensor) else tensor.data_ptr()
    start = address or tensor.storage_offset() * tensor.element_size()
    memory = 0 if address else tensor.untyped_storage()._cdata
    return memory, range(start, start + extent(tensor))
