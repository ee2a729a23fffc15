"""Gather, Scatter and their relatives, OneHot, Compress: indexed dims are whole, others cut."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.rules.dims import names, replaced
from partitioner.ir.ops.rules.indexing import gather_elements, moved_rows, scatter_elements
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def _gather(view: OpView) -> Rule:
    """``d0 d1 d2, i0 i1 -> d0 i0 i1 d2`` along dim 1."""
    dims, dim, index = names("d", view.rank()), view.dim("axis", 0), names("i", view.rank(1))
    return view.rule([dims, index], [replaced(dims, dim, *index)], whole={dims[dim]})


def _gather_nd(view: OpView) -> Rule:
    """``b v0 v1 d, b i k -> b i d`` where k = 2 numbers index dims v0 and v1."""
    batch = names("b", view.int_attr("batch_dims", 0))
    indexed = names("v", view.shape(1)[-1])
    inner = names("d", view.rank() - len(indexed) - len(batch))
    index = [*batch, *names("i", view.rank(1) - 1 - len(batch))]
    return view.rule(
        [[*batch, *indexed, *inner], [*index, "k"]], [[*index, *inner]], whole={*indexed, "k"}
    )


def _scatter_nd(view: OpView) -> Rule:
    """``v0 v1 d, i k, i d -> v0 v1 d``: each device writes all updates of its part of d."""
    indexed = names("v", view.shape(1)[-1])
    inner = names("d", view.rank() - len(indexed))
    index = names("i", view.rank(1) - 1)
    data, whole = [*indexed, *inner], {*indexed, *index, "k"}
    return view.rule([data, [*index, "k"], [*index, *inner]], [data], whole=whole)


def _tensor_scatter(view: OpView) -> Rule:
    """``d0 v d2, d0 u d2, d0 -> d0 v d2``: a run of each sequence of a cache is written."""
    dims, dim = names("d", view.rank()), view.dim("axis", -2)
    cache, update = replaced(dims, dim, "v"), replaced(dims, dim, "u")
    return view.rule([cache, update, dims[:1]], [cache], whole={"u", "v"})


def _one_hot(view: OpView) -> Rule:
    """``i0 i1 -> i0 hot i1``: the new dim is whole, as each device needs its values."""
    index = names("i", view.rank())
    dim = view.dim("axis", -1, len(index) + 1)
    return view.rule([index], [[*index[:dim], "hot", *index[dim:]]], whole={"hot"})


def _compress(view: OpView) -> Rule:
    """``d0 x -> d0 y``: the dim that is thinned is whole; without an axis all are."""
    if view.attr("axis") is None:
        return view.rule("d..", "y", whole="d.. y")
    dims, dim = names("d", view.rank()), view.dim("axis", 0)
    return view.rule([replaced(dims, dim, "x")], [replaced(dims, dim, "y")], whole={"x", "y"})


def _gather_elements(view: OpView) -> Rule:
    return gather_elements(view, view.dim("axis", 0))


def _scatter_elements(view: OpView) -> Rule:
    return scatter_elements(view, view.dim("axis", 0))


ROWS: Mapping[str, OpRow] = {
    "Compress": OpRow(_compress),
    "Gather": OpRow(_gather, moved=moved_rows),
    "GatherElements": OpRow(_gather_elements, moved=moved_rows),
    "GatherND": OpRow(_gather_nd, moved=moved_rows),
    "OneHot": OpRow(_one_hot),
    "Scatter": OpRow(_scatter_elements),
    "ScatterElements": OpRow(_scatter_elements),
    "ScatterND": OpRow(_scatter_nd),
    "TensorScatter": OpRow(_tensor_scatter),
}
