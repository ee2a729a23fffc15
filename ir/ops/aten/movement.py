"""Operators that move, join, take or repeat elements, and their gradients; many give views.

A view is the operand's memory under another shape. Nearly all are linear: pending sums pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from partitioner.ir.graph import Attr, Node
from partitioner.ir.ops.aten.indexing import write_part
from partitioner.ir.ops.local import local_shape, other_node, same_node
from partitioner.ir.ops.rules.joining import concat, local_concat, run_of, slices, split
from partitioner.ir.ops.rules.reduction import along
from partitioner.ir.ops.rules.reshape import (
    expand,
    permute,
    repeat,
    reshape,
    squeeze,
    unsqueeze,
)
from partitioner.ir.ops.signature import (
    OpaqueError,
    Options,
    Shape,
    broadcast,
    joined,
    names,
    pattern,
    replaced,
)
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Names, Rule


def _permute(view: OpView) -> Rule:
    order, rank = view.attr("dims"), view.rank()
    if isinstance(order, tuple):
        return permute(view, [int(dim) for dim in order], sums=[0])
    swapped = list(range(rank))
    if rank:
        first, second = view.int_attr("dim0", 0), view.int_attr("dim1", rank - 1)
        swapped[first], swapped[second] = swapped[second], swapped[first]
    return permute(view, swapped, sums=[0])


def _squeezed_dims(view: OpView) -> frozenset[int]:
    """Dims that are dropped: those of size 1 among the named ones, or among all."""
    shape, dim = view.shape(), view.attr("dim")
    if isinstance(dim, tuple):
        named = [int(i) for i in dim]
    else:
        named = list(range(len(shape))) if dim is None else [view.int_attr("dim", 0)]
    return frozenset(i % len(shape) for i in named if shape and shape[i] == 1)


def _dims_of_whole(view: OpView, attr: str, *, backward: bool) -> tuple[list[str], int]:
    """Dims of the tensor that a view is taken of, the result of a gradient; and the dim `attr`."""
    rank = len(view.out_shape) if backward else view.rank()
    return names("d", rank), view.dim(attr, 0, rank)


def _taken(
    view: OpView, whole: Sequence[str], part: Sequence[str], uncut: Names, *, backward: bool
) -> Rule:
    """Rule from a tensor to a view of it (or several), or of a gradient: from view to tensor."""
    before, after = (part, whole) if backward else (whole, part)
    return view.rule([before], [after] * len(view.out_types), whole=uncut, sums=[0])


def _select(view: OpView, *, backward: bool = False) -> Rule:
    """Select an element of a whole dim, or each as a result; the gradient is 0 elsewhere."""
    dims, dim = _dims_of_whole(view, "dim", backward=backward)
    return _taken(view, replaced(dims, dim, "x"), replaced(dims, dim), "x", backward=backward)


def _select_scatter(view: OpView) -> Rule:
    dims, dim = _dims_of_whole(view, "dim", backward=False)
    around = replaced(dims, dim, "x")
    return view.rule([around, replaced(dims, dim)], [around], sums=[0, 1])


def _local_select_scatter(view: OpView, local: LocalView) -> LocalOp:
    dim = view.dim("dim", 0)
    if local.shapes[0][dim] == view.shape()[dim]:
        return LocalOp((view.node,))
    row = f"{view.node.name}.row"
    shape = [*local.shapes[1][:dim], 1, *local.shapes[1][dim:]]
    reshaped = Node(row, "aten::reshape", view.node.inputs[1:], (row,), {"shape": tuple(shape)})
    at = view.int_attr("index", 0) % view.shape()[dim]
    written = write_part(view, local, dim, np.array([at]), row)
    types = {row: view.out_type.with_shape(shape)}
    return replace(written, nodes=(reshaped, *written.nodes), types=types)


def _diagonal(view: OpView, *, backward: bool = False) -> Rule:
    """The diagonal of two dims, which are whole, becomes the last dim."""
    dims, _ = _dims_of_whole(view, "dim1", backward=backward)
    pair = {dims[view.int_attr(name, 0)] for name in ("dim1", "dim2")}
    line = [*(name for name in dims if name not in pair), "z"]
    return _taken(view, dims, line, {*pair, "z"}, backward=backward)


def _unfold(view: OpView, *, backward: bool = False) -> Rule:
    """Windows of a whole dim become the last one; gradients are added up, and broadcast."""
    dims, dim = _dims_of_whole(view, "dim" if backward else "dimension", backward=backward)
    windows = [*replaced(dims, dim, "n"), "w"]
    if backward:
        windows = broadcast(view.shape(), windows)
    return _taken(view, dims, windows, {dims[dim], "n", "w"}, backward=backward)


def _stack(view: OpView) -> Rule:
    """Each operand is an element of a new dim, which is whole."""
    dims, count = names("d", view.rank()), len(view.types)
    dim = view.dim("dim", 0, len(dims) + 1)
    result = [*dims[:dim], "n", *dims[dim:]]
    return view.rule([dims] * count, [result], whole={"n"}, sums=range(count))


def _split_sizes(view: OpView) -> tuple[int, ...]:
    """Sizes of the parts: as given, or of one size with a smaller last one."""
    sizes = view.ints("split_sizes")
    if sizes is not None:
        return sizes
    size, part = view.shape()[view.dim("dim", 0)], view.int_attr("split_size", 1)
    return tuple(min(part, size - part * i) for i in range(len(view.node.outputs)))


def _local_split(view: OpView, local: LocalView) -> LocalOp:
    """Local sizes are given, as equal parts may have unequal pieces."""
    sizes = _split_sizes(view)
    pieces = tuple(local.sizes.get(f"a{i}", size) for i, size in enumerate(sizes))
    return other_node(view, "aten::split_with_sizes", split_sizes=pieces, dim=view.dim("dim", 0))


def _sliced(view: OpView, shape: Shape, *sums: int) -> tuple[list[str], list[str], Options]:
    dim, start, end = view.dim("dim", 0, len(shape)), view.attr("start"), view.attr("end")
    run = run_of(
        shape[dim],
        start if isinstance(start, int) else None,
        end if isinstance(end, int) else None,
        view.int_attr("step", 1),
    )
    return slices(len(shape), {dim: run}, numbered=False, sums=sums)


def _slice(view: OpView, *, backward: bool = False) -> Rule:
    """A slice, or its gradient, which is 0 outside of it."""
    around, taken, options = _sliced(view, view.out_shape if backward else view.shape(), 0)
    return view.rule([taken if backward else around], [around if backward else taken], **options)


def _slice_scatter(view: OpView) -> Rule:
    """The second operand replaces a slice, which is whole if it has few elements of the dim."""
    if _writes_few(view):
        dims, dim = names("d", view.rank()), view.dim("dim", 0)
        data, source = replaced(dims, dim, "v"), replaced(dims, dim, "i")
        return view.rule([data, source], [data], whole="i", sums=[0, 1])
    around, taken, options = _sliced(view, view.shape(), 0, 1)
    return view.rule([around, taken], [around], **options)


def _writes_few(view: OpView) -> bool:
    dim = view.dim("dim", 0)
    return 2 * view.shape(1)[dim] < view.shape()[dim]


def _local_slice_scatter(view: OpView, local: LocalView) -> LocalOp:
    if not _writes_few(view):
        return _local_slice(view, local)
    dim = view.dim("dim", 0)
    start, end = view.attr("start"), view.attr("end")
    bounds = slice(start if isinstance(start, int) else None, end if isinstance(end, int) else None)
    begin, stop, _ = bounds.indices(view.shape()[dim])
    places = np.arange(begin, stop, view.int_attr("step", 1))
    return write_part(view, local, dim, places)


def _local_slice(view: OpView, local: LocalView) -> LocalOp:
    """A run starts after the device's own elements before it, and ends with its own part."""
    attrs: dict[str, Attr] = {}
    if "run" in local.sizes:
        first = local.sizes.get("pre", 0)
        attrs = {"start": first, "end": first + local.sizes["run"]}
    if view.attr("input_sizes") is not None:
        attrs["input_sizes"] = local.out_shapes[0]
    return same_node(view, **attrs)


