"""Dropout and uniform numbers that are a pure function of seed, node and position in the tensor.

The rule, the same on every device and for every sharding. Let an element of the whole tensor lie at
column c of row r (row-major order; a row is the last dim). With 64-bit arithmetic that wraps,
``mix`` the finaliser of SplitMix64 and the constants below:

* ``key(r) = mix(mix(r * ROW + index * NODE) + mix(seed * SEED))``, of which ``low`` and ``high``
  are the two halves, and ``place(c)`` is the lower half of ``mix(c * COLUMN + 1)``;
* ``x = (place(c) ^ low(r)) * FIRST``, ``y = (x ^ (x >> 15)) * SECOND + high(r)`` in 32 bits with
  signs (the shift keeps the sign). The element's number is y; each of the 2**32 is equally likely.

So a rank draws the numbers of its shard only, and one process draws the same numbers. Dropout keeps
an element if ``y >= p * 2**32 - 2**31``. Its uniform number is ``(y >> (32 - bits)) * 2**-bits +
1/2``, with as many bits as the element type holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from partitioner.backends.torch.operators.registry import operator

ROW, NODE, SEED, COLUMN = (
    value - (1 << 64)  # as signed 64-bit numbers
    for value in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5, 0xC2B2AE3D27D4EB4F)
)
FIRST, SECOND = 0x85EBCA6B - (1 << 32), 0x297A2D39  #: Odd: products are one to one.
#: Elements whose 32-bit numbers stay in a core's cache while they are mixed.
CHUNK = 1 << 15
#: Bits of a uniform number: more would round to 1.
BITS: Mapping[torch.dtype, int] = {
    torch.bfloat16: 8,
    torch.float16: 11,
    torch.float32: 24,
    torch.float64: 32,
}

Part = tuple[Tensor, Tensor]  #: Indices of the rows and of the columns of a shard.
_PART = "int[] pieces, int[] starts, int[] lengths"


# Numbers -----------------------------------------------------------------------------------------


def _draw(
    part: Part, seed: Tensor, index: int, out: Tensor, write: Callable[[Tensor, Tensor], object]
) -> None:
    """Draw a shard's numbers, which `write` writes to blocks of `out`, and may overwrite."""
    rows, columns = part
    node = (index * NODE + (1 << 63)) % (1 << 64) - (1 << 63)  # as a signed 64-bit number
    key = _mix(_mix(rows * ROW + node) + _mix(seed * SEED))
    low, high = _half(key).unsqueeze(1), _half(_shifted(key, 32)).unsqueeze(1)
    place = _half(_mix(columns * COLUMN + 1))
    # in blocks of the size of a CPU's cache; on other devices all at once
    size = max(len(rows) * len(columns), 1)
    block = CHUNK * torch.get_num_threads() if rows.device.type == "cpu" else size
    width = max(min(len(columns), block), 1)
    height = max(block // width, 1)
    for top in range(0, len(rows), height):
        for left in range(0, len(columns), width):
            tall, wide = slice(top, top + height), slice(left, left + width)
            x = place[wide] ^ low[tall]
            x.mul_(FIRST)
            x.bitwise_xor_(x >> 15).mul_(SECOND).add_(high[tall])
            write(x, out[tall, wide])


def _part_of(
    shape: Sequence[int],
    pieces: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    device: torch.device,
) -> Part:
    """A shard of a tensor: dim i has `pieces[i]` pieces, each of a start and a length."""
    intervals = zip(starts, lengths, strict=True)
    dims = []
    for count in pieces:
        runs = [
            torch.arange(start, start + length, device=device)
            for start, length in islice(intervals, count)
        ]
        dims.append(torch.cat(runs) if runs else torch.arange(0, device=device))
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    *outer, columns = dims or [rows]
    for size, places in zip(shape, outer, strict=False):
        rows = (rows.unsqueeze(1) * size + places).reshape(-1)
    return rows, columns


def whole_of(shape: Sequence[int], device: torch.device) -> Part:
    """All of a tensor."""
    return _part_of(shape, [1] * len(shape), [0] * len(shape), shape, device=device)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _half(x: Tensor) -> Tensor:
    """The lower 32 bits as a signed number."""
    signed = ((x + (1 << 31)) & ((1 << 32) - 1)) - (1 << 31)
    return signed.to(torch.int32)


# Operators ---------------------------------------------------------------------------------------


def kept(part: Part, seed: Tensor, p: float, index: int) -> Tensor:
    """Mask of the elements of a shard that are kept, (rows, columns)."""
    mask = torch.zeros([len(dim) for dim in part], dtype=torch.bool, device=part[0].device)
    if p < 1:
        limit = min(round(p * 2**32) - 2**31, 2**31 - 1)
        _draw(part, seed, index, mask, lambda y, out: torch.ge(y, limit, out=out))
    return mask


def _dropped(x: Tensor, part: Part, seed: Tensor, p: float, index: int) -> tuple[Tensor, Tensor]:
    mask = kept(part, seed, p, index).view(x.shape)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    scaled: Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
    return scaled, mask


def _dropout_fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(x.shape, dtype=torch.bool, device=x.device)


@operator(_dropout_fake)
def dropout(x: Tensor, seed: Tensor, p: float, index: int) -> tuple[Tensor, Tensor]:
    """(x where it is kept, over the share that is kept; the mask)."""
    return _dropped(x, whole_of(x.shape, x.device), seed, p, index)


@operator(
    _dropout_fake,
    f"dropout_part(Tensor x, Tensor seed, float p, int index, int[] shape, {_PART})"
    " -> (Tensor, Tensor)",
)
def dropout_part(
    x: Tensor, seed: Tensor, p: float, index: int, *part: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`dropout` of a shard of a tensor of that shape."""
    return _dropped(x, _part_of(*part, device=x.device), seed, p, index)


def _drawn(part: Part, seed: Tensor, index: int, dtype: torch.dtype) -> Tensor:
    bits = BITS[dtype]
    numbers = torch.empty([len(dim) for dim in part], dtype=dtype, device=seed.device)

    def write(y: Tensor, out: Tensor) -> None:
        out.copy_(y >> (32 - bits)).mul_(2.0**-bits).add_(0.5)

    _draw(part, seed, index, numbers, write)
    return numbers


@operator(lambda seed, _index, size, dtype: seed.new_empty(list(size), dtype=dtype))
def uniform(seed: Tensor, index: int, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform numbers from 0 (may occur) to 1 (does not)."""
    return _drawn(whole_of(size, seed.device), seed, index, dtype).view(list(size))


def _local(pieces: Sequence[int], lengths: Sequence[int]) -> list[int]:
    left = iter(lengths)
    return [sum(islice(left, count)) for count in pieces]


@operator(
    lambda seed, _index, _size, dtype, pieces, _starts, lengths: seed.new_empty(
        _local(pieces, lengths), dtype=dtype
    ),
    f"uniform_part(Tensor seed, int index, int[] size, ScalarType dtype, {_PART}) -> Tensor",
)
def uniform_part(
    seed: Tensor, index: int, size: Sequence[int], dtype: torch.dtype, *part: Sequence[int]
) -> Tensor:
    """The numbers of a shard of a tensor of that size."""
    numbers = _drawn(_part_of(size, *part, device=seed.device), seed, index, dtype)
    return numbers.view(_local(part[0], part[2]))
