"""Bytes of values that are kept from step to step."""

from __future__ import annotations

from partitioner.ir.graph import Node
from partitioner.ir.types import DTYPE_BITS


def held_bytes(node: Node, dtype: str, nbytes: float) -> int:
    """Bytes of a part of a stored value with what is kept beside it: its optimizer's state.

    Args:
        node: The node that gives the value.
        dtype: Its element type.
        nbytes: Bytes of the part alone.
    """
    extra = node.attrs.get("state_bytes", 0)
    assert isinstance(extra, int)
    return int(nbytes + nbytes * 8 // DTYPE_BITS[dtype] * extra)