def _pads(view: OpView) -> Mapping[int, tuple[int, int]]:
    """(before, after) of every padded dim; negative numbers crop."""
    pads, rank = view.ints("pad") or (), view.rank()
    pairs = zip(pads[::2], pads[1::2], strict=True)
    return {rank - 1 - i: pair for i, pair in enumerate(pairs) if any(pair)}


def _pad(view: OpView) -> Rule:
    """``d -> pre + d + post``, or the reverse at an end that is cropped; linear if padded by 0."""
    before, sizes = names("d", view.rank()), dict[str, int]()
    after = list(before)
    for dim, (first, last) in _pads(view).items():
        kept = view.shape()[dim] + min(first, 0) + min(last, 0)
        if kept <= 0:
            raise OpaqueError("nothing of the operand is left")
        pre, mid, post = f"pre{dim}", f"d{dim}", f"post{dim}"
        before[dim] = joined({pre: min(first, 0), mid: kept, post: min(last, 0)})
        after[dim] = joined({pre: max(first, 0), mid: kept, post: max(last, 0)})
        sizes |= {pre: abs(first), mid: kept, post: abs(last)}
    sums = [0] if view.attr("value", 0) == 0 else []
    return view.rule([before], [after], sizes=sizes, dropped=sizes, sums=sums)


