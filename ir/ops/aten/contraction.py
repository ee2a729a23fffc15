"""Matrix products."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.contraction import matmul
from partitioner.ir.ops.table import OpaqueError, OpRow, OpView
from partitioner.ir.rule import Rule


def addmm(view: OpView) -> Rule:
    """``bias + m k, k n -> m n``; the bias counts once where k is cut.

    Raises:
        OpaqueError: beta or alpha is not 1.
    """
    if view.attr("beta") != 1 or view.attr("alpha") != 1:
        raise OpaqueError("beta or alpha is not 1")
    sizes = view.shape(0)
    bias = [
        "1" if size == 1 else name for size, name in zip(sizes, "mn"[-len(sizes) :], strict=True)
    ]
    return Rule.of(
        [bias, ["m", "k"], ["k", "n"]],
        [["m", "n"]],
        view.shapes,
        view.out_shapes,
        reduce={"k": "sum"},
        addends={0},
        points="mkn",
        flops=2,
    )


ROWS: Mapping[str, OpRow] = {
    "aten::addmm": OpRow(addmm),
    "aten::bmm": OpRow(matmul),
    "aten::mm": OpRow(matmul),
}
