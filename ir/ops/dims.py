"""Small words that rows share: lists of factor names and of operands outside the loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partitioner.ir.ops.table import OpView


def names(prefix: str, count: int) -> list[str]:
    """``names("d", 3) -> ["d0", "d1", "d2"]``."""
    return [f"{prefix}{i}" for i in range(count)]


def with_whole(view: OpView, *dims: list[str]) -> list[list[str] | None]:
    """Dims of the first operands; every other operand is needed whole."""
    return [*dims, *([None] * (len(view.node.inputs) - len(dims)))]


def replaced(dims: Sequence[str], axis: int, expr: str) -> list[str]:
    """The dims with another one at `axis`."""
    return [expr if i == axis else name for i, name in enumerate(dims)]


def joined(terms: Sequence[str], sizes: Mapping[str, int]) -> str:
    """A sum of the terms that have elements: an empty part has nothing to cut."""
    return " + ".join(name for name in terms if sizes[name]) or terms[0]


def empty_parts(sizes: Mapping[str, int]) -> set[str]:
    """Parts without elements."""
    return {name for name, size in sizes.items() if size == 0}
