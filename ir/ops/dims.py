"""Small words that rows share: lists of factor names and of operands outside the loops."""

from __future__ import annotations

from partitioner.ir.ops.table import OpView


def names(prefix: str, count: int) -> list[str]:
    """``names("d", 3) -> ["d0", "d1", "d2"]``."""
    return [f"{prefix}{i}" for i in range(count)]


def with_whole(view: OpView, *dims: list[str]) -> list[list[str] | None]:
    """Dims of the first operands; every other operand is needed whole."""
    return [*dims, *([None] * (len(view.node.inputs) - len(dims)))]
