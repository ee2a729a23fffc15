"""Windows over space: convolutions, pools, resizes and samples of images.

Batch, groups and channels are cut; the places of windows are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from partitioner.ir.ops.onnx.reduction import weighted_mean
from partitioner.ir.ops.rules.convolution import ConvDims, conv, conv_transpose
from partitioner.ir.ops.rules.reshape import resize
from partitioner.ir.ops.signature import OpaqueError
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, local_groups, with_constant
from partitioner.ir.rule import Rule

#: Points that one sample reads along a dim.
TAPS = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}

SIZES = 3  #: Index of Resize's operand "sizes".


def _conv_dims(view: OpView, weights: int = 1) -> ConvDims:
    return ConvDims.of(view.shape(weights), view.int_attr("group", 1))


def _conv(view: OpView) -> Rule:
    dims = _conv_dims(view)
    return conv(view, dims, [dims.data, dims.weights, dims.channel], bias=2)


def _conv_integer(view: OpView) -> Rule:
    """Conv of quantised tensors; zero points for the tensor or an output channel."""
    dims = _conv_dims(view)
    settings = [_per_channel(view, index, dims) for index in (2, 3)]
    return conv(view, dims, [dims.data, dims.weights, *settings])


def _qlinear_conv(view: OpView) -> Rule:
    """Conv of quantised tensors, quantised again: ci is whole, since the sum is rounded."""
    dims = _conv_dims(view, 3)
    settings = [_per_channel(view, index, dims) for index in (1, 2, 4, 5, 6, 7)]
    operands = [dims.data, *settings[:2], dims.weights, *settings[2:], dims.channel]
    return conv(view, dims, operands, rounded=True)


def _per_channel(view: OpView, index: int, dims: ConvDims) -> list[str] | None:
    kind = view.type(index)
    if kind is None:
        return None
    return dims.channel if kind.numel > 1 else ["1"] * kind.rank


def _conv_transpose(view: OpView) -> Rule:
    dims = ConvDims.transposed(view.shape(1), view.int_attr("group", 1))
    return conv_transpose(view, dims)


def _lrn(view: OpView) -> Rule:
    """The window runs over channels: they are whole, everything else is cut."""
    flops = 2.0 * view.int_attr("size", 1) + 10  # a window of squares, then a power
    return view.rule("n c s..", "n c s..", whole="c", flops=flops)


def _pool(view: OpView) -> Rule:
    """``n c s.. -> n c s..``, one FLOP a point of the window."""
    if len(view.node.writes) > 1:
        raise OpaqueError("result Indices counts through the whole tensor")
    flops = float(math.prod(view.ints("kernel_shape") or ()))
    return view.rule("n c s..", "n c s..", halo="s..", flops=flops)


def _global_pool(view: OpView, how: str = "") -> Rule:
    """``n c s.. -> n c 1..``: parts of space join where the reduction does."""
    places = [f"s{i}" for i in range(view.rank() - 2)]
    return view.rule(
        ["n c s.."],
        [["n", "c", *["1"] * len(places)]],
        reduce=dict.fromkeys(places, how) if how else (),
        whole=() if how else places,
        flops=1 if how else 2,
    )


def _local_average(view: OpView, local: LocalView) -> LocalOp:
    """Where space is cut, a device adds its own average by its share of the places."""
    return weighted_mean(view, local, range(2, view.rank()), keepdims=1)


def _regions(view: OpView) -> Rule:
    """RoiAlign and MaxRoiPool: the regions name images of all n."""
    windows = view.int_attr("sampling_ratio", 2) ** 2 or 4
    return view.rule(
        "n c h w, r box, r",
        "r c p q",
        whole="n h w box p q",
        points="r c p q",
        flops=8.0 * windows,  # a bilinear sample is 4 weights and 4 multiply-adds
    )


def _resize(view: OpView) -> Rule:
    """Dims that keep their size are cut, resized ones are whole."""
    if view.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        # It crops: a dim that keeps its size may still be resampled.
        raise OpaqueError("coordinate_transformation_mode is tf_crop_and_resize")
    if view.type(SIZES) is not None:
        view.constant(SIZES)  # must be known, to be made local
    sizes = zip(view.shape(), view.out_shape, _scales(view), strict=True)
    changed = {dim for dim, (a, b, scale) in enumerate(sizes) if not (a == b and scale == 1)}
    taps = TAPS.get(str(view.attr("mode", "nearest")), 1) ** len(changed)
    return resize(view, changed, flops=2.0 * taps if taps > 1 else 0.0)


def _scales(view: OpView) -> list[float]:
    """Scale of every dim; dims that the node does not name are 1."""
    scales = [1.0] * view.rank()
    dims = _resized_dims(view)
    given = _given_scales(view)
    for dim, scale in zip(dims, given or [_scale(view, dim) for dim in dims], strict=True):
        scales[dim] = scale
    return scales


def _scale(view: OpView, dim: int) -> float:
    """Scale of a dim whose size is given; kept aspect ratios are not a dim's own affair."""
    if view.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        return float("nan")
    return view.out_shape[dim] / view.shape()[dim]


def _given_scales(view: OpView) -> list[float] | None:
    attr = view.attr("scales")
    if isinstance(attr, tuple):
        return [float(scale) for scale in attr]
    index = 2 if view.node.op == "Resize" and view.opset >= 11 else 1
    kind = view.type(index)
    return None if kind is None or kind.numel == 0 else [float(s) for s in view.constant(index)]


def _resized_dims(view: OpView) -> list[int]:
    axes = view.ints("axes")
    return list(range(view.rank())) if axes is None else [axis % view.rank() for axis in axes]


def _local_sizes(view: OpView, local: LocalView) -> LocalOp:
    """The sizes of cut dims become the device's own."""
    kind = view.type(SIZES)
    if view.node.op != "Resize" or kind is None or kind.numel == 0:
        return LocalOp((view.node,))
    whole = view.constant(SIZES)
    sizes = [
        local.out_shapes[0][dim] if f"d{dim}" in local.sizes else int(size)
        for dim, size in zip(_resized_dims(view), whole, strict=True)
    ]
    return with_constant(view, SIZES, np.array(sizes, whole.dtype))


def _grid_sample(view: OpView) -> Rule:
    """The image is whole, the sampled places are cut."""
    space = view.rank() - 2
    taps = TAPS.get(str(view.attr("mode", "linear")), 1) ** space
    return view.rule(
        "n c x.., n o.. d",
        "n c o..",
        whole="x.. d",
        points="n c o..",
        flops=2.0 * taps + 4 * space,
    )


ROWS: Mapping[str, OpRow] = {
    **{op: OpRow(_pool) for op in ("AveragePool", "LpPool", "MaxPool")},
    **{op: OpRow(_regions) for op in ("MaxRoiPool", "RoiAlign")},
    **{op: OpRow(_resize, _local_sizes) for op in ("Resize", "Upsample")},
    "Conv": OpRow(_conv, local_groups("group")),
    "ConvInteger": OpRow(_conv_integer, local_groups("group")),
    "ConvTranspose": OpRow(_conv_transpose, local_groups("group")),
    "GlobalAveragePool": OpRow(partial(_global_pool, how="sum"), _local_average),
    "GlobalLpPool": OpRow(_global_pool),
    "GlobalMaxPool": OpRow(partial(_global_pool, how="max")),
    "GridSample": OpRow(_grid_sample),
    "LRN": OpRow(_lrn),
    "QLinearConv": OpRow(_qlinear_conv, local_groups("group")),
}
