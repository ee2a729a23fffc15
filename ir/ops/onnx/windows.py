"""Windows over space: convolutions, pools, resizes and samples of images.

Batch, groups, channels and space are cut: a device reads its part of the image with a halo, and
pads what lies at the image's border.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.graph import Attr
from partitioner.ir.layout import Interval
from partitioner.ir.ops.local import own_groups, same_node, with_constant
from partitioner.ir.ops.onnx.reduction import weighted_mean
from partitioner.ir.ops.pieces import part_of
from partitioner.ir.ops.rules import sliding
from partitioner.ir.ops.rules.convolution import ConvDims, conv
from partitioner.ir.ops.rules.reshape import changed_dims, resize
from partitioner.ir.ops.rules.sliding import Slide, Zoom
from partitioner.ir.ops.signature import OpaqueError, names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

SIZES = 3  #: Index of Resize's operand "sizes".

#: First opset in which Resize has its modes as attributes.
RESIZE_MODES = 11


def _slides(view: OpView, kernel: Sequence[int], *, dilated: bool = True) -> list[Slide]:
    """The windows of a convolution or a pool; see `sliding.same_pads`."""
    slides, auto = _stated_slides(view, kernel), str(view.attr("auto_pad", "NOTSET"))
    if not auto.startswith("SAME"):
        return slides
    padded = [
        sliding.same_pads(slide, size, auto, dilated=dilated)
        for slide, size in zip(slides, view.shape()[2:], strict=True)
    ]
    # One element may be left out at the end, unless a window of another extent reaches it.
    least = [-1 if dilated or slide.dilation == 1 else 0 for slide in padded]
    if any(slide.before + slide.after < few for slide, few in zip(padded, least, strict=True)):
        raise OpaqueError(f"auto_pad {auto} leaves out elements, each runtime others")
    return [replace(slide, after=max(slide.after, 0)) for slide in padded]


def _stated_slides(view: OpView, kernel: Sequence[int]) -> list[Slide]:
    """The windows with the padding that is stated; none under auto_pad."""
    space = len(kernel)
    ones, zeros = (1,) * space, (0,) * (2 * space)
    strides, dilations = view.ints("strides") or ones, view.ints("dilations") or ones
    pads, auto = view.ints("pads") or zeros, str(view.attr("auto_pad", "NOTSET"))
    if len(strides) != space or len(dilations) != space or len(pads) != 2 * space:
        raise IRError(f"strides {strides}, dilations {dilations}, pads {pads} for {space} dims")
    pairs = zip(pads[:space], pads[space:], strict=True)
    if auto not in ("", "NOTSET"):
        pairs = zip(zeros[:space], zeros[:space], strict=True)
    return [
        Slide(size, stride, dilation, *pad)
        for size, stride, dilation, pad in zip(kernel, strides, dilations, pairs, strict=True)
    ]


def _back_slides(view: OpView, kernel: Sequence[int]) -> list[Slide]:
    """Windows of a transposed convolution; of a stated result, the rest is cropped in halves."""
    slides, auto = _stated_slides(view, kernel), str(view.attr("auto_pad", "NOTSET"))
    if view.attr("output_shape") is None and not auto.startswith("SAME"):
        return slides
    more = view.ints("output_padding") or (0,) * len(kernel)
    sizes = zip(slides, view.shape()[2:], view.out_shape[2:], more, strict=True)
    totals = [(size - 1) * s.stride + s.extent + extra - count for s, size, count, extra in sizes]
    if min(totals) < 0:
        raise OpaqueError(f"the result {view.out_shape[2:]} has more than the windows reach")
    halves = [total // 2 if auto == "SAME_UPPER" else -(-total // 2) for total in totals]
    return [
        replace(slide, before=half, after=total - half)
        for slide, half, total in zip(slides, halves, totals, strict=True)
    ]


def _conv(
    view: OpView, operands: str = "x w b", *, rounded: bool = False, transposed: bool = False
) -> Rule:
    """Operands are data x, weights w, bias b, an image y like the result, or settings.

    Those are one for the tensor or one for each output channel. Where the sum is rounded, or an
    activation follows, it is needed over all input channels.
    """
    names = operands.split()
    weights = view.shape(names.index("w"))
    dims = ConvDims.of(weights, view.positive("group", 1), transposed=transposed)
    tensors = {"x": dims.data, "w": dims.weights, "b": dims.channel, "y": dims.result}
    listed = [tensors.get(name) or _setting(view, i, dims) for i, name in enumerate(names)]
    slides = (_back_slides if transposed else _slides)(view, weights[2:])
    bias = names.index("b") if "b" in names and not rounded else None
    return conv(view, dims, listed, slides, bias=bias, rounded=rounded)


def _setting(view: OpView, index: int, dims: ConvDims) -> list[str] | None:
    setting = view.type(index)
    if setting is None:
        return None
    return dims.channel if setting.numel > 1 else ["1"] * setting.rank


def _local_conv(view: OpView, local: LocalView, weights: int = 1) -> LocalOp:
    attrs = own_groups(local, "group")
    if local.regions:
        attrs |= _local_pads(view, local, _slides(view, view.shape(weights)[2:]))
    return same_node(view, **attrs)


def _local_conv_transpose(view: OpView, local: LocalView) -> LocalOp:
    """The device's own groups; what it crops."""
    attrs = own_groups(local, "group")
    if local.regions:
        slides = _back_slides(view, view.shape(1)[2:])
        crops = [slide.local_crops(*at) for slide, at in zip(slides, _places(local), strict=True)]
        firsts, lasts = zip(*crops, strict=True)
        attrs["pads"] = (*firsts, *(max(last, 0) for last in lasts))
        attrs |= {"output_padding": tuple(max(-last, 0) for last in lasts), "auto_pad": "NOTSET"}
    node = same_node(view, **attrs).nodes[0]
    kept = {k: v for k, v in node.attrs.items() if not local.regions or k != "output_shape"}
    return LocalOp((replace(node, attrs=kept),))


