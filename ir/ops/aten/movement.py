"""Elements moved inside a tensor or repeated, and gradients of views: repeat, roll, triangles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from partitioner.ir.ops.aten.joining import local_sizes
from partitioner.ir.ops.aten.views import renamed
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, same_node
from partitioner.ir.rule import Rule


def repeat(view: OpView) -> Rule:
    """``d1 -> r0 (r1 d1)``."""
    counts = view.ints("repeats") or ()
    rank, lead = len(view.shape(0)), len(counts) - len(view.shape(0))
    new = names("r", len(counts))
    dims = [f"d{lead + i}" for i in range(rank)]
    old = [f"({one} {dim})" for one, dim in zip(new[lead:], dims, strict=True)]
    return renamed(view, dims, [*new[:lead], *old], sizes=dict(zip(new, counts, strict=True)))


def local_repeat(view: OpView, local: LocalView) -> LocalOp:
    """Repeats may be cut too: each device makes its copies of its part."""
    counts = len(view.ints("repeats") or ())
    return same_node(view, repeats=tuple(local.sizes[f"r{i}"] for i in range(counts)))


def _within(view: OpView, whole: Iterable[int]) -> Rule:
    dims = names("d", len(view.shape(0)))
    return renamed(view, dims, dims, whole={dims[axis] for axis in whole})


def moved_along(view: OpView) -> Rule:
    """Dims along which elements move are whole; all of them if a roll names none."""
    dims = view.ints("dims")
    return _within(view, dims or range(len(view.shape(0)) if view.attr("shifts") else 0))


def triangle(view: OpView) -> Rule:
    """A triangle of every matrix: rows and columns are whole."""
    return _within(view, (-2, -1))


def diagonal_backward(view: OpView) -> Rule:
    """The last dim on a diagonal of two dims; all three are whole."""
    dims = names("d", len(view.out_shape()))
    pair = {view.int_attr(name, 0) % len(dims) for name in ("dim1", "dim2")}
    kept = [name for i, name in enumerate(dims) if i not in pair]
    return renamed(view, [*kept, "z"], dims, whole={"z", *(dims[i] for i in pair)})


def unfold_backward(view: OpView) -> Rule:
    """Windows, the last dim, added up where they came from; the dim is whole."""
    dims = names("d", len(view.out_shape()))
    axis = view.int_attr("dim", 0) % len(dims)
    windows = [*("n" if i == axis else name for i, name in enumerate(dims)), "w"]
    return renamed(view, windows, dims, whole={"n", "w", dims[axis]})


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(moved_along) for op in ("flip", "roll")},
    **{f"aten::{op}": OpRow(triangle) for op in ("tril", "triu")},
    "aten::diagonal_backward": OpRow(diagonal_backward, local_sizes),
    "aten::repeat": OpRow(repeat, local_repeat),
    "aten::unfold_backward": OpRow(unfold_backward, local_sizes),
}
