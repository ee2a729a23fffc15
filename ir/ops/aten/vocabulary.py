"""Embedding tables and cross entropy, whose vocabulary may be cut.

A device finds the ids of its part of the vocabulary only; the others add zero to its partial
result, and have no gradient in its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.ir.graph import Attr
from partitioner.ir.layout import Interval
from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.indexing import read_rows
from partitioner.ir.ops.table import LocalOp, LocalView, OpaqueError, OpRow, OpView, same_node
from partitioner.ir.rule import Rule


def embedding(view: OpView) -> Rule:
    """``v f, i0 i1 -> i0 i1 f``; rows of the table that a device lacks come from others."""
    places = names("i", len(view.shape(1)))
    return Rule.of(
        [["v", "f"], places],
        [[*places, "f"]],
        view.shapes,
        view.out_shapes,
        reduce={"v": "sum"},
        linear=sums(view, 0),
        points=[*places, "f"],
    )


def local_embedding(view: OpView, local: LocalView) -> LocalOp:
    """A part of the table knows which rows it has."""
    size = view.shape(0)[0]
    if local.sizes["v"] == size:
        return LocalOp((view.node,))
    attrs: dict[str, Attr] = {"size": size, **_pieces(local.regions[0][0])}
    return LocalOp((replace(view.node, op="partitioner::embedding_part", attrs=attrs),))


def embedding_backward(view: OpView) -> Rule:
    """``i0 i1 f, i0 i1 -> v f``: each id adds to its row.

    Raises:
        OpaqueError: Gradients are scaled by how often an id occurs in the whole batch.
    """
    if view.attr("scale_grad_by_freq"):
        raise OpaqueError("scale_grad_by_freq is set")
    places = names("i", len(view.shape(1)))
    return Rule.of(
        [[*places, "f"], places],
        [["v", "f"]],
        view.shapes,
        view.out_shapes,
        reduce=dict.fromkeys(places, "sum"),
        linear=sums(view, 0),
        points=[*places, "v", "f"],
        flops=1 / max(view.out_shape()[0], 1),  # an id adds to one row
    )


def local_embedding_backward(view: OpView, local: LocalView) -> LocalOp:
    """A part of the table takes the gradients of its own rows."""
    if local.sizes["v"] == view.out_shape()[0]:
        return LocalOp((view.node,))
    attrs: dict[str, Attr] = {
        "padding_idx": view.int_attr("padding_idx", -1),
        **_pieces(local.out_regions[0][0]),
    }
    return LocalOp((replace(view.node, op="partitioner::embedding_part_backward", attrs=attrs),))


def _pieces(intervals: tuple[Interval, ...]) -> dict[str, tuple[int, ...]]:
    return {
        "starts": tuple(start for start, _ in intervals),
        "lengths": tuple(length for _, length in intervals),
    }


def _rows_and_classes(view: OpView, logits: int) -> tuple[list[str], list[str], list[str]]:
    """Dims of the logits, of the row maxima and of the targets; classes are v."""
    rank = len(view.shape(logits))
    dim = min(1, rank - 1)
    rows = names("n", rank - 1)
    return [*rows[:dim], "v", *rows[dim:]], [*rows[:dim], "1", *rows[dim:]], rows


def cross_entropy_parts(view: OpView) -> Rule:
    """``n v, n 1, n -> n, n``: sums over the classes."""
    logits, maximum, rows = _rows_and_classes(view, 0)
    return Rule.of(
        [logits, maximum, rows],
        [rows if name else None for name in view.node.outputs],
        view.shapes,
        view.out_shapes,
        reduce={"v": "sum"},
        points=logits,
        flops=TRANSCENDENTAL + 2,
    )


def cross_entropy_grad(view: OpView) -> Rule:
    """``n, n, n v, n 1, n -> n v``: pointwise, and linear in the gradients."""
    logits, maximum, rows = _rows_and_classes(view, 2)
    return Rule.of(
        [rows, rows, logits, maximum, rows],
        [logits],
        view.shapes,
        view.out_shapes,
        linear=sums(view, 0, 1),
        points=logits,
        flops=TRANSCENDENTAL + 3,
    )


def _local_classes(view: OpView, local: LocalView, logits: int) -> LocalOp:
    classes = local.regions[logits][min(1, len(view.shape(logits)) - 1)]
    return same_node(view, **_pieces(classes))


def local_parts(view: OpView, local: LocalView) -> LocalOp:
    """The classes that the device has."""
    return _local_classes(view, local, 0)


def local_grad(view: OpView, local: LocalView) -> LocalOp:
    """The classes that the device has."""
    return _local_classes(view, local, 2)


ROWS: Mapping[str, OpRow] = {
    "aten::embedding": OpRow(embedding, local_embedding, moved=read_rows, where=True),
    "aten::embedding_dense_backward": OpRow(
        embedding_backward, local_embedding_backward, where=True
    ),
    "partitioner::cross_entropy_grad": OpRow(cross_entropy_grad, local_grad, where=True),
    "partitioner::cross_entropy_parts": OpRow(cross_entropy_parts, local_parts, where=True),
}
