"""Random numbers that are a pure function of seed, node and place in the whole tensor.

The rule, the same on every device and for every cut. Let an element of the whole tensor lie at
column c of row r (row-major order; a row is the last dim). With 64-bit arithmetic that wraps,
``mix`` the finaliser of SplitMix64 and the constants below:

* ``key(r) = mix(mix(r * ROW + index * NODE) + mix(seed * SEED))``, of which ``low`` and ``high``
  are the two halves, and ``place(c)`` is the lower half of ``mix(c * COLUMN + 1)``;
* ``x = (place(c) ^ low(r)) * FIRST``, ``y = (x ^ (x >> 15)) * SECOND + high(r)`` in 32 bits with
  signs (the shift keeps the sign). The element's number is y, any of the 2**32 alike.

So a rank draws its own part only, and one process draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

ROW, NODE, SEED, COLUMN = (
    value - (1 << 64)  # as signed 64-bit numbers
    for value in (0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xAF251AF3B0F025B5, 0xC2B2AE3D27D4EB4F)
)
FIRST, SECOND = 0x85EBCA6B - (1 << 32), 0x297A2D39  #: Odd: products are one to one.
#: Elements whose 32-bit numbers stay in a core's cache while they are mixed.
CHUNK = 1 << 15

Part = tuple[torch.Tensor, torch.Tensor]  #: Numbers of its rows, and of its columns.


def draw(
    part: Part,
    seed: torch.Tensor,
    index: int,
    out: torch.Tensor,
    write: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    """Draw the numbers of a part.

    Args:
        part: The part.
        seed: A single int64.
        index: Number of the node.
        out: What is written, (rows, columns).
        write: Writes a block of `out` (its second argument) from 32-bit numbers, which it may
            overwrite.
    """
    rows, columns = part
    key = _mix(_mix(rows * ROW + _wrapped(index * NODE)) + _mix(seed * SEED))
    low, high = _half(key).unsqueeze(1), _half(_shifted(key, 32)).unsqueeze(1)
    place = _half(_mix(columns * COLUMN + 1))
    for own, some in _blocks(len(rows), len(columns), rows.device):
        x = place[some] ^ low[own]
        x.mul_(FIRST)
        x.bitwise_xor_(x >> 15).mul_(SECOND).add_(high[own])
        write(x, out[own, some])


def part_of(
    shape: Sequence[int],
    pieces: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
) -> Part:
    """A part of a tensor: each dim has so many pieces, each of a start and a length."""
    dims = []
    first = 0
    for count in pieces:
        some = slice(first, first + count)
        dims.append(_places(starts[some], lengths[some], device))
        first += count
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    *outer, columns = dims or [rows]
    for size, places in zip(shape, outer, strict=False):
        rows = (rows.unsqueeze(1) * size + places).reshape(-1)
    return rows, columns


def whole_of(shape: Sequence[int], device: torch.device) -> Part:
    """All of a tensor."""
    return part_of(shape, [1] * len(shape), [0] * len(shape), shape, device)


def _places(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Places in the whole dim of the elements that intervals cover."""
    runs = [
        torch.arange(start, start + length, device=device)
        for start, length in zip(starts, lengths, strict=True)
    ]
    return torch.cat(runs) if runs else torch.arange(0, device=device)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Finaliser of SplitMix64."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift without a sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _half(x: torch.Tensor) -> torch.Tensor:
    """The lower 32 bits as a signed number."""
    signed = ((x + (1 << 31)) & ((1 << 32) - 1)) - (1 << 31)
    return signed.to(torch.int32)


def _wrapped(x: int) -> int:
    """As a signed 64-bit number."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _blocks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Blocks of a part: small ones where the cache decides, else all at once."""
    block = CHUNK * torch.get_num_threads() if device.type == "cpu" else max(rows * columns, 1)
    wide = max(min(columns, block), 1)
    tall = max(block // wide, 1)
    for top in range(0, rows, tall):
        for left in range(0, columns, wide):
            yield slice(top, top + tall), slice(left, left + wide)
