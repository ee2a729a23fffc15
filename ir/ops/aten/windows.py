"""Adaptive pools, upsampling and samples at a grid, and their gradients.

Batch and channels are cut, and space where an image grows by a whole number. The indices of maxima
that PyTorch gives count inside a plane, so that they hold in a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from partitioner.ir.graph import Attr
from partitioner.ir.loops.windows import Window
from partitioner.ir.ops.aten.convolution import cropped, planes, setting
from partitioner.ir.ops.local import local_groups
from partitioner.ir.ops.rules import sliding
from partitioner.ir.ops.rules.sliding import Zoom
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

#: Mode and number of spatial dims of PyTorch's operators.
UPSAMPLING: Mapping[str, tuple[str, int]] = {
    "_upsample_bicubic2d_aa": ("cubic", 2),
    "_upsample_bilinear2d_aa": ("linear", 2),
    "_upsample_nearest_exact1d": ("nearest", 1),
    "_upsample_nearest_exact2d": ("nearest", 2),
    "_upsample_nearest_exact3d": ("nearest", 3),
    "upsample_bicubic2d": ("cubic", 2),
    "upsample_bilinear2d": ("linear", 2),
    "upsample_linear1d": ("linear", 1),
    "upsample_nearest1d": ("nearest", 1),
    "upsample_nearest2d": ("nearest", 2),
    "upsample_nearest3d": ("nearest", 3),
    "upsample_trilinear3d": ("linear", 3),
}


def _resampled(view: OpView, space: int, operands: str = "s", *, linear: bool = True) -> Rule:
    """``n.. s.. -> n.. o..``, s and o whole; `operands` has the prefix, s or o, of each operand."""
    first, result = planes(view, space), planes(view, space, "o")
    return view.rule(
        [first if prefix == "s" else result for prefix in operands],
        [result, result],
        whole=[*first[-space:], *result[-space:]],
        linear=[0] if linear else [],
        points=first,
        flops=1,
    )


def _upsample(view: OpView, mode: str, space: int, *, backward: bool = False) -> Rule:
    """A multiply-add a tap of an element of the larger tensor, linear; grown dims have a halo."""
    mode, space = mode or _mode(view), space or view.rank() - 2
    points = sliding.TAPS[mode] ** space
    zooms, rank = _zooms(view, mode, space, backward=backward), view.rank()
    first, last = planes(view, space), planes(view, space, "o")
    shape, windows = view.shape(), dict[tuple[int, str], Window]()
    for dim, zoom in zooms.items():
        first[dim] = last[dim]
        size = shape[dim]
        windows[0, last[dim]] = zoom.gradient(size) if backward else zoom.window(size)
    flops = 0.0 if points == 1 else 2.0 * points
    if backward:
        flops *= math.prod(shape[-space:]) / max(math.prod(view.out_shape[-space:]), 1)
    uncut = [name for dim in range(rank) if dim not in zooms for name in (first[dim], last[dim])]
    return view.rule(
        [first],
        [last],
        whole=[name for name in uncut if name[0] != "n"],
        windows=windows,
        linear=[0],
        points=last,
        flops=flops,
    )


def _zooms(view: OpView, mode: str, space: int, *, backward: bool = False) -> dict[int, Zoom]:
    """Dims that grow by a whole number, so that each part is resized as the whole is."""
    small, large = view.shape(), view.out_shape
    if backward:
        small, large = large, small
    scales = [value for name, value in view.node.attrs.items() if name.startswith("scale")]
    listed = [v for value in scales for v in (value if isinstance(value, tuple) else (value,))]
    given = [float(v) for v in listed if isinstance(v, int | float)]
    antialias = "_aa" in view.node.op or "antialias" in str(view.attr("mode"))
    if antialias or view.attr("align_corners") or len(given) not in (0, space):
        return {}
    zooms = {}
    for place, dim in enumerate(range(len(small) - space, len(small))):
        zoom = sliding.zoom(mode, small[dim], large[dim])
        if zoom is not None and (not given or given[place] == zoom.factor):
            zooms[dim] = zoom
    return zooms


def _local_upsample(
    view: OpView, local: LocalView, mode: str, space: int, *, backward: bool = False
) -> LocalOp:
    """The device's part of what its data give or, of a gradient, of that of what they reach."""
    mode, space = mode or _mode(view), space or view.rank() - 2
    zooms = _zooms(view, mode, space, backward=backward) if local.regions else {}
    shape, crops = list(local.out_shapes[0]), [(0, 0)] * space
    for dim, zoom in zooms.items():
        ((read, count),), ((start, _),) = local.regions[0][dim], local.out_regions[0][dim]
        if backward:
            first, shape[dim] = read // zoom.factor, count // zoom.factor
        else:
            first, shape[dim] = read * zoom.factor, count * zoom.factor
        crops[dim - len(shape)] = start - first, 0
    attrs: dict[str, Attr] = {"input_size": tuple(shape)} if backward else {}
    if view.attr("output_size") is not None:
        attrs["output_size"] = tuple((local.shapes[0] if backward else shape)[-space:])
    node = replace(view.node, attrs={**view.node.attrs, **attrs})
    return cropped(node, view.out_type.with_shape(shape), local.out_shapes[0], crops)


