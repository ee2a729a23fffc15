"""Writes of rows to a dim that is cut: each device writes what lies in its part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from partitioner.ir.graph import Attr
from partitioner.ir.ops.local import interval_attrs
from partitioner.ir.ops.table import LocalOp, LocalView, OpView


def write_part(
    view: OpView,
    local: LocalView,
    dim: int,
    index: int | np.ndarray,
    source: str = "",
    *,
    from_end: bool = False,
) -> LocalOp:
    """The node for a device, which is told its part of the written dim unless it has all of it.

    Args:
        view: The node, whose first operand and result are the data.
        index: The operand that holds the written positions, or these.
        source: What is written; by default the last operand.
        from_end: Whether negative positions count from the end; they are out of range otherwise.
    """
    size = view.shape()[dim]
    if local.shapes[0][dim] == size:
        return LocalOp((view.node,))
    constants: dict[str, np.ndarray] = {}
    if isinstance(index, int):
        positions = view.node.inputs[index]
    else:
        positions = f"{view.node.name}.at"
        constants[positions] = index.astype(np.int64)
    part = interval_attrs(local.regions[0][dim])
    attrs: dict[str, Attr] = {"dim": dim, "from_end": from_end, "size": size, **part}
    inputs = view.node.inputs[0], positions, source or view.node.inputs[-1]
    op = "partitioner::index_write_part"
    return LocalOp((replace(view.node, op=op, inputs=inputs, attrs=attrs),), constants)
