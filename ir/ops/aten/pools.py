"""Pools and their gradients: batch, channels and space are cut.

A device reads its part of the image with a halo. The indices of maxima that PyTorch gives count
inside a plane of the whole tensor, also on a device that has a part of the plane: so a part is one
piece of each dim, of those too that a window of one element reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from partitioner.ir.graph import Attr, Node
from partitioner.ir.layout import Interval
from partitioner.ir.loops.windows import Window
from partitioner.ir.ops.aten.convolution import cropped, padded, planes, setting
from partitioner.ir.ops.aten.reduction import end_of_range
from partitioner.ir.ops.local import other_node
from partitioner.ir.ops.rules import sliding
from partitioner.ir.ops.rules.sliding import Slide
from partitioner.ir.ops.signature import Shape, names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import numpy_dtype


def _slides(view: OpView, space: int) -> list[Slide]:
    kernel = setting(view, "kernel_size", space, (1,))
    strides = setting(view, "stride", space, kernel)
    dilations = setting(view, "dilation", space, (1,))
    # a part has its own pads on either side
    pads = view.ints("pads") or 2 * setting(view, "padding", space, (0,))
    settings = zip(kernel, strides, dilations, pads[:space], pads[space:], strict=True)
    return [Slide(*numbers) for numbers in settings]


def _volume(slides: Sequence[Slide]) -> int:
    return math.prod(slide.kernel for slide in slides)


def _pool(view: OpView, space: int, *, linear: bool = True, backward: bool = False) -> Rule:
    """A pool over `space` dims or its gradient, one FLOP a point of the window.

    A gradient has the result's, the data, and maybe the indices of maxima.
    """
    dims, slides = planes(view, space), _slides(view, space)
    shapes, windows = (view.shape(), view.out_shape), dict[tuple[int, str], Window]()
    for index in range(0, len(view.types), 2):
        windows |= sliding.windows(
            slides, *shapes, dims, transposed=backward, operand=index, points=True
        )
    flops = float(_volume(slides))
    if backward:
        flops *= math.prod(view.shape()[-space:]) / max(math.prod(view.out_shape[-space:]), 1)
    operands, results = [dims] * len(view.types), [dims, dims]
    return view.rule(operands, results, windows=windows, linear=[0] if linear else [], flops=flops)


def _intervals(region: Sequence[Sequence[Interval]], space: int) -> list[Interval]:
    return [pieces[0] for pieces in region[len(region) - space :]]


def _local_pads(slides: Sequence[Slide], local: LocalView, space: int) -> Sequence[tuple[int, int]]:
    read, written = _intervals(local.regions[0], space), _intervals(local.out_regions[0], space)
    return [slide.local_pads(*at) for slide, *at in zip(slides, read, written, strict=True)]


def _local_max(view: OpView, local: LocalView, space: int) -> LocalOp:
    """The part is padded by the least number, where PyTorch cannot pad it so itself."""
    if not local.regions:
        return LocalOp((view.node,))
    slides = _slides(view, space)
    pads = _local_pads(slides, local, space)
    if len(view.node.writes) > 1:
        befores, afters = zip(*pads, strict=True)
        origin = view.ints("starts") or (0,) * space
        inside = _intervals(local.regions[0], space)
        return other_node(
            view,
            "partitioner::max_pool_part",
            kernel_size=tuple(slide.kernel for slide in slides),
            stride=tuple(slide.stride for slide in slides),
            dilation=tuple(slide.dilation for slide in slides),
            pads=(*befores, *afters),
            starts=tuple(o + start for o, (start, _) in zip(origin, inside, strict=True)),
            whole=view.ints("whole") or view.shape()[-space:],
        )
    node = replace(view.node, attrs={**view.node.attrs, "ceil_mode": False})
    return padded(view, node, 0, local, pads, value=end_of_range(view.out_type.dtype))


def _local_max_backward(view: OpView, local: LocalView, space: int) -> LocalOp:
    if not local.regions:
        return LocalOp((view.node,))
    gradient, _, indices = view.node.inputs
    attrs: dict[str, Attr] = {
        "starts": tuple(start for start, _ in _intervals(local.out_regions[0], space)),
        "sizes": local.out_shapes[0][-space:],
        "whole": view.out_shape[-space:],
    }
    op = "partitioner::max_pool_grad_part"
    return LocalOp((replace(view.node, op=op, inputs=(gradient, indices), attrs=attrs),))


def _part_backward(view: OpView) -> Rule:
    """The gradient of a part of a plane, which is not told of the windows: planes are whole."""
    space = len(view.ints("sizes") or ())
    planes, read, made = (
        names(name, count)
        for name, count in (("n", view.rank() - space), ("r", space), ("s", space))
    )
    return view.rule(
        [[*planes, *read]] * 2,
        [[*planes, *made]],
        whole=[*read, *made],
        points=[*planes, *read],
        linear=[0],
        flops=1.0,
    )


def _shares(view: OpView, space: int, data: Shape, positions: Sequence[Interval]) -> np.ndarray:
    """Points of the window over those that an average divides by, at positions of the result."""
    include, override = view.attr("count_include_pad", True), view.attr("divisor_override")
    slides, shares = _slides(view, space), []
    for slide, size, (start, count) in zip(slides, data[-space:], positions, strict=True):
        first = np.arange(start, start + count) * slide.stride - slide.before
        low, high = (-slide.before, size + slide.after) if include else (0, size)
        points = np.minimum(first + slide.kernel, high) - np.maximum(first, low)
        shares.append(slide.kernel / points if override is None else np.ones(count))
    return reduce(np.multiply.outer, shares)


def _averaged(view: OpView, slides: Sequence[Slide], **attrs: Attr) -> dict[str, Attr]:
    """Attributes of a pool that divides by one number at all positions."""
    override = view.attr("divisor_override")
    return {
        **view.node.attrs,
        "stride": tuple(slide.stride for slide in slides),
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": override if isinstance(override, int) else _volume(slides),
        **attrs,
    }


def _local_average(view: OpView, local: LocalView, space: int) -> LocalOp:
    """The part is padded by zeros; positions that do not count all points have their own share."""
    if not local.regions:
        return LocalOp((view.node,))
    slides, node = _slides(view, space), view.node
    shares = _shares(view, space, view.shape(), _intervals(local.out_regions[0], space))
    pads = _local_pads(slides, local, space)
    pooled = padded(view, replace(node, attrs=_averaged(view, slides)), 0, local, pads)
    if (shares == 1).all():
        return pooled
    mean, share = f"{node.name}.mean", f"{node.name}.share"
    last = replace(pooled.nodes[-1], name=mean, outputs=(mean,))
    scale = Node(node.name, "aten::mul.Tensor", (mean, share), node.outputs)
    part = view.out_type.with_shape(local.out_shapes[0])
    constant = shares.astype(numpy_dtype(part.dtype))
    types = {**pooled.types, mean: part}
    return LocalOp((*pooled.nodes[:-1], last, scale), {share: constant}, types)


def _local_average_backward(view: OpView, local: LocalView, space: int) -> LocalOp:
    """The gradient of a larger part, without padding, from which the device's is sliced."""
    if not local.regions:
        return LocalOp((view.node,))
    slides, node = _slides(view, space), view.node
    read, written = _intervals(local.regions[0], space), _intervals(local.out_regions[0], space)
    crops = [slide.local_crops(*at) for slide, *at in zip(slides, read, written, strict=True)]
    shape = list(local.out_shapes[0])
    for dim, (before, after) in enumerate(crops, len(shape) - space):
        shape[dim] += before + max(after, 0)
    gradient, whole = node.inputs[0], view.out_type.with_shape(shape)
    data, share, scaled = (f"{node.name}.{name}" for name in ("data", "share", "scaled"))
    size: dict[str, Attr] = {"size": tuple(shape)}
    nodes = [Node(data, "aten::new_empty", (gradient,), (data,), size)]
    types, constants = {data: whole}, dict[str, np.ndarray]()
    shares = _shares(view, space, view.out_shape, read)
    if (shares != 1).any():
        constants = {share: shares.astype(numpy_dtype(whole.dtype))}
        types[scaled] = view.out_type.with_shape(local.shapes[0])
        nodes.append(Node(scaled, "aten::mul.Tensor", (gradient, share), (scaled,)))
        gradient = scaled
    attrs = _averaged(view, slides, padding=(0,) * space)
    last = replace(node, inputs=(gradient, data), attrs=attrs)
    part = cropped(last, whole, local.out_shapes[0], crops)
    return LocalOp((*nodes, *part.nodes), constants, {**types, **part.types})


ROWS: Mapping[str, OpRow] = {
    **{
        f"aten::{op.replace('N', str(space))}": OpRow(
            partial(_pool, space=space, linear=linear, backward=op.endswith("backward")),
            partial(localize, space=space),
        )
        for space in (2, 3)
        for op, linear, localize in (
            ("avg_poolNd", True, _local_average),
            ("avg_poolNd_backward", True, _local_average_backward),
            ("max_poolNd_with_indices", False, _local_max),
            ("max_poolNd_with_indices_backward", True, _local_max_backward),
        )
    },
    "partitioner::max_pool_part": OpRow(
        lambda view: _pool(view, len(view.ints("kernel_size") or ()), linear=False),
        lambda view, local: _local_max(view, local, len(view.ints("kernel_size") or ())),
    ),
    "partitioner::max_pool_grad_part": OpRow(_part_backward),
}
