"""Windows over space: convolutions, pools, resizes and samples of images.

Batch, groups and channels are cut; the positions of windows are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from partitioner.ir.ops.local import local_groups, with_constant
from partitioner.ir.ops.onnx.reduction import weighted_mean
from partitioner.ir.ops.rules.convolution import ConvDims, conv
from partitioner.ir.ops.rules.dims import names
from partitioner.ir.ops.rules.reshape import changed_dims, resize
from partitioner.ir.ops.signature import OpaqueError
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

#: Points that one sample reads along a dim.
TAPS = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}

SIZES = 3  #: Index of Resize's operand "sizes".


def _conv_dims(view: OpView, weights: int = 1, *, transposed: bool = False) -> ConvDims:
    return ConvDims.of(view.shape(weights), view.positive("group", 1), transposed=transposed)


def _conv(view: OpView, *, transposed: bool = False) -> Rule:
    dims = _conv_dims(view, transposed=transposed)
    return conv(view, dims, [dims.data, dims.weights, dims.channel], bias=2)


def _conv_integer(view: OpView) -> Rule:
    """Zero points are one for the tensor or one for each output channel."""
    dims = _conv_dims(view)
    settings = [_per_channel(view, index, dims) for index in (2, 3)]
    return conv(view, dims, [dims.data, dims.weights, *settings])


def _qlinear_conv(view: OpView) -> Rule:
    """The sum is quantised again."""
    dims = _conv_dims(view, 3)
    settings = [_per_channel(view, index, dims) for index in (1, 2, 4, 5, 6, 7)]
    operands = [dims.data, *settings[:2], dims.weights, *settings[2:], dims.channel]
    return conv(view, dims, operands, rounded=True)


def _per_channel(view: OpView, index: int, dims: ConvDims) -> list[str] | None:
    setting = view.type(index)
    if setting is None:
        return None
    return dims.channel if setting.numel > 1 else ["1"] * setting.rank


def _lrn(view: OpView) -> Rule:
    """The window runs over channels: these are whole, everything else is cut."""
    flops = 2.0 * view.int_attr("size", 1) + 10  # a window of squares, then a power
    return view.rule("n c s..", "n c s..", whole="c", flops=flops)


def _pool(view: OpView) -> Rule:
    """``n c s.. -> n c s..``, one FLOP a point of the window."""
    if len(view.node.writes) > 1:
        raise OpaqueError("result Indices counts through the whole tensor")
    flops = float(math.prod(view.ints("kernel_shape") or ()))
    return view.rule("n c s..", "n c s..", halo="s..", flops=flops)


def _global_pool(view: OpView, how: str = "") -> Rule:
    """``n c s.. -> n c 1..``: space is cut if a reduction combines partial results."""
    space = names("s", view.rank() - 2)
    return view.rule(
        "n c s..",
        [["n", "c", *["1"] * len(space)]],
        reduce=dict.fromkeys(space, how) if how else (),
        whole=() if how else space,
        flops=1 if how else 2,
    )


def _local_average(view: OpView, local: LocalView) -> LocalOp:
    """Where space is cut, a device adds its part's average times its share of the positions."""
    return weighted_mean(view, local, range(2, view.rank()), keepdims=1)


def _regions(view: OpView) -> Rule:
    """RoiAlign and MaxRoiPool; a region may be of any image of the batch, which is whole."""
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
    changed = changed_dims(view)
    dims, scales = _resized_dims(view), _scales(view)
    if scales is not None:
        changed |= {dim for dim, scale in zip(dims, scales, strict=True) if scale != 1}
    elif view.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        changed |= set(dims)  # the scale of a dim follows from the others' sizes
    taps = TAPS.get(str(view.attr("mode", "nearest")), 1) ** len(changed)
    return resize(view, changed, flops=2.0 * taps if taps > 1 else 0.0)


def _scales(view: OpView) -> list[float] | None:
    """Scales of the resized dims; None if sizes are given."""
    attr = view.attr("scales")
    if isinstance(attr, tuple):
        return [float(scale) for scale in attr]
    index = 2 if view.node.op == "Resize" and view.opset >= 11 else 1
    scales = view.type(index)
    if scales is None or scales.numel == 0:
        return None
    return [float(scale) for scale in view.constant(index)]


def _resized_dims(view: OpView) -> list[int]:
    """The dims that scales or sizes are given for, in their order."""
    axes = view.ints("axes")
    return list(range(view.rank())) if axes is None else [axis % view.rank() for axis in axes]


def _local_sizes(view: OpView, local: LocalView) -> LocalOp:
    """The wanted sizes of cut dims become the local ones."""
    sizes = view.type(SIZES)
    if view.node.op != "Resize" or sizes is None or sizes.numel == 0:
        return LocalOp((view.node,))
    whole = view.constant(SIZES)
    local_sizes = [
        local.out_shapes[0][dim] if f"d{dim}" in local.sizes else int(size)
        for dim, size in zip(_resized_dims(view), whole, strict=True)
    ]
    return with_constant(view, SIZES, np.array(local_sizes, whole.dtype))


def _grid_sample(view: OpView) -> Rule:
    """Images are whole, the sampled positions are cut."""
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
    "ConvTranspose": OpRow(partial(_conv, transposed=True), local_groups("group")),
    "GlobalAveragePool": OpRow(partial(_global_pool, how="sum"), _local_average),
    "GlobalLpPool": OpRow(_global_pool),
    "GlobalMaxPool": OpRow(partial(_global_pool, how="max")),
    "GridSample": OpRow(_grid_sample),
    "LRN": OpRow(_lrn),
    "QLinearConv": OpRow(_qlinear_conv, local_groups("group")),
}
