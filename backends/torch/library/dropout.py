"""Dropout whose mask is a pure function of seed, node and place in the whole tensor.

The rule, the same on every device and for every cut. Let an element of the whole tensor lie at
column c of row r (row-major order; the last dim has `columns` places). With 64-bit arithmetic that
wraps, ``mix`` the finaliser of SplitMix64 and the constants below:

* ``key(r) = mix(mix(r * ROW + index * NODE) + mix(seed * SEED))``, of which ``low`` and ``high``
  are the two halves, and ``place(c)`` is the lower half of ``mix(c * COLUMN + 1)``;
* ``x = (place(c) ^ low(r)) * FIRST``, ``y = (x ^ (x >> 15)) * SECOND + high(r)`` in 32 bits with
  signs (the shift keeps the sign);
* the element is kept if ``y >= p * 2**32 - 2**31``.

So a rank makes its own part only, without drawing the rest, and one process makes the same mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from partitioner.backends.torch.library.registry import operator

ROW, NODE, SEED, COLUMN = (
    value - (1 << 64)  # as signed 64-bit numbers
    for value in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5, 0xC2B2AE3D27D4EB4F)
)
FIRST, SECOND = 0x85EBCA6B - (1 << 32), 0x297A2D39  #: Odd: products are one to one.
#: Elements whose 32-bit numbers stay in a core's cache while they are mixed.
CHUNK = 1 << 15


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift without a sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Finaliser of SplitMix64."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shifted(x, 31)


def _half(x: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits as a signed number."""
    signed = ((x + (1 << 31)) & ((1 << 32) - 1)) - (1 << 31)
    return signed.to(torch.int32)


def kept(
    rows: torch.Tensor, columns: torch.Tensor, seed: torch.Tensor, p: float, index: int
) -> torch.Tensor:
    """The mask at every row and column: ``(rows, columns)``."""
    key = _mix(_mix(rows * ROW + _wrapped(index * NODE)) + _mix(seed * SEED))
    low, high = _half(key).unsqueeze(1), _half(_shifted(key, 32)).unsqueeze(1)
    place = _half(_mix(columns * COLUMN + 1))
    limit = min(round(p * 2**32) - 2**31, 2**31 - 1)
    mask = torch.empty((len(rows), len(columns)), dtype=torch.bool, device=rows.device)
    for own, some in _chunks(len(rows), len(columns), rows.device):
        x = place[some] ^ low[own]
        x.mul_(FIRST)
        x.bitwise_xor_(x >> 15).mul_(SECOND).add_(high[own])
        torch.ge(x, limit, out=mask[own, some])
    return mask if p < 1 else mask.zero_()


def _wrapped(x: int) -> int:
    """As a signed 64-bit number."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _chunks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Blocks of a mask: small ones where the cache decides, else all at once."""
    block = CHUNK * torch.get_num_threads() if device.type == "cpu" else max(rows * columns, 1)
    wide = max(min(columns, block), 1)
    tall = max(block // wide, 1)
    for top in range(0, rows, tall):
        for left in range(0, columns, wide):
            yield slice(top, top + tall), slice(left, left + wide)


def _places(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Places in the whole dim of the elements that intervals cover."""
    runs = [
        torch.arange(start, start + length, device=device)
        for start, length in zip(starts, lengths, strict=True)
    ]
    return torch.cat(runs) if runs else torch.arange(0, device=device)


def _fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return torch.empty_like(x), mask


@operator(
    "dropout_part(Tensor x, Tensor seed, float p, int index, int[] shape, int[] pieces, "
    "int[] starts, int[] lengths) -> (Tensor, Tensor)",
    _fake,
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
    """`dropout` of a part: each dim consists of so many pieces, each of a start and a length."""
    dims = []
    first = 0
    for count in pieces:
        some = slice(first, first + count)
        dims.append(_places(starts[some], lengths[some], x.device))
        first += count
    if not dims:
        dims = [torch.zeros(1, dtype=torch.int64, device=x.device)]
    *outer, columns = dims
    rows = torch.zeros(1, dtype=torch.int64, device=x.device)
    for size, places in zip(shape, outer, strict=False):
        rows = (rows.unsqueeze(1) * size + places).reshape(-1)
    mask = kept(rows, columns, seed, p, index).view(x.shape)
    found: torch.Tensor = torch.ops.aten.native_dropout_backward(x, mask, _factor(p))
    return found, mask


@operator(
    "dropout(Tensor x, Tensor seed, float p, int index) -> (Tensor, Tensor)",
    _fake,
)
def dropout(
    x: torch.Tensor, seed: torch.Tensor, p: float, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x where it is kept, over the share that is kept; the mask)."""
    starts = [0] * x.dim()
    found: tuple[torch.Tensor, torch.Tensor] = dropout_part(
        x, seed, p, index, x.shape, [1] * x.dim(), starts, x.shape
    )
    return found


def _factor(p: float) -> float:
    """What kept elements are multiplied by."""
    return 0.0 if p == 1 else 1.0 / (1.0 - p)
