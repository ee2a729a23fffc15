"""Elements found by index: Gather, Scatter and their relatives, OneHot, Compress.

The dims that are searched are whole; all others are cut. Where the indices cover only the first
places of a dim (GatherElements, ScatterElements), the dim is ``i + rest``: a device's part starts
with its part of the places that are covered.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.dims import names, with_whole
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def gather(view: OpView) -> Rule:
    """``d0 v d2, i0 i1 -> d0 i0 i1 d2`` along dim 1."""
    dims = names("d", len(view.shape(0)))
    axis = view.int_attr("axis", 0) % len(dims)
    places = names("i", len(view.shape(1)))
    result = [*dims[:axis], *places, *dims[axis + 1 :]]
    return Rule.of([dims, places], [result], view.shapes, view.out_shapes, whole={dims[axis]})


def read_rows(ins: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """Bytes moved by a gather: the indices, and each row read and written."""
    return ins[1] + 2 * outs[0]


def gather_elements(view: OpView) -> Rule:
    """``d0 + rest0, v; d0 i -> d0 i``: other dims of the indices are places of the data's."""
    data, places, sizes = _covered(view)
    whole = {data[_axis(view)]}
    operands = [data, places]
    return Rule.of(
        operands,
        [places],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=whole,
        dropped=sizes,
    )


def scatter_elements(view: OpView) -> Rule:
    """``d0 + rest0, v; d0 i; d0 i -> d0 + rest0, v``."""
    data, places, sizes = _covered(view)
    axis = _axis(view)
    return Rule.of(
        [data, places, places],
        [data],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole={data[axis], places[axis]},
    )


def _axis(view: OpView) -> int:
    return view.int_attr("axis", 0) % len(view.shape(0))


def _covered(view: OpView) -> tuple[list[str], list[str], dict[str, int]]:
    """Dims of the data, dims of the indices, and the sizes of what the indices leave out."""
    data, places = names("d", len(view.shape(0))), names("d", len(view.shape(0)))
    axis = _axis(view)
    sizes: dict[str, int] = {}
    data[axis], places[axis] = "v", "i"
    for dim, (all_, some) in enumerate(zip(view.shape(0), view.shape(1), strict=True)):
        if dim != axis and all_ != some:
            sizes |= {f"d{dim}": some, f"rest{dim}": all_ - some}
            data[dim] = f"d{dim} + rest{dim}"
    return data, places, sizes


def gather_nd(view: OpView) -> Rule:
    """``b v0 v1 d, b i k -> b i d`` for indices of k = 2 places."""
    batch = names("b", view.int_attr("batch_dims", 0))
    depth = view.shape(1)[-1]
    searched = names("v", depth)
    inner = names("d", len(view.shape(0)) - depth - len(batch))
    places = [*batch, *names("i", len(view.shape(1)) - 1 - len(batch))]
    return Rule.of(
        [[*batch, *searched, *inner], [*places, "k"]],
        [[*places, *inner]],
        view.shapes,
        view.out_shapes,
        whole={*searched, "k"},
    )


def scatter_nd(view: OpView) -> Rule:
    """``v0 v1 d, i k, i d -> v0 v1 d``: every device writes all places of its slices."""
    depth = view.shape(1)[-1]
    searched, inner = names("v", depth), names("d", len(view.shape(0)) - depth)
    places = names("i", len(view.shape(1)) - 1)
    return Rule.of(
        [[*searched, *inner], [*places, "k"], [*places, *inner]],
        [[*searched, *inner]],
        view.shapes,
        view.out_shapes,
        whole={*searched, *places, "k"},
    )


def tensor_scatter(view: OpView) -> Rule:
    """``d0 v d2, d0 u d2, d0 -> d0 v d2``: a run of each sequence of a cache is written."""
    dims = names("d", len(view.shape(0)))
    axis = view.int_attr("axis", -2) % len(dims)
    cache = [*dims[:axis], "v", *dims[axis + 1 :]]
    update = [*dims[:axis], "u", *dims[axis + 1 :]]
    operands = [cache, update, dims[:1]][: len(view.node.inputs)]
    return Rule.of(operands, [cache], view.shapes, view.out_shapes, whole={"u", "v"})


def one_hot(view: OpView) -> Rule:
    """``i0 i1 -> i0 hot i1``: the new dim is whole, as each device needs its values."""
    places = names("i", len(view.shape(0)))
    axis = view.int_attr("axis", -1) % (len(places) + 1)
    result = [*places[:axis], "hot", *places[axis:]]
    operands = with_whole(view, places)
    return Rule.of(operands, [result], view.shapes, view.out_shapes, whole={"hot"})


def compress(view: OpView) -> Rule:
    """``d0 x -> d0 y``: the dim that is thinned is whole; without an axis all are."""
    axis = view.attr("axis")
    dims = names("d", len(view.shape(0)))
    if not isinstance(axis, int):
        operands = with_whole(view, dims)
        return Rule.of(operands, [["y"]], view.shapes, view.out_shapes, whole={*dims, "y"})
    before, after = list(dims), list(dims)
    before[axis], after[axis] = "x", "y"
    operands = with_whole(view, before)
    return Rule.of(operands, [after], view.shapes, view.out_shapes, whole={"x", "y"})


ROWS: Mapping[str, OpRow] = {
    "Compress": OpRow(compress),
    "Gather": OpRow(gather, moved=read_rows),
    "GatherElements": OpRow(gather_elements, moved=read_rows),
    "GatherND": OpRow(gather_nd, moved=read_rows),
    "OneHot": OpRow(one_hot),
    "Scatter": OpRow(scatter_elements),
    "ScatterElements": OpRow(scatter_elements),
    "ScatterND": OpRow(scatter_nd),
    "TensorScatter": OpRow(tensor_scatter),
}
