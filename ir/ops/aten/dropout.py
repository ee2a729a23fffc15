"""Dropout: a part's mask is made of its places in the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

#: Integer operations that make an element of the mask, and the product.
FLOPS = 8.0


def dropout(view: OpView) -> Rule:
    """Every dim is cut; the seed is whole."""
    dims = names("d", len(view.shape(0)))
    results = [dims if name else None for name in view.node.outputs]
    return Rule.of([dims, []], results, view.shapes, view.out_shapes, flops=FLOPS)


def local_dropout(view: OpView, local: LocalView) -> LocalOp:
    """A part says where it lies."""
    whole = view.shape(0)
    if local.shapes[0] == whole:
        return LocalOp((view.node,))
    region = local.regions[0]
    intervals = [interval for dim in region for interval in dim]
    where = {
        "shape": whole,
        "pieces": tuple(len(dim) for dim in region),
        "starts": tuple(start for start, _ in intervals),
        "lengths": tuple(length for _, length in intervals),
    }
    attrs = {**view.node.attrs, **where}
    return LocalOp((replace(view.node, op="partitioner::dropout_part", attrs=attrs),))


ROWS: Mapping[str, OpRow] = {"partitioner::dropout": OpRow(dropout, local_dropout)}