def _mode(view: OpView) -> str:
    return str(view.attr("mode")).partition("-")[0]


def _grid_sample(view: OpView, operands: str, results: str) -> Rule:
    """Positions are whole, and for the gradient of the grid, the second result, channels are."""
    gradient = any(tensor is not None for tensor in view.out_types[1:])
    return view.rule(
        operands,
        results,
        whole="c h w p q t" if gradient else "h w p q t",
        linear=[0],
        points="n c p q",
        flops=8,  # a bilinear sample is 4 weights and 4 multiply-adds
    )


def _columns(view: OpView, operand: str, result: str, *, flops: float = 0) -> Rule:
    """The windows of an image side by side, or added up to an image."""
    return view.rule(
        operand,
        result,
        sizes={"k": math.prod(setting(view, "kernel_size", 2, (1,)))},
        whole="h w k l",
        linear=[0],
        points="n.. c k l",
        flops=flops,
    )


_DEEP, _WIDE = "n.. (c a b) h w", "n.. c (h a) (w b)"  #: Blocks of pixels in channels, in space.


def _pixels(view: OpView, operand: str, result: str, *, factor: str) -> Rule:
    """Blocks of pixels become channels or the reverse; attribute `factor` is a block's width."""
    width = view.int_attr(factor, 1)
    return view.rule(operand, result, sizes={"a": width, "b": width}, whole="a b", linear=[0])


def _channel_shuffle(view: OpView) -> Rule:
    groups = view.int_attr("groups", 1)
    sizes = {"g": groups, "c": view.shape()[1] // groups}
    return view.rule("n (g c) s..", "n (c g) s..", sizes=sizes, linear=[0])


def _upsampling(mode: str = "", space: int = 0, *, backward: bool = False) -> OpRow:
    """Row of upsampling; its mode is an attribute if none is given."""
    how: Mapping[str, Any] = {"mode": mode, "space": space, "backward": backward}
    return OpRow(partial(_upsample, **how), partial(_local_upsample, **how))


ROWS: Mapping[str, OpRow] = {
    **{  # adaptive pools read every element about once
        f"aten::{op.replace('N', str(space))}": OpRow(
            partial(_resampled, space=space, operands=operands, linear=linear)
        )
        for space in (2, 3)
        for op, operands, linear in (
            ("_adaptive_avg_poolNd", "s", True),
            ("_adaptive_avg_poolNd_backward", "so", True),
            ("adaptive_max_poolNd", "s", False),
            ("adaptive_max_poolNd_backward", "sos", True),
        )
    },
    **{
        f"aten::{op}{form}": _upsampling(*mode, backward=form == "_backward")
        for op, mode in UPSAMPLING.items()
        for form in ("", ".vec", "_backward")
    },
    "aten::channel_shuffle": OpRow(_channel_shuffle, local_groups("groups")),
    "aten::col2im": OpRow(partial(_columns, operand="n.. (c k) l", result="n.. c h w", flops=1)),
    "aten::grid_sampler_2d": OpRow(
        partial(_grid_sample, operands="n c h w, n p q t", results="n c p q")
    ),
    "aten::grid_sampler_2d_backward": OpRow(
        partial(_grid_sample, operands="n c p q, n c h w, n p q t", results="n c h w, n p q t")
    ),
    "aten::im2col": OpRow(partial(_columns, operand="n.. c h w", result="n.. (c k) l")),
    "aten::max_unpool2d": OpRow(partial(_resampled, space=2, operands="ss", linear=False)),
    "aten::pixel_shuffle": OpRow(
        partial(_pixels, operand=_DEEP, result=_WIDE, factor="upscale_factor")
    ),
    "aten::pixel_unshuffle": OpRow(
        partial(_pixels, operand=_WIDE, result=_DEEP, factor="downscale_factor")
    ),
    "partitioner::upsample": _upsampling(),
    "partitioner::upsample_backward": _upsampling(backward=True),
}
