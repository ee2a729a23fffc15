"""Negative log-likelihood: classes are whole, rows are cut unless their mean is taken.

A mean divides by the number of targets that count, which no device knows for itself. Cross
entropy is taken apart before it comes here (see `vocabulary`), so that its mean may be cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule

NONE, MEAN = 0, 1  #: Of the attribute `reduction`; 2 is the sum.


def _dims(view: OpView, logits: int, target: int) -> tuple[list[str], list[str]]:
    """Dims of the log-probabilities and of the targets, whose classes are c."""
    rows = names("n", len(view.shape(target)))
    rank = len(view.shape(logits))
    if rank == 1:  # a single row; its target may have one dim of size 1
        return ["c"], ["1"] * len(rows)
    return [rows[0], "c", *rows[1:]], rows


def forward(view: OpView) -> Rule:
    """``n c, n, c -> loss, total weight``."""
    logits, rows = _dims(view, 0, 1)
    reduction = view.attr("reduction")
    result = rows if reduction == NONE and len(logits) > 1 else []
    results = [result, []]
    return Rule.of(
        view.present([logits, rows, ["c"]]),
        [dims if name else None for dims, name in zip(results, view.node.outputs, strict=True)],
        view.shapes,
        view.out_shapes,
        whole={"c", *(rows if reduction == MEAN else ())},
        reduce=dict.fromkeys(rows, "sum"),
        points=rows if len(logits) > 1 else (),
        flops=2,
    )


def backward(view: OpView) -> Rule:
    """``grad, n c, n, c, total weight -> n c``; the total is that of the whole batch."""
    logits, rows = _dims(view, 1, 2)
    grad = rows if view.attr("reduction") == NONE and len(logits) > 1 else []
    return Rule.of(
        view.present([grad, logits, rows, ["c"], []]),
        [logits],
        view.shapes,
        view.out_shapes,
        whole={"c"},
        linear=sums(view, 0),
        points=rows if len(logits) > 1 else (),
        flops=2,
    )


ROWS: Mapping[str, OpRow] = {
    "aten::nll_loss2d_backward": OpRow(backward),
    "aten::nll_loss2d_forward": OpRow(forward),
    "aten::nll_loss_backward": OpRow(backward),
    "aten::nll_loss_forward": OpRow(forward),
}
