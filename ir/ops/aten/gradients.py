"""Gradients of elementwise operators: all are linear in the gradient that comes in."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.aten.pointwise import costs
from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.dims import names, replaced
from partitioner.ir.ops.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

#: FLOPs an element.
FLOPS: Mapping[str, float] = {
    **dict.fromkeys(("hardshrink_backward", "softshrink_backward", "threshold_backward"), 1.0),
    **dict.fromkeys(("hardsigmoid_backward", "hardtanh_backward", "leaky_relu_backward"), 2.0),
    **dict.fromkeys(("native_dropout_backward", "_prelu_kernel_backward"), 2.0),
    **dict.fromkeys(("sigmoid_backward", "tanh_backward"), 3.0),
    **dict.fromkeys(("hardswish_backward", "logit_backward"), 4.0),
    "elu_backward": TRANSCENDENTAL + 2,
    "log_sigmoid_backward": TRANSCENDENTAL + 4,
    "softplus_backward": TRANSCENDENTAL + 4,
    "silu_backward": TRANSCENDENTAL + 6,
    "gelu_backward": 2 * TRANSCENDENTAL + 6,
    "mish_backward": 3 * TRANSCENDENTAL,
}


def glu(view: OpView) -> Rule:
    """``(s d) -> d``: halves of a dim, one the gate of the other."""
    halves, dims, sizes = _halved(view, 0)
    return Rule.of(
        [halves],
        [dims],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole={"s"},
        points=dims,
        flops=TRANSCENDENTAL + 3,
    )


def glu_backward(view: OpView) -> Rule:
    """``d, (s d) -> (s d)``."""
    halves, dims, sizes = _halved(view, 1)
    return Rule.of(
        [dims, halves],
        [halves],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole={"s"},
        linear=sums(view, 0),
        points=dims,
        flops=TRANSCENDENTAL + 8,
    )


def _halved(view: OpView, operand: int) -> tuple[list[str], list[str], Mapping[str, int]]:
    """Dims with both halves, dims of one half, sizes."""
    shape = view.shape(operand)
    axis = view.int_attr("dim", -1) % len(shape)
    dims = names("d", len(shape))
    return replaced(dims, axis, f"(s {dims[axis]})"), dims, {"s": 2}


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(costs(flops, (0,))) for op, flops in FLOPS.items()},
    "aten::glu": OpRow(glu),
    "aten::glu_backward": OpRow(glu_backward),
}
