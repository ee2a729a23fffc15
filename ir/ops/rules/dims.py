"""Lists of dims that rules are written with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partitioner.ir.ops.signature import Shape


def names(prefix: str, count: int) -> list[str]:
    """``names("d", 3) -> ["d0", "d1", "d2"]``."""
    return [f"{prefix}{i}" for i in range(count)]


def replaced(dims: Sequence[str], index: int, *others: str) -> list[str]:
    """The dims with others, or none, in place of the one at `index`."""
    return [part for i, dim in enumerate(dims) for part in (others if i == index else (dim,))]


def broadcast(shape: Shape, dims: Sequence[str]) -> list[str]:
    """Dims of an operand that broadcasts to `dims`: aligned at the last, ``1`` for sizes of 1."""
    last = dims[len(dims) - len(shape) :]
    return ["1" if size == 1 else name for size, name in zip(shape, last, strict=True)]


def compound(**factors: int) -> str:
    """The product of factors by size, without those of size 1: ``"(g co)"``, ``"g"``, ``"1"``."""
    kept = [name for name, size in factors.items() if size != 1]
    return f"({' '.join(kept)})" if len(kept) > 1 else (kept or ["1"])[0]


def joined(parts: Mapping[str, int]) -> str:
    """The sum of parts by size, without those of size 0, which have nothing to cut."""
    return " + ".join(name for name, size in parts.items() if size) or next(iter(parts))