def _places(local: LocalView) -> list[tuple[Interval, Interval]]:
    """A device's parts of the whole data and of the whole result, by spatial dim."""
    sides = zip(local.regions[0][2:], local.out_regions[0][2:], strict=True)
    return [(read[0], written[0]) for read, written in sides]


def _local_pads(view: OpView, local: LocalView, slides: Sequence[Slide]) -> dict[str, Attr]:
    """The pads at the image's border; none where a device's part ends inside.

    With ceil_mode, the last window may reach beyond the padding, which keeps its size.
    """
    pads = [slide.local_pads(*at) for slide, at in zip(slides, _places(local), strict=True)]
    firsts = [before for before, _ in pads]
    lasts = [min(after, s.after) for (_, after), s in zip(pads, slides, strict=True)]
    attrs: dict[str, Attr] = {"pads": (*firsts, *lasts)}
    if view.attr("auto_pad") is not None:
        attrs["auto_pad"] = "NOTSET"
    return attrs


def _pool(view: OpView) -> Rule:
    if len(view.node.writes) > 1:
        raise OpaqueError("result Indices counts through the whole tensor")
    kernel, dims = view.ints("kernel_shape") or (), names("s", view.rank() - 2)
    slides = _pool_slides(view)
    ceil = bool(view.int_attr("ceil_mode", 0))
    sizes = zip(slides, view.shape()[2:], strict=True)
    counts = tuple(slide.positions(size, ceil=ceil) for slide, size in sizes)
    if counts != view.out_shape[2:]:
        raise OpaqueError(f"ONNX Runtime pools to {counts}, and not to {view.out_shape[2:]}")
    slid = sliding.windows(slides, view.shape(), view.out_shape, dims)
    return view.rule("n c s..", "n c s..", windows=slid, flops=float(math.prod(kernel)))


def _pool_slides(view: OpView) -> list[Slide]:
    return _slides(view, view.ints("kernel_shape") or (), dilated=False)


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


def _resize(view: OpView) -> Rule:
    """Dims that keep their size are cut, and those that grow by a whole number, with a halo."""
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
    taps = sliding.TAPS.get(str(view.attr("mode", "nearest")), 1) ** len(changed)
    slid = {dim: zoom.window(view.shape()[dim]) for dim, zoom in _zooms(view).items()}
    return resize(view, changed, slid, flops=2.0 * taps if taps > 1 else 0.0)


def _zooms(view: OpView) -> dict[int, Zoom]:
    """Dims that grow by a whole number, so that each part is resized as the whole is."""
    mode = str(view.attr("mode", "nearest"))
    if mode not in sliding.REACH or view.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        return {}
    if view.attr("antialias", 0) or view.attr("exclude_outside", 0):
        return {}
    old = view.node.op == "Upsample" or view.opset < RESIZE_MODES
    how = str(view.attr("coordinate_transformation_mode", "asymmetric" if old else "half_pixel"))
    rounding = str(view.attr("nearest_mode", "floor" if old else "round_prefer_floor"))
    if how not in ("asymmetric", "half_pixel", "pytorch_half_pixel"):
        return {}
    if mode == "nearest" and rounding.startswith("round_prefer") == (how == "asymmetric"):
        return {}
    if mode == "nearest" and rounding == "ceil":
        return {}
    sizes = zip(view.shape(), view.out_shape, strict=True)
    zooms = {dim: sliding.zoom(mode, *size) for dim, size in enumerate(sizes)}
    dims, scales = _resized_dims(view), _scales(view)
    given = dict(zip(dims, scales, strict=True)) if scales is not None else {}
    return {
        dim: zoom
        for dim, zoom in zooms.items()
        if zoom is not None and given.get(dim, zoom.factor) == zoom.factor
    }


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
    axes = view.ints("axes")
    return list(range(view.rank())) if axes is None else [axis % view.rank() for axis in axes]


