"""Random draws: what a part draws follows from its places in the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.ir.exchange import Region
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

#: Integer operations that make a number, and what is made of it.
FLOPS = 8.0


def dropout(view: OpView) -> Rule:
    """Every dim is cut; the seed is whole."""
    dims = names("d", len(view.shape(0)))
    results = [dims if name else None for name in view.node.outputs]
    return Rule.of([dims, []], results, view.shapes, view.out_shapes, flops=FLOPS)


def uniform(view: OpView) -> Rule:
    """The same without an operand but the seed."""
    dims = names("d", len(view.out_shape()))
    return Rule.of([[]], [dims], view.shapes, view.out_shapes, flops=FLOPS)


def local_dropout(view: OpView, local: LocalView) -> LocalOp:
    """A part says where it lies."""
    whole = view.shape(0)
    if local.shapes[0] == whole:
        return LocalOp((view.node,))
    attrs = {**view.node.attrs, "shape": whole, **_where(local.regions[0])}
    return LocalOp((replace(view.node, op="partitioner::dropout_part", attrs=attrs),))


def local_uniform(view: OpView, local: LocalView) -> LocalOp:
    """A part says where it lies."""
    if local.out_shapes[0] == view.out_shape():
        return LocalOp((view.node,))
    attrs = {**view.node.attrs, **_where(local.out_regions[0])}
    return LocalOp((replace(view.node, op="partitioner::uniform_part", attrs=attrs),))


def _where(region: Region) -> dict[str, tuple[int, ...]]:
    """Pieces of each dim, and start and length of each piece."""
    intervals = [interval for dim in region for interval in dim]
    return {
        "pieces": tuple(len(dim) for dim in region),
        "starts": tuple(start for start, _ in intervals),
        "lengths": tuple(length for _, length in intervals),
    }


ROWS: Mapping[str, OpRow] = {
    "partitioner::dropout": OpRow(dropout, local_dropout, where=True),
    "partitioner::uniform": OpRow(uniform, local_uniform, where=True),
}
