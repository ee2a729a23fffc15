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
    operands: tuple[str, str],
    index: str | np.ndarray,
    *,
    from_end: bool = False,
) -> LocalOp:
    """The node for a device, which is told its part of the written dim unless it has all of it.

    Args:
        view: The node, whose first operand and result are the data.
        local: The device's part.
        dim: The dim that is written.
        operands: Data and source.
        index: The value that holds the written positions, or these.
        from_end: Whether negative positions count from the end; they are out of range otherwise.
    """
    size = view.shape()[dim]
    if local.shapes[0][dim] == size:
        return LocalOp((view.node,))
    constants: dict[str, np.ndarray] = {}
    if not isinstance(index, str):
        name = f"{view.node.name}.at"
        constants[name], index = index.astype(np.int64), name
    part = interval_attrs(local.regions[0][dim])
    attrs: dict[str, Attr] = {"dim": dim, "from_end": from_end, "size": size, **part}
    data, source = operands
    op, inputs = "partitioner::index_write_part", (data, index, source)
    return LocalOp((replace(view.node, op=op, inputs=inputs, attrs=attrs),), constants)