def _local_resize(view: OpView, local: LocalView) -> LocalOp:
    """The wanted sizes of cut dims become the local ones; what the halo adds is sliced off."""
    shape, starts = list(local.out_shapes[0]), dict[int, int]()
    for dim, zoom in _zooms(view).items() if local.regions else ():
        ((read, count),), ((start, _),) = local.regions[0][dim], local.out_regions[0][dim]
        shape[dim] = count * zoom.factor
        if shape[dim] != local.out_shapes[0][dim]:
            starts[dim] = start - read * zoom.factor
    resized = _sized(view, shape)
    if not starts:
        return resized
    name = f"{view.node.name}.whole"
    node = replace(resized.nodes[0], name=name, outputs=(name,))
    cuts = {dim: (start, local.out_shapes[0][dim]) for dim, start in starts.items()}
    whole = view.out_type.with_shape(shape)
    part = part_of(view.graph, name, whole, cuts, view.node.name, view.node.outputs[0])
    return LocalOp((node, *part.nodes), {**resized.constants, **part.constants}, {name: whole})


def _sized(view: OpView, shape: Sequence[int]) -> LocalOp:
    sizes = view.type(SIZES)
    if view.node.op != "Resize" or sizes is None or sizes.numel == 0:
        return LocalOp((view.node,))
    whole = view.constant(SIZES)
    changed = changed_dims(view) - _zooms(view).keys()
    local_sizes = [
        int(size) if dim in changed else shape[dim]
        for dim, size in zip(_resized_dims(view), whole, strict=True)
    ]
    return with_constant(view, SIZES, np.array(local_sizes, whole.dtype))


def _grid_sample(view: OpView) -> Rule:
    """Images are whole, the sampled positions are cut."""
    space = view.rank() - 2
    taps = sliding.TAPS.get(str(view.attr("mode", "linear")), 1) ** space
    return view.rule(
        "n c x.., n o.. d",
        "n c o..",
        whole="x.. d",
        points="n c o..",
        flops=2.0 * taps + 4 * space,
    )


ROWS: Mapping[str, OpRow] = {
    **{
        op: OpRow(
            _pool,
            lambda view, local: same_node(
                view, **_local_pads(view, local, _pool_slides(view)) if local.regions else {}
            ),
        )
        for op in ("AveragePool", "LpPool", "MaxPool")
    },
    # A region may be of any image of the batch, which is whole. A sample is 4 weights and products.
    **{
        op: OpRow(
            lambda view: view.rule(
                "n c h w, r box, r",
                "r c p q",
                whole="n h w box p q",
                points="r c p q",
                flops=8.0 * (view.int_attr("sampling_ratio", 2) ** 2 or 4),
            )
        )
        for op in ("MaxRoiPool", "RoiAlign")
    },
    **{op: OpRow(_resize, _local_resize) for op in ("Resize", "Upsample")},
    "Conv": OpRow(_conv, _local_conv),
    "ConvInteger": OpRow(partial(_conv, operands="x w . ."), _local_conv),
    "ConvTranspose": OpRow(partial(_conv, transposed=True), _local_conv_transpose),
    "GlobalAveragePool": OpRow(
        partial(_global_pool, how="sum"),
        lambda view, local: weighted_mean(view, local, range(2, view.rank()), keepdims=1),
    ),
    "GlobalLpPool": OpRow(_global_pool),
    "GlobalMaxPool": OpRow(partial(_global_pool, how="max")),
    "GridSample": OpRow(_grid_sample),
    "LRN": OpRow(  # a window of squares over channels, then a power
        lambda view: view.rule(
            "n c s..", "n c s..", whole="c", flops=2.0 * view.int_attr("size", 1) + 10
        )
    ),
    "com.microsoft::FusedConv": OpRow(
        partial(_conv, operands="x w b y", rounded=True), _local_conv
    ),
    "QLinearConv": OpRow(
        partial(_conv, operands="x . . w . . . . b", rounded=True), partial(_local_conv, weights=3)
    ),
}
