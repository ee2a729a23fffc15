"""Dropout and uniform numbers from one seed, alike for every cut (see `draws` for the rule).

With y the number of an element, dropout keeps it if ``y >= p * 2**32 - 2**31``. Its uniform number
is ``(y >> (32 - bits)) * 2**-bits + 1/2``, with as many bits as the element type holds exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from partitioner.backends.torch.operators.draws import Part, draw, part_of, whole_of
from partitioner.backends.torch.operators.registry import operator

#: Bits of a uniform number: more would round to 1.
BITS: Mapping[torch.dtype, int] = {
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float32: 24,
    torch.float64: 32,
}

_PART = "int[] pieces, int[] starts, int[] lengths"


def kept(part: Part, seed: torch.Tensor, p: float, index: int) -> torch.Tensor:
    """Which elements of a part are kept: ``(rows, columns)``."""
    mask = torch.zeros([len(dim) for dim in part], dtype=torch.bool, device=part[0].device)
    if p < 1:
        limit = min(round(p * 2**32) - 2**31, 2**31 - 1)
        draw(part, seed, index, mask, lambda y, out: torch.ge(y, limit, out=out))
    return mask


def _dropped(
    x: torch.Tensor, part: Part, seed: torch.Tensor, p: float, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = kept(part, seed, p, index).view(x.shape)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    found: torch.Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
    return found, mask


def _dropout_fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return torch.empty_like(x), mask


@operator("dropout(Tensor x, Tensor seed, float p, int index) -> (Tensor, Tensor)", _dropout_fake)
def dropout(
    x: torch.Tensor, seed: torch.Tensor, p: float, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x where it is kept, over the share that is kept; the mask)."""
    return _dropped(x, whole_of(x.shape, x.device), seed, p, index)


@operator(
    f"dropout_part(Tensor x, Tensor seed, float p, int index, int[] shape, {_PART})"
    " -> (Tensor, Tensor)",
    _dropout_fake,
)
def dropout_part(
    x: torch.Tensor,
    seed: torch.Tensor,
    p: float,
    index: int,
    shape: Sequence[int],
    pieces: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`dropout` of a part of a tensor of that shape."""
    part = part_of(shape, pieces, starts, lengths, x.device)
    return _dropped(x, part, seed, p, index)


def _drawn(part: Part, seed: torch.Tensor, index: int, dtype: torch.dtype) -> torch.Tensor:
    bits = BITS[dtype]
    made = torch.empty([len(dim) for dim in part], dtype=dtype, device=seed.device)

    def write(y: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(y >> (32 - bits)).mul_(2.0**-bits).add_(0.5)

    draw(part, seed, index, made, write)
    return made


def _uniform_fake(
    seed: torch.Tensor,
    index: int,  # noqa: ARG001 - the operator's signature
    size: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty(list(size), dtype=dtype, device=seed.device)


@operator("uniform(Tensor seed, int index, int[] size, ScalarType dtype) -> Tensor", _uniform_fake)
def uniform(
    seed: torch.Tensor, index: int, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Uniform numbers from 0 (may occur) to 1 (does not)."""
    return _drawn(whole_of(size, seed.device), seed, index, dtype).view(list(size))


def _part_fake(
    seed: torch.Tensor,
    index: int,  # noqa: ARG001 - the operator's signature
    size: Sequence[int],  # noqa: ARG001
    dtype: torch.dtype,
    pieces: Sequence[int],
    starts: Sequence[int],  # noqa: ARG001
    lengths: Sequence[int],
) -> torch.Tensor:
    return torch.empty(_local(pieces, lengths), dtype=dtype, device=seed.device)


def _local(pieces: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Sizes of a part."""
    left = iter(lengths)
    return [sum(next(left) for _ in range(count)) for count in pieces]


@operator(
    f"uniform_part(Tensor seed, int index, int[] size, ScalarType dtype, {_PART}) -> Tensor",
    _part_fake,
)
def uniform_part(
    seed: torch.Tensor,
    index: int,
    size: Sequence[int],
    dtype: torch.dtype,
    pieces: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
) -> torch.Tensor:
    """The numbers of a part of a tensor of that size."""
    part = part_of(size, pieces, starts, lengths, seed.device)
    return _drawn(part, seed, index, dtype).view(_local(pieces, lengths))
