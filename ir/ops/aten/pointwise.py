"""Elementwise operators with broadcasting, and their gradients.

A number in place of a tensor is an attribute, so operands are what is left. Sums, differences and
products by numbers are linear: a pending sum passes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from partitioner.ir.ops.contraction import broadcast_dims
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def pointwise(view: OpView, flops: float = 1.0, linear: tuple[int, ...] = ()) -> Rule:
    """Every operand broadcasts to the result; each result element costs `flops`."""
    out = view.out_shape()
    operands = [None if shape is None else broadcast_dims(shape, len(out)) for shape in view.shapes]
    results = [broadcast_dims(out, len(out)) if name else None for name in view.node.outputs]
    return Rule.of(operands, results, view.shapes, view.out_shapes, flops=flops, linear=linear)


def total(view: OpView) -> Rule:
    """A sum or difference of tensors: linear unless a number is added."""
    numbers = "other" in view.node.attrs
    return pointwise(view, 1.0, () if numbers else (0, 1))


def costs(flops: float) -> Callable[[OpView], Rule]:
    """Rule of an operator that costs so many FLOPs a result element."""
    return lambda view: pointwise(view, flops)


ROWS: Mapping[str, OpRow] = {
    "aten::add.Tensor": OpRow(total),
    "aten::relu": OpRow(costs(1)),
    "aten::sub.Tensor": OpRow(total),
}
