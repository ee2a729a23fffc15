"""Elements moved inside a tensor or repeated: Transpose, Expand, Tile, Pad, blocks, triangles."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from partitioner.ir.ops.contraction import broadcast_dims
from partitioner.ir.ops.dims import names, with_whole
from partitioner.ir.ops.table import LocalOp, LocalView, OpaqueError, OpRow, OpView, with_constant
from partitioner.ir.rule import Rule


def transpose(view: OpView) -> Rule:
    """``d0 d1 d2 -> d2 d0 d1`` for a permutation of 2, 0, 1; reversed by default."""
    dims = names("d", len(view.shape(0)))
    order = view.ints("perm") or tuple(reversed(range(len(dims))))
    return Rule.of([dims], [[dims[axis] for axis in order]], view.shapes, view.out_shapes)


def expand(view: OpView) -> Rule:
    """``1 b1 -> b0 b1``: broadcast, as elementwise ops do."""
    out = view.out_shape()
    dims, result = (broadcast_dims(shape, len(out)) for shape in (view.shape(0), out))
    return Rule.of(with_whole(view, dims), [result], view.shapes, view.out_shapes)


def local_expand(view: OpView, local: LocalView) -> LocalOp:
    """The wanted shape is the local result's."""
    return with_constant(view, 1, np.array(local.out_shapes[0], np.int64))


def tile(view: OpView) -> Rule:
    """``d0 d1 -> (r0 d0) d1`` where dim 0 is repeated and dim 1 is not."""
    shape, out = view.shape(0), view.out_shape()
    dims = names("d", len(shape))
    repeats = _repeats(view)
    result = [f"(r{i} d{i})" if i in repeats else name for i, name in enumerate(dims)]
    sizes = {f"r{i}": count for i, count in repeats.items()}
    return Rule.of(with_whole(view, dims), [result], view.shapes, [out], sizes=sizes)


def _repeats(view: OpView) -> dict[int, int]:
    """How often each repeated dim is repeated; an empty dim repeats to itself."""
    pairs = enumerate(zip(view.shape(0), view.out_shape(), strict=True))
    return {axis: after // before for axis, (before, after) in pairs if before != after}


def local_tile(view: OpView, local: LocalView) -> LocalOp:
    """Repeats may be cut too: each device makes its copies of its part."""
    repeats = [local.sizes.get(f"r{i}", 1) for i in range(len(view.shape(0)))]
    return with_constant(view, 1, np.array(repeats, np.int64))


def resized(view: OpView, changed: frozenset[int]) -> Rule:
    """Dims that change are whole, under different names before and after; others pass."""
    rank = len(view.shape(0))
    before = [f"x{i}" if i in changed else f"d{i}" for i in range(rank)]
    after = [f"y{i}" if i in changed else f"d{i}" for i in range(rank)]
    whole = {name for axis in changed for name in (before[axis], after[axis])}
    operands = with_whole(view, before)
    return Rule.of(operands, [after], view.shapes, view.out_shapes, whole=whole)


def pad(view: OpView) -> Rule:
    """Padded (or, by negative pads, cropped) dims are whole."""
    pads = view.ints("pads", 1)
    if pads is None:
        raise OpaqueError("pads are not given")
    rank = len(view.shape(0))
    axes = view.ints("axes", 3) or tuple(range(rank))
    both = zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True)
    return resized(view, frozenset(axis % rank for axis, first, last in both if first or last))


def _changed(view: OpView) -> frozenset[int]:
    pairs = enumerate(zip(view.shape(0), view.out_shape(), strict=True))
    return frozenset(axis for axis, (before, after) in pairs if before != after)


def center_crop_pad(view: OpView) -> Rule:
    """Dims that get another size are whole."""
    return resized(view, _changed(view))


def local_center_crop_pad(view: OpView, local: LocalView) -> LocalOp:
    """The wanted sizes are the local result's."""
    out = local.out_shapes[0]
    axes = view.ints("axes") or range(len(out))
    return with_constant(view, 1, np.array([out[axis] for axis in axes], np.int64))


def depth_to_space(view: OpView) -> Rule:
    """``n (p q c) h w -> n c (h p) (w q)``, or ``n (c p q) h w`` in mode CRD."""
    depth = "(c p q)" if view.attr("mode", "DCR") == "CRD" else "(p q c)"
    return _blocks(view, ["n", depth, "h", "w"], ["n", "c", "(h p)", "(w q)"])


def space_to_depth(view: OpView) -> Rule:
    """``n c (h p) (w q) -> n (p q c) h w``."""
    return _blocks(view, ["n", "c", "(h p)", "(w q)"], ["n", "(p q c)", "h", "w"])


def _blocks(view: OpView, before: list[str], after: list[str]) -> Rule:
    block = view.int_attr("blocksize", 1)
    return Rule.of(
        [before],
        [after],
        view.shapes,
        view.out_shapes,
        sizes={"p": block, "q": block},
        whole={"p", "q"},
    )


def trilu(view: OpView) -> Rule:
    """A triangle of every matrix: rows and columns are whole."""
    dims = names("d", len(view.shape(0)))
    operands = with_whole(view, dims)
    return Rule.of(operands, [dims], view.shapes, view.out_shapes, whole=dims[-2:])


def reverse_sequence(view: OpView) -> Rule:
    """The first elements of the time dim are reversed, as many as the sequence is long."""
    dims = names("d", len(view.shape(0)))
    time, batch = view.int_attr("time_axis", 0), view.int_attr("batch_axis", 1)
    operands = [dims, [dims[batch]]]
    return Rule.of(operands, [dims], view.shapes, view.out_shapes, whole={dims[time]})


ROWS: Mapping[str, OpRow] = {
    "CenterCropPad": OpRow(center_crop_pad, local_center_crop_pad),
    "DepthToSpace": OpRow(depth_to_space),
    "Expand": OpRow(expand, local_expand),
    "Pad": OpRow(pad),
    "ReverseSequence": OpRow(reverse_sequence),
    "SpaceToDepth": OpRow(space_to_depth),
    "Tile": OpRow(tile, local_tile),
    "Transpose": OpRow(transpose),
    "Trilu": OpRow(trilu),
}
