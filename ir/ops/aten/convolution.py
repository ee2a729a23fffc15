"""Convolutions and their gradients: batch, groups and channels are cut, space is not."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.graph import Attr
from partitioner.ir.ops.spatial import (
    ConvDims,
    channel_loops,
    conv_dims,
    conv_rule,
    transposed_dims,
    transposed_rule,
)
from partitioner.ir.ops.table import (
    Localize,
    LocalOp,
    LocalView,
    OpRow,
    OpView,
    Shape,
    same_node,
)
from partitioner.ir.rule import Rule


def convolution(view: OpView) -> Rule:
    """Data, weights, bias; transposed or not. Linear in the data where there is no bias."""
    linear = {0} if view.type(2) is None else set()
    dims = _dims(view, view.shape(1), "s")
    if view.attr("transposed"):
        return transposed_rule(view, dims, linear)
    return conv_rule(view, [dims.data, dims.weights, dims.channel], dims, bias=2, linear=linear)


def grad_input(view: OpView) -> Rule:
    """``result, weights -> data``: output channels are summed."""
    dims = _dims(view, view.shape(1), "o")
    return _gradient(view, dims, dims.weights, dims.data, "co")


def grad_weight(view: OpView) -> Rule:
    """``result, data -> weights``: the batch is summed."""
    dims = _dims(view, view.out_shape(), "o")
    return _gradient(view, dims, dims.data, dims.weights, "n")


def _dims(view: OpView, weights: Shape, out: str) -> ConvDims:
    group = view.int_attr("groups", 1)
    if view.attr("transposed"):
        return transposed_dims(weights, group)
    return conv_dims(weights, group, out)


def _gradient(
    view: OpView, dims: ConvDims, other: list[str], gradient: list[str], summed: str
) -> Rule:
    """Rule of a gradient, which does the work of the convolution."""
    inner, outer = dims.data[2:], dims.result[2:]
    windows = inner if view.attr("transposed") else outer
    return Rule.of(
        [dims.result, other],
        [gradient],
        view.shapes,
        view.out_shapes,
        sizes=dims.sizes,
        reduce={summed: "sum"},
        whole={*inner, *outer, *dims.kernel},
        linear={0},
        points=[*channel_loops(dims.sizes), *windows, *dims.kernel],
        flops=2,
    )


def _groups(local: LocalView) -> dict[str, Attr]:
    return {"groups": local.sizes["g"]} if "g" in local.sizes else {}


def local_convolution(view: OpView, local: LocalView) -> LocalOp:
    """A device convolves its own groups."""
    return same_node(view, **_groups(local))


def local_gradient(size: str) -> Localize:
    """A device makes its part of the gradient, whose shape is attribute `size`."""
    return lambda view, local: same_node(
        view, **_groups(local), **{size: tuple(local.out_shapes[0])}
    )


ROWS: Mapping[str, OpRow] = {
    "aten::convolution": OpRow(convolution, local_convolution),
    "partitioner::convolution_grad_input": OpRow(grad_input, local_gradient("input_size")),
    "partitioner::convolution_grad_weight": OpRow(grad_weight, local_gradient("weight_size")),
}
