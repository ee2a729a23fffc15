"""Ops that move, join, take or repeat elements: Reshape, Transpose, Concat, Slice, Pad, Tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.ops.local import local_shape_operand, same_node, with_constant
from partitioner.ir.ops.rules.joining import Run, concat, local_concat, run_of, slices, split
from partitioner.ir.ops.rules.reduction import along
from partitioner.ir.ops.rules.reshape import (
    changed_dims,
    expand,
    permute,
    product,
    repeat,
    reshape,
    resize,
    squeeze,
    unsqueeze,
)
from partitioner.ir.ops.rules.sliding import Slide
from partitioner.ir.ops.signature import OpaqueError, names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

#: First opsets in which axes of Squeeze, sizes of Split, starts and ends of Slice are operands.
AXES_INPUT, SPLIT_INPUT, SLICE_INPUT = 13, 13, 10


def _local_reshape(view: OpView, local: LocalView) -> LocalOp:
    """The new shape is the local result's.

    It has no 0, which Reshape may read as "copy the dim": no part of a cut dim is empty, and
    tensors without elements share no factors (`refine`), so their Reshape runs as it is.
    """
    assert 0 not in local.out_shapes[0], f"{view.node.name!r}: {local.out_shapes[0]}"
    return with_constant(view, 1, np.array(local.out_shapes[0], np.int64))


def _flatten(view: OpView) -> Rule:
    """``d0 d1 d2 d3 -> (d0 d1) (d2 d3)``."""
    dims, first = names("d", view.rank()), view.int_attr("axis", 1)
    return view.rule([dims], [[product(dims[:first]), product(dims[first:])]])


def _squeezed_dims(view: OpView) -> frozenset[int]:
    shape, axes = view.shape(), view.ints("axes", 1)
    if axes is None:
        return frozenset(dim for dim, size in enumerate(shape) if size == 1)
    return frozenset(axis % len(shape) for axis in axes)


def _local_squeeze(view: OpView, _: LocalView) -> LocalOp:
    """Axes are named, since a local dim may have become 1."""
    if view.ints("axes", 1) is not None:
        return LocalOp((view.node,))
    axes = sorted(_squeezed_dims(view))
    if view.opset < AXES_INPUT:
        return same_node(view, axes=tuple(axes))
    named = replace(view.node, inputs=(view.node.inputs[0], ""))
    return with_constant(OpView(named, view.graph), 1, np.array(axes, np.int64))


def _unsqueeze(view: OpView) -> Rule:
    axes = view.ints("axes", 1)
    if axes is None:
        raise OpaqueError("axes are not given")
    return unsqueeze(view, {axis % len(view.out_shape) for axis in axes})


def _pads(view: OpView) -> dict[int, Slide]:
    """Padded (or, by negative pads, cropped) dims, as windows of one point."""
    pads, rank = view.ints("pads", 1), view.rank()
    if pads is None:
        raise OpaqueError("pads are not given")
    axes = view.ints("axes", 3) or tuple(range(rank))
    both = zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True)
    padded = {axis % rank: Slide(1, before=a, after=b) for axis, a, b in both}
    return {dim: slide for dim, slide in padded.items() if not slide.is_point}


def _pad(view: OpView) -> Rule:
    """Dims that are padded by a constant are cut, those that repeat elements are whole."""
    slides, mode = _pads(view), view.attr("mode", "constant")
    slid = {dim: slide.window(view.shape()[dim]) for dim, slide in slides.items()}
    return resize(view, slides.keys(), slid if mode == "constant" else None)


def _local_pad(view: OpView, local: LocalView) -> LocalOp:
    """A device pads its part by what of it lies outside the whole operand."""
    if not local.regions:
        return LocalOp((view.node,))
    pads = {dim: (slide.before, slide.after) for dim, slide in _pads(view).items()}
    for dim in pads:
        if local.out_shapes[0][dim] != view.out_shape[dim]:
            ((start, count),), ((first, positions),) = (
                region[0][dim] for region in (local.regions, local.out_regions)
            )
            low = first - pads[dim][0]
            pads[dim] = start - low, low + positions - start - count
    axes = [axis % view.rank() for axis in view.ints("axes", 3) or range(view.rank())]
    sides = [[pads.get(axis, (0, 0))[side] for axis in axes] for side in (0, 1)]
    numbers = (*sides[0], *sides[1])
    if "pads" in view.node.attrs:
        return same_node(view, pads=numbers)
    return with_constant(view, 1, np.array(numbers, np.int64))


def _local_center_crop_pad(view: OpView, local: LocalView) -> LocalOp:
    out = local.out_shapes[0]
    axes = view.ints("axes") or range(len(out))
    return with_constant(view, 1, np.array([out[axis] for axis in axes], np.int64))


def _blocks(view: OpView, before: str, after: str) -> Rule:
    block = view.int_attr("blocksize", 1)
    return view.rule(before, after, sizes={"p": block, "q": block}, whole="p q")


def _reverse_sequence(view: OpView) -> Rule:
    """The first elements of the time dim are reversed, as many as the sequence is long."""
    dims = names("d", view.rank())
    time, batch = view.int_attr("time_axis", 0), view.int_attr("batch_axis", 1)
    if {time, batch} != {0, 1}:  # ONNX Runtime takes others for 0 and 1
        raise IRError(f"time_axis {time} and batch_axis {batch} must be 0 and 1, or 1 and 0")
    return view.rule([dims, [dims[batch]]], [dims], whole={dims[time]})


def _split(view: OpView) -> Rule:
    """Sizes are given, or equal but for a smaller last one."""
    dim, sizes = view.dim("axis", 0), view.ints("split", 1)
    if sizes is None:
        size, count = view.shape()[dim], len(view.node.outputs)
        part = -(-size // count)
        sizes = (*[part] * (count - 1), size - part * (count - 1))
    return split(view, dim, sizes)


def _local_split(view: OpView, local: LocalView) -> LocalOp:
    """Local sizes are given, as equal parts may have unequal pieces."""
    sizes = tuple(local.sizes[name] for name in names("a", len(view.node.outputs)))
    if view.opset < SPLIT_INPUT:
        return same_node(view, split=sizes)
    attrs = {key: value for key, value in view.node.attrs.items() if key != "num_outputs"}
    name = f"{view.node.name}.1.local"
    node = replace(view.node, inputs=(view.node.inputs[0], name), attrs=attrs)
    return LocalOp((node,), {name: np.array(sizes, np.int64)})


def _bounds(view: OpView) -> dict[int, tuple[int, int, int]]:
    """(start, end, step) of every sliced dim, as given."""
    starts, ends = view.ints("starts", 1), view.ints("ends", 2)
    if starts is None or ends is None:
        raise OpaqueError("starts or ends are not given")
    axes = view.ints("axes", 3) or tuple(range(len(starts)))
    steps = view.ints("steps", 4) or (1,) * len(starts)
    bounds = zip(starts, ends, steps, strict=True)
    return {axis % view.rank(): bound for axis, bound in zip(axes, bounds, strict=True)}


def _runs(view: OpView) -> dict[int, Run | None]:
    return {dim: run_of(view.shape()[dim], *bound) for dim, bound in _bounds(view).items()}


def _slice(view: OpView) -> Rule:
    around, taken, options = slices(view.rank(), _runs(view), numbered=True)
    return view.rule([around], [taken], **options)


def _local_slice(view: OpView, local: LocalView) -> LocalOp:
    """A run starts after the device's own elements before it, and ends with its own part."""
    bounds = {dim: (start, end) for dim, (start, end, _) in _bounds(view).items()}
    for dim, run in _runs(view).items():
        if run is not None:
            first = local.sizes.get(f"pre{dim}", 0)
            bounds[dim] = (first, first + local.sizes[f"d{dim}"])
    starts = tuple(start for start, _ in bounds.values())
    ends = tuple(end for _, end in bounds.values())
    if view.opset < SLICE_INPUT:
        return same_node(view, starts=starts, ends=ends)
    name, inputs = view.node.name, view.node.inputs
    constants = {
        f"{name}.{index}.local": np.array(values, view.constant(index).dtype)
        for index, values in ((1, starts), (2, ends))
    }
    node = replace(view.node, inputs=(inputs[0], *constants, *inputs[3:]))
    return LocalOp((node,), constants)


