"""Softmax and its relatives: the normalized dim is whole, gradients are linear."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def softmax(view: OpView) -> Rule:
    """``d0 x -> d0 x`` along dim 1."""
    return _along(view, TRANSCENDENTAL + 4)


def softmax_backward(view: OpView) -> Rule:
    """``result * (grad - sum(grad * result))``."""
    return _along(view, 4, linear=sums(view, 0))


def log_softmax_backward(view: OpView) -> Rule:
    """``grad - exp(result) * sum(grad)``."""
    return _along(view, TRANSCENDENTAL + 3, linear=sums(view, 0))


def _along(view: OpView, flops: float, linear: tuple[int, ...] = ()) -> Rule:
    dims = names("d", len(view.shape(0)))
    whole = {dims[view.int_attr("dim", -1)]} if dims else set()
    operands = [dims] * len(view.node.inputs)
    return Rule.of(
        operands, [dims], view.shapes, view.out_shapes, whole=whole, linear=linear, flops=flops
    )


ROWS: Mapping[str, OpRow] = {
    "aten::_log_softmax": OpRow(softmax),
    "aten::_log_softmax_backward_data": OpRow(log_softmax_backward),
    "aten::_safe_softmax": OpRow(softmax),
    "aten::_softmax": OpRow(softmax),
    "aten::_softmax_backward_data": OpRow(softmax_backward),
}
