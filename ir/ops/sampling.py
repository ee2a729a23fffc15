"""Sampling of images: Resize, Upsample, GridSample."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from partitioner.ir.ops.spatial import space
from partitioner.ir.ops.table import LocalOp, LocalView, OpaqueError, OpRow, OpView, with_constant
from partitioner.ir.rule import Rule

#: Points that one sample reads along a dim.
TAPS = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}

SIZES = 3  #: Index of Resize's operand "sizes".


def _mode(view: OpView) -> str:
    return str(view.attr("mode", "nearest"))


def resize(view: OpView) -> Rule:
    """Dims that keep their size are cut, resized ones are whole.

    Raises:
        OpaqueError: The resize crops: a dim that keeps its size may still be resampled.
    """
    if view.attr("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise OpaqueError("coordinate_transformation_mode is tf_crop_and_resize")
    if view.type(SIZES) is not None:
        view.constant(SIZES)  # must be known, to be made local
    x, out = view.shape(0), view.out_shape()
    kept = [a == b and scale == 1 for a, b, scale in zip(x, out, _scales(view), strict=True)]
    taps = TAPS.get(_mode(view), 1) ** kept.count(False)
    before = [f"d{i}" if keep else f"x{i}" for i, keep in enumerate(kept)]
    after = [f"d{i}" if keep else f"y{i}" for i, keep in enumerate(kept)]
    return Rule.of(
        [before, *([None] * (len(view.node.inputs) - 1))],
        [after],
        view.shapes,
        view.out_shapes,
        whole={name for name in (*before, *after) if not name.startswith("d")},
        points=after,
        flops=2.0 * taps if taps > 1 else 0.0,
    )


def _scales(view: OpView) -> list[float]:
    """Scale of every dim; dims that the node does not name are 1."""
    rank = len(view.shape(0))
    given = _given_scales(view)
    found = [1.0] * rank
    if given is None:
        given = [_scale(view, axis) for axis in _axes(view)]
    for axis, scale in zip(_axes(view), given, strict=True):
        found[axis] = scale
    return found


def _scale(view: OpView, axis: int) -> float:
    """Scale of a dim whose size is given; kept aspect ratios are not a dim's own affair."""
    if view.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        return float("nan")
    return view.out_shape()[axis] / view.shape(0)[axis]


def _given_scales(view: OpView) -> list[float] | None:
    attr = view.attr("scales")
    if isinstance(attr, tuple):
        return [float(scale) for scale in attr]
    index = 2 if view.node.op == "Resize" and view.opset >= 11 else 1
    held = view.type(index)
    return None if held is None or held.numel == 0 else [float(s) for s in view.constant(index)]


def _axes(view: OpView) -> list[int]:
    rank = len(view.shape(0))
    axes = view.ints("axes")
    return list(range(rank)) if axes is None else [axis % rank for axis in axes]


def local_sizes(view: OpView, local: LocalView) -> LocalOp:
    """The sizes of cut dims become the device's own."""
    held = view.type(SIZES)
    if view.node.op != "Resize" or held is None or held.numel == 0:
        return LocalOp((view.node,))
    whole = view.constant(SIZES)
    sizes = [
        local.out_shapes[0][axis] if f"d{axis}" in local.sizes else int(size)
        for axis, size in zip(_axes(view), whole, strict=True)
    ]
    return with_constant(view, SIZES, np.array(sizes, whole.dtype))


def grid_sample(view: OpView) -> Rule:
    """``n c x.., n o.. d -> n c o..``: the image is whole, the sampled places are cut."""
    rank = len(view.shape(0))
    image, places = space("x", rank), space("o", rank)
    taps = TAPS.get(str(view.attr("mode", "linear")), 1) ** len(places)
    return Rule.of(
        [["n", "c", *image], ["n", *places, "d"]],
        [["n", "c", *places]],
        view.shapes,
        view.out_shapes,
        whole={*image, "d"},
        points=["n", "c", *places],
        flops=2.0 * taps + 4 * len(places),
    )


ROWS: Mapping[str, OpRow] = {
    "GridSample": OpRow(grid_sample),
    "Resize": OpRow(resize, local_sizes),
    "Upsample": OpRow(resize, local_sizes),
}