def _local_pad(view: OpView, local: LocalView) -> LocalOp:
    pads = _pads(view)
    local_pads: list[int] = []
    for dim in reversed(range(view.rank())):
        for name, pad in zip((f"pre{dim}", f"post{dim}"), pads.get(dim, (0, 0)), strict=True):
            size = local.sizes.get(name, 0)
            local_pads.append(size if pad > 0 else -size)
    return same_node(view, pad=tuple(local_pads))


_same = pattern("d.. -> d..", sums=[0])
_triangle = partial(along, whole=(-2, -1), sums=[0])

ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(_same, view=True) for op in ("alias", "detach")},
    "aten::flip": OpRow(lambda view: along(view, view.ints("dims") or (), sums=[0])),
    "aten::roll": OpRow(
        lambda view: along(view, view.ints("dims") or range(view.rank()), sums=[0])
    ),
    **{f"aten::{op}": OpRow(_permute, view=True) for op in ("permute", "t", "transpose.int")},
    **{f"aten::{op}": OpRow(_triangle) for op in ("tril", "triu")},
    **{
        f"aten::{op}": OpRow(
            lambda view: squeeze(view, _squeezed_dims(view), sums=[0]),
            # dims are named, since a local one may have become 1
            lambda view, _: other_node(
                view, "aten::squeeze.dims", dim=tuple(sorted(_squeezed_dims(view)))
            ),
            view=True,
        )
        for op in ("squeeze", "squeeze.dim", "squeeze.dims")
    },
    # A part of a tensor may lie in other strides than the whole (it was cut out of a larger one, or
    # moved), and `view` is only for strides that fit: `reshape` copies where they do not.
    **{
        f"aten::{op}": OpRow(
            partial(reshape, sums=[0]),
            lambda view, local: other_node(view, "aten::reshape", shape=local.out_shapes[0]),
            view=True,
        )
        for op in ("_unsafe_view", "reshape", "view")
    },
    **{
        f"aten::{op}": OpRow(
            lambda view: split(view, view.dim("dim", 0), _split_sizes(view), sums=[0]),
            _local_split,
            view=True,
        )
        for op in ("split.Tensor", "split_with_sizes")
    },
    "aten::cat": OpRow(
        lambda view: concat(
            view, view.dim("dim", 0, len(view.out_shape)), sums=range(len(view.types))
        ),
        local_concat,
    ),
    "aten::constant_pad_nd": OpRow(_pad, _local_pad),
    "aten::diagonal": OpRow(_diagonal, view=True),
    "aten::diagonal_backward": OpRow(partial(_diagonal, backward=True), local_shape("input_sizes")),
    "aten::expand": OpRow(partial(expand, sums=[0]), local_shape("size"), view=True, uniform=True),
    "aten::repeat": OpRow(
        lambda view: repeat(view, dict(enumerate(view.ints("repeats") or ())), sums=[0]),
        lambda view, local: same_node(  # each device makes its share of the copies of its part
            view,
            repeats=tuple(local.sizes[f"r{i}"] for i in range(len(view.ints("repeats") or ()))),
        ),
    ),
    "aten::select.int": OpRow(_select, view=True),
    "aten::select_backward": OpRow(partial(_select, backward=True), local_shape("input_sizes")),
    "aten::select_scatter": OpRow(
        _select_scatter, _local_select_scatter, overwrites=True, where=True
    ),
    "aten::slice.Tensor": OpRow(_slice, _local_slice, view=True),
    "aten::slice_backward": OpRow(partial(_slice, backward=True), _local_slice),
    "aten::slice_scatter": OpRow(_slice_scatter, _local_slice_scatter, overwrites=True, where=True),
    "aten::stack": OpRow(_stack),
    "aten::unbind.int": OpRow(_select, view=True),
    "aten::unfold": OpRow(_unfold, view=True),
    "aten::unfold_backward": OpRow(partial(_unfold, backward=True), local_shape("input_sizes")),
    "aten::unsqueeze": OpRow(
        lambda view: unsqueeze(view, [view.dim("dim", 0, view.rank() + 1)], sums=[0]), view=True
    ),
    # a copy: PyTorch's view of pairs asks more of strides than a rank's part has
    "aten::view_as_complex": OpRow(pattern("d.. pair -> d..", whole="pair", linear=[0])),
    "aten::view_as_real": OpRow(pattern("d.. -> d.. pair", whole="pair", linear=[0]), view=True),
}
