"""Softmax, losses and embedding tables.

The normalised dim of a softmax is whole. The vocabulary of an embedding and of cross entropy may
be cut: a device looks up the ids of its part only; the others add zero to its partial result, and
have no gradient in its part. In negative log-likelihood classes are whole, and rows are cut unless
their mean is taken: it divides by the number of targets that are not ignored, which no device
knows. (The front end decomposes cross entropy, so that its mean may be cut.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from partitioner.ir.ops.local import in_whole, interval_attrs, other_node, same_node
from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.rules.indexing import moved_rows
from partitioner.ir.ops.rules.reduction import along
from partitioner.ir.ops.signature import OpaqueError, names, pattern
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

NONE, MEAN = 0, 1  #: Of the attribute `reduction`; 2 is the sum.


def _softmax(view: OpView, flops: float, *, backward: bool = False) -> Rule:
    """Softmax and its relatives; gradients are linear in the gradient that comes in."""
    dim, operands = view.int_attr("dim", -1), len(view.types)
    return along(view, [dim], operands=operands, flops=flops, sums=[0] if backward else [])


def _nll(view: OpView, *, backward: bool = False) -> Rule:
    """``n c, n, c -> loss, total weight``; ``grad, n c, n, c, total weight -> n c`` backward.

    The total is that of the whole batch.
    """
    logits, rows = ["c"], names("n", view.rank(1 + backward))
    points: list[str] = []
    if view.rank(int(backward)) == 1:  # a single row; its target may have one dim of size 1
        rows = ["1"] * len(rows)
    else:
        logits, points = [rows[0], "c", *rows[1:]], rows
    reduction = view.attr("reduction")
    loss = points if reduction == NONE else []
    if backward:
        operands = [loss, logits, rows, "c", []]
        return view.rule(operands, [logits], whole="c", points=points, flops=2, sums=[0])
    return view.rule(
        [logits, rows, "c"],
        [loss, []],
        whole=["c", *(rows if reduction == MEAN else [])],
        reduce=rows,
        points=points,
        flops=2,
    )


def _local_embedding(view: OpView, local: LocalView) -> LocalOp:
    size = view.shape()[0]
    if local.sizes["v"] == size:
        return same_node(view)
    part = interval_attrs(local.regions[0][0])
    return other_node(view, "partitioner::embedding_part", size=size, **part)


def _embedding_backward(view: OpView) -> Rule:
    if view.attr("scale_grad_by_freq"):  # by how often an id occurs in the whole batch
        raise OpaqueError("scale_grad_by_freq is set")
    return view.rule(
        "i.. f, i..",
        "v f",
        reduce="i..",
        points="i.. v f",
        flops=1 / max(view.out_shape[0], 1),  # an id adds to one row
        sums=[0],
    )


def _local_embedding_backward(view: OpView, local: LocalView) -> LocalOp:
    if local.sizes["v"] == view.out_shape[0]:
        return same_node(view)
    padding, part = view.int_attr("padding_idx", -1), interval_attrs(local.out_regions[0][0])
    op = "partitioner::embedding_part_backward"
    return other_node(view, op, padding_idx=padding, **part)


def _class_dim(view: OpView, logits: int) -> int:
    return min(1, view.rank(logits) - 1)


def _cross_entropy(view: OpView, index: int) -> Rule:
    """``n v, n 1, n -> n, n``: sums over the classes v; gradients ``n, n, (these) -> n v``.

    Logits are operand `index`; gradients are linear in those that come in.
    """
    rows, dim = names("n", view.rank(index) - 1), _class_dim(view, index)
    logits, maximum = [*rows[:dim], "v", *rows[dim:]], [*rows[:dim], "1", *rows[dim:]]
    operands = [*[rows] * index, logits, maximum, rows]
    flops = TRANSCENDENTAL + (3 if index else 2)
    if index:
        return view.rule(operands, [logits], points=logits, flops=flops, sums=[0, 1])
    return view.rule(operands, [rows, rows], reduce="v", points=logits, flops=flops)


def _local_classes(view: OpView, local: LocalView, logits: int) -> LocalOp:
    return same_node(view, **in_whole(view, local.regions[logits][_class_dim(view, logits)]))


ROWS: Mapping[str, OpRow] = {
    **{
        f"aten::{op}": OpRow(partial(_softmax, flops=TRANSCENDENTAL + 4))
        for op in ("_log_softmax", "_safe_softmax", "_softmax")
    },
    **{f"aten::{op}_forward": OpRow(_nll) for op in ("nll_loss", "nll_loss2d")},
    **dict.fromkeys(
        ("aten::nll_loss_backward", "aten::nll_loss2d_backward"),
        OpRow(partial(_nll, backward=True)),
    ),
    "aten::_log_softmax_backward_data": OpRow(
        partial(_softmax, flops=TRANSCENDENTAL + 3, backward=True)
    ),
    "aten::_softmax_backward_data": OpRow(partial(_softmax, flops=4, backward=True)),
    "aten::embedding": OpRow(  # rows of the table that a device lacks are added by others
        pattern("v f, i.. -> i.. f", reduce="v", points="i.. f", sums=[0]),
        _local_embedding,
        moved=moved_rows,
        where=True,
    ),
    "aten::embedding_dense_backward": OpRow(
        _embedding_backward, _local_embedding_backward, where=True
    ),
    **{
        f"partitioner::cross_entropy_{op}": OpRow(
            partial(_cross_entropy, index=index),
            partial(_local_classes, logits=index),
            where=True,
        )
        for op, index in (("parts", 0), ("grad", 2))
    },
}
