"""Normalizations and their gradients: the normalised dims are whole, all others are cut.

Gradients of weights and biases are sums over the dims that are not normalised. Batch norm in
training, and group norm of images, are several operators, of which only those that give sums reduce
the batch, or space; factor t, of size 2, is a sum and a sum of squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from partitioner.ir.ops.local import local_groups, same_node
from partitioner.ir.ops.rules.reduction import (
    CENTRED,
    UNCENTRED,
    batch_norm,
    group_norm,
    grouped,
)
from partitioner.ir.ops.signature import names, pattern
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule


def _last(view: OpView) -> tuple[list[str], list[str], list[str]]:
    """Dims of the data, of a mean, and of a weight, where the last dims are normalised."""
    count = len(view.ints("normalized_shape") or ())
    dims = names("d", view.rank())
    kept = dims[: len(dims) - count]
    return dims, [*kept, *["1"] * count], dims[len(kept) :]


def _layer_norm(view: OpView, flops: float) -> Rule:
    """Data, weight, bias -> result, mean, inverse deviation (or root of the mean square)."""
    dims, mean, weight = _last(view)
    return view.rule([dims, weight, weight], [dims, mean, mean], whole=weight, flops=flops)


def _layer_grad_input(view: OpView, statistics: int) -> Rule:
    """Gradient, data, statistics, weight -> the data's gradient."""
    dims, mean, weight = _last(view)
    operands = [dims, dims, *[mean] * statistics, weight]
    return view.rule(operands, [dims], whole=weight, linear=[0], flops=CENTRED)


def _layer_grad_weight(view: OpView, statistics: int) -> Rule:
    """Gradient, data, statistics -> gradients of weight and bias."""
    dims, mean, weight = _last(view)
    operands = [dims, dims, *[mean] * statistics]
    return view.rule(operands, [weight, weight], reduce=dims, linear=[0], flops=UNCENTRED)


def _local_weight(view: OpView, local: LocalView) -> LocalOp:
    """Where the normalised dims are cut, so is the shape of the weight."""
    shapes = zip(local.out_shapes, view.node.outputs, strict=True)
    return same_node(view, normalized_shape=next(shape for shape, name in shapes if name))


def _by_channel(text: str, **options: Any) -> OpRow:
    """Row over images, by points of the data."""
    return OpRow(pattern(text, points="n c s..", **options))


def _by_group(text: str, count: str = "", **options: Any) -> OpRow:
    """Row over images; channels C are in groups G, which an attribute or operand 2 counts."""
    operands, _, results = text.partition("->")

    def rule(view: OpView) -> Rule:
        groups = view.int_attr(count, 1) if count else view.shape(2)[1]
        channel, group, sizes = grouped(view, groups)
        ins, outs = (side.replace("C", channel).replace("G", group) for side in (operands, results))
        points = ["n", *(name for name in ("g", "c") if sizes[name] != 1), "s.."]
        return view.rule(ins, outs, sizes=sizes, points=points, **options)

    return OpRow(rule, local_groups(count) if count else None)


ROWS: Mapping[str, OpRow] = {
    "aten::_fused_rms_norm": OpRow(partial(_layer_norm, flops=UNCENTRED)),
    "aten::_native_batch_norm_legit_no_training": OpRow(batch_norm),
    "aten::native_group_norm": OpRow(
        lambda view: group_norm(view, view.int_attr("group", 1)),
        lambda view, local: same_node(  # sizes of the operand are arguments
            view, N=local.shapes[0][0], C=local.shapes[0][1], group=local.sizes.get("g", 1)
        ),
    ),
    "aten::native_layer_norm": OpRow(partial(_layer_norm, flops=CENTRED)),
    # Data, mean, variance, weight, bias -> result.
    "partitioner::batch_norm_apply": OpRow(
        lambda view: view.rule(
            "n c s.., c, c, c, c",
            "n c s..",
            linear=[0] if view.type(1) is None and view.type(4) is None else [],
            flops=4,
        )
    ),
    # Gradient, data, mean, inverse deviation, weight, sums -> the data's gradient.
    "partitioner::batch_norm_grad_input": _by_channel(
        "n c s.., n c s.., c, c, c, t c -> n c s..", whole="t", linear=[0, 5], flops=5
    ),
    # Gradient, data, mean, inverse deviation -> gradients of bias and weight.
    "partitioner::batch_norm_grad_sums": _by_channel(
        "n c s.., n c s.., c, c -> t c", reduce="n s..", whole="t", linear=[0], flops=4
    ),
    # The batch's mean and variance, the running ones -> the next running ones.
    "partitioner::batch_norm_running": OpRow(pattern("c, c, c, c -> c, c", flops=5)),
    # Sums -> mean, variance, inverse deviation.
    "partitioner::batch_norm_statistics": OpRow(pattern("t c -> c, c, c", whole="t", flops=4)),
    "partitioner::batch_norm_sums": _by_channel(
        "n c s.. -> t c", reduce="n s..", whole="t", flops=3
    ),
    # Data, mean, inverse deviation, weight, bias -> result.
    "partitioner::group_norm_apply": _by_group("n C s.., n G, n G, C, C -> n C s..", flops=4),
    # Gradient, data, mean, inverse deviation, weight, sums -> the data's gradient.
    "partitioner::group_norm_grad_planes": _by_group(
        "n C s.., n C s.., n G, n G, C, t n C -> n C s..", whole="c t", linear=[0, 5], flops=5
    ),
    # Gradient, data, mean, inverse deviation -> sums of a channel of each image.
    "partitioner::group_norm_grad_sums": _by_group(
        "n C s.., n C s.., n G, n G -> t n C", reduce="s..", whole="t", linear=[0], flops=4
    ),
    # Sums -> mean, inverse deviation.
    "partitioner::group_norm_statistics": OpRow(pattern("t n g -> n g, n g", whole="t", flops=4)),
    # Data -> sums of a group of each image; factor t is a sum and a sum of squares.
    "partitioner::group_norm_sums": _by_group(
        "n C s.. -> t n G", "group", reduce="c s..", whole="t", flops=3
    ),
    # Gradient, data, mean, inverse deviation, weight -> the data's gradient.
    "partitioner::group_norm_grad_input": _by_group(
        "n C s.., n C s.., n G, n G, C -> n C s..",
        "group",
        whole="c s..",
        linear=[0],
        flops=CENTRED,
    ),
    # Gradient, data, mean, inverse deviation -> gradients of weight and bias.
    "partitioner::group_norm_grad_weight": _by_group(
        "n C s.., n C s.., n G, n G -> C, C", "group", reduce="n s..", linear=[0], flops=UNCENTRED
    ),
    "partitioner::layer_norm_grad_input": OpRow(partial(_layer_grad_input, statistics=2)),
    "partitioner::layer_norm_grad_weight": OpRow(
        partial(_layer_grad_weight, statistics=2), _local_weight
    ),
    "partitioner::rms_norm": OpRow(partial(_layer_norm, flops=UNCENTRED)),
    "partitioner::rms_norm_grad_input": OpRow(partial(_layer_grad_input, statistics=1)),
    "partitioner::rms_norm_grad_weight": OpRow(
        partial(_layer_grad_weight, statistics=1), _local_weight
    ),
}
