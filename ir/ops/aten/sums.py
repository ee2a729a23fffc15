"""Which operands a pending sum may come in by."""

from __future__ import annotations

from partitioner.ir.ops.table import OpView
from partitioner.ir.types import DTYPE_BITS


def sums(view: OpView, *operands: int) -> tuple[int, ...]:
    """These operands, in which the op is jointly linear; none if an element type is in the way.

    A sum of parts is their sum only while no part is rounded or wrapped: element types stay as
    they are, or floats become wider ones. Truth values have no sums.
    """
    made = view.graph.types[next(name for name in view.node.outputs if name)].dtype
    kinds = [kind.dtype for index in operands if (kind := view.type(index)) is not None]
    return operands if all(_keeps_sums(kind, made) for kind in kinds) else ()


def _keeps_sums(before: str, after: str) -> bool:
    if before == after:
        return before != "bool"
    widens = DTYPE_BITS[after] > DTYPE_BITS[before]
    return widens and "float" in before and "float" in after