ROWS: Mapping[str, OpRow] = {
    "CenterCropPad": OpRow(  # dims that get another size are whole
        lambda view: resize(view, changed_dims(view)), _local_center_crop_pad
    ),
    "Concat": OpRow(
        lambda view: concat(view, view.dim("axis", 1, len(view.out_shape))), local_concat
    ),
    "DepthToSpace": OpRow(
        lambda view: _blocks(
            view,
            "n (c p q) h w" if view.attr("mode", "DCR") == "CRD" else "n (p q c) h w",
            "n c (h p) (w q)",
        )
    ),
    "Expand": OpRow(expand, local_shape_operand(1)),
    "Flatten": OpRow(_flatten, view=True),
    "Pad": OpRow(_pad, _local_pad),
    "Reshape": OpRow(reshape, _local_reshape, view=True),
    "ReverseSequence": OpRow(_reverse_sequence),
    "Slice": OpRow(_slice, _local_slice, moved=lambda _, outs: 2 * outs[0]),
    "SpaceToDepth": OpRow(lambda view: _blocks(view, "n c (h p) (w q)", "n (p q c) h w")),
    "Split": OpRow(_split, _local_split),
    "Squeeze": OpRow(lambda view: squeeze(view, _squeezed_dims(view)), _local_squeeze, view=True),
    "Tile": OpRow(
        lambda view: repeat(
            view, {d: view.out_shape[d] // view.shape()[d] for d in sorted(changed_dims(view))}
        ),
        lambda view, local: with_constant(  # a device makes its share of the copies of its part
            view, 1, np.array([local.sizes.get(f"r{i}", 1) for i in range(view.rank())], np.int64)
        ),
    ),
    "Transpose": OpRow(
        lambda view: permute(view, view.ints("perm") or reversed(range(view.rank())))
    ),
    "Trilu": OpRow(lambda view: along(view, (-2, -1))),
    "Unsqueeze": OpRow(_unsqueeze, view=True),
}
