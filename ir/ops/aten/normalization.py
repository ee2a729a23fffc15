"""Normalizations and their gradients: the normalised dims are whole, all others are cut.

Gradients of weights and biases are sums over the dims that are not normalised; means and
deviations are operands, so that the normalised dims may be cut as well. Batch norm in training is
several operators (see `partitioner.backends.torch.operators.normalization`), of which only those
that give sums reduce the batch; factor t, of size 2, is a sum and a sum of squares. Group norm of
images likewise: its sums reduce space.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from partitioner.ir.ops.local import local_groups, same_node
from partitioner.ir.ops.rules.dims import names
from partitioner.ir.ops.rules.normalization import (
    CENTRED,
    UNCENTRED,
    batch_norm,
    group_norm,
    grouped,
)
from partitioner.ir.ops.signature import pattern
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


def _group_norm(view: OpView) -> Rule:
    return group_norm(view, view.int_attr("group", 1))


def _group_grad_input(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation, weight -> the data's gradient."""
    channel, group, sizes = grouped(view, view.int_attr("group", 1))
    return view.rule(
        f"n {channel} s.., n {channel} s.., n {group}, n {group}, {channel}",
        f"n {channel} s..",
        sizes=sizes,
        whole="c s..",
        linear=[0],
        flops=CENTRED,
    )


def _group_grad_weight(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation -> gradients of weight and bias."""
    channel, group, sizes = grouped(view, view.int_attr("group", 1))
    return view.rule(
        f"n {channel} s.., n {channel} s.., n {group}, n {group}",
        f"{channel}, {channel}",
        sizes=sizes,
        reduce="n s..",
        linear=[0],
        flops=UNCENTRED,
    )


def _group_tensors(view: OpView) -> tuple[str, str, dict[str, int]]:
    """Data, numbers of a group of each image, and the sizes of factors; operand 2 has groups."""
    channel, group, sizes = grouped(view, view.shape(2)[1])
    return f"n {channel} s..", f"n {group}", sizes


def _group_sums(view: OpView) -> Rule:
    """Data -> sums of a group of each image; factor t is a sum and a sum of squares."""
    channel, group, sizes = grouped(view, view.int_attr("group", 1))
    return view.rule(
        f"n {channel} s..",
        f"t n {group}",
        sizes=sizes,
        reduce="c s..",
        whole="t",
        points=_points(sizes),
        flops=3,
    )


def _points(sizes: Mapping[str, int]) -> str:
    """Loops over the data; a factor of size 1 is no loop."""
    return " ".join(["n", *(name for name in ("g", "c") if sizes[name] != 1), "s.."])


def _group_apply(view: OpView) -> Rule:
    """Data, mean, inverse deviation, weight, bias -> result."""
    data, group, sizes = _group_tensors(view)
    channel = data.removeprefix("n ").removesuffix(" s..")
    operands = f"{data}, {group}, {group}, {channel}, {channel}"
    return view.rule(operands, data, sizes=sizes, flops=4)


def _group_grad_sums(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation -> sums of a channel of each image."""
    data, group, sizes = _group_tensors(view)
    result = "t " + data.removesuffix(" s..")
    operands = f"{data}, {data}, {group}, {group}"
    points = _points(sizes)
    return view.rule(
        operands,
        result,
        sizes=sizes,
        reduce="s..",
        whole="t",
        linear=[0],
        points=points,
        flops=4,
    )


def _group_grad_planes(view: OpView) -> Rule:
    """Gradient, data, mean, inverse deviation, weight, sums -> the data's gradient."""
    data, group, sizes = _group_tensors(view)
    channel = data.removeprefix("n ").removesuffix(" s..")
    operands = f"{data}, {data}, {group}, {group}, {channel}, t n {channel}"
    points = _points(sizes)
    return view.rule(
        operands, data, sizes=sizes, whole="c t", linear=[0, 5], points=points, flops=5
    )


def _local_images(view: OpView, local: LocalView) -> LocalOp:
    """`native_group_norm` takes the sizes of its operand as arguments."""
    groups = local.sizes.get("g", 1)
    return same_node(view, N=local.shapes[0][0], C=local.shapes[0][1], group=groups)


def _batch_apply(view: OpView) -> Rule:
    """Data, mean, variance, weight, bias -> result; linear without mean and bias."""
    linear = [0] if view.type(1) is None and view.type(4) is None else []
    return view.rule("n c s.., c, c, c, c", "n c s..", linear=linear, flops=4)


ROWS: Mapping[str, OpRow] = {
    "aten::_fused_rms_norm": OpRow(partial(_layer_norm, flops=UNCENTRED)),
    "aten::_native_batch_norm_legit_no_training": OpRow(batch_norm),
    "aten::native_group_norm": OpRow(_group_norm, _local_images),
    "aten::native_layer_norm": OpRow(partial(_layer_norm, flops=CENTRED)),
    "partitioner::batch_norm_apply": OpRow(_batch_apply),
    # Gradient, data, mean, inverse deviation, weight, sums -> the data's gradient.
    "partitioner::batch_norm_grad_input": OpRow(
        pattern(
            "n c s.., n c s.., c, c, c, t c -> n c s..",
            whole="t",
            linear=[0, 5],
            points="n c s..",
            flops=5,
        )
    ),
    # Gradient, data, mean, inverse deviation -> gradients of bias and weight.
    "partitioner::batch_norm_grad_sums": OpRow(
        pattern(
            "n c s.., n c s.., c, c -> t c",
            reduce="n s..",
            whole="t",
            linear=[0],
            points="n c s..",
            flops=4,
        )
    ),
    # The batch's mean and variance, the running ones -> the next running ones.
    "partitioner::batch_norm_running": OpRow(pattern("c, c, c, c -> c, c", flops=5)),
    # Sums -> mean, variance, inverse deviation.
    "partitioner::batch_norm_statistics": OpRow(pattern("t c -> c, c, c", whole="t", flops=4)),
    "partitioner::batch_norm_sums": OpRow(
        pattern("n c s.. -> t c", reduce="n s..", whole="t", points="n c s..", flops=3)
    ),
    "partitioner::group_norm_apply": OpRow(_group_apply),
    "partitioner::group_norm_grad_planes": OpRow(_group_grad_planes),
    "partitioner::group_norm_grad_sums": OpRow(_group_grad_sums),
    # Sums -> mean, inverse deviation.
    "partitioner::group_norm_statistics": OpRow(pattern("t n g -> n g, n g", whole="t", flops=4)),
    "partitioner::group_norm_sums": OpRow(_group_sums, local_groups("group")),
    "partitioner::group_norm_grad_input": OpRow(_group_grad_input, local_groups("group")),
    "partitioner::group_norm_grad_weight": OpRow(_group_grad_weight, local_groups("group")),
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
