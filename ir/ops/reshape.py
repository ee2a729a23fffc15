"""The same elements under another shape: Reshape, Flatten, Squeeze, Unsqueeze."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from partitioner.ir.ops.dims import names, with_whole
from partitioner.ir.ops.table import (
    LocalOp,
    LocalView,
    OpaqueError,
    OpRow,
    OpView,
    Shape,
    same_node,
    with_constant,
)
from partitioner.ir.rule import Rule

#: First opset in which the axes of Squeeze and Unsqueeze are an operand.
AXES_INPUT = 13

Sized = tuple[tuple[int, int], ...]  #: (dim, what is left of its size), major first.


@dataclass(frozen=True, slots=True)
class Piece:
    """A factor of two shapes of the same elements.

    Attributes:
        before: Dim of the old shape that it lies in; None if it crosses dims there.
        after: Dim of the new shape; None if it crosses dims there.
        size: Its size.
    """

    before: int | None
    after: int | None
    size: int


def refine(before: Shape, after: Shape) -> tuple[Piece, ...]:
    """Factors of two shapes of the same elements, major first in each dim.

    Consecutive dims with equal products share common factors from either end; what is left
    between the ends has no common dim boundary and gives pieces of one shape only.

    >>> [(p.before, p.after, p.size) for p in refine((6, 1, 64), (2, 192))]
    [(0, 0, 2), (0, 1, 3), (2, 1, 64)]
    >>> [(p.before, p.after, p.size) for p in refine((6, 4), (8, 3))]
    [(0, 0, 2), (0, None, 3), (1, None, 4), (None, 0, 4), (None, 1, 3)]
    """
    return tuple(itertools.chain(*(_common(*group) for group in _groups(before, after))))


def _groups(before: Shape, after: Shape) -> Iterator[tuple[Sized, Sized]]:
    """The shortest runs of dims with equal products, without dims of size 1."""
    if 0 in before:
        yield tuple(enumerate(before)), tuple(enumerate(after))
        return
    right = iter([(dim, size) for dim, size in enumerate(after) if size != 1])
    run: Sized = ()
    other: Sized = ()
    for dim, size in enumerate(before):
        run = (*run, (dim, size)) if size != 1 else run
        while _product(other) < _product(run):
            other = (*other, next(right))
        if run and _product(run) == _product(other):
            yield run, other
            run, other = (), ()


def _product(dims: Sized) -> int:
    return math.prod(size for _, size in dims)


def _common(before: Sized, after: Sized) -> Iterator[Piece]:
    major, before, after = _peel(before, after, 0)
    minor, before, after = _peel(before, after, -1)
    yield from major
    yield from (Piece(dim, None, size) for dim, size in before)
    yield from (Piece(None, dim, size) for dim, size in after)
    yield from reversed(minor)


def _peel(before: Sized, after: Sized, end: int) -> tuple[list[Piece], Sized, Sized]:
    """Take common factors off one end while there are any; empty tensors have none."""
    found: list[Piece] = []
    empty = _product(before) == 0
    while before and not empty and (size := math.gcd(before[end][1], after[end][1])) > 1:
        found.append(Piece(before[end][0], after[end][0], size))
        before, after = _divided(before, end, size), _divided(after, end, size)
    return found, before, after


def _divided(dims: Sized, end: int, size: int) -> Sized:
    dim, left = dims[end]
    rest = dims[1:] if end == 0 else dims[:-1]
    if left == size:
        return rest
    divided = ((dim, left // size),)
    return (*divided, *rest) if end == 0 else (*rest, *divided)


def reshape(view: OpView, linear: Iterable[int] = ()) -> Rule:
    """Factors of both shapes pass; those that cross dims of either are whole."""
    before, after = view.shape(0), view.out_shape()
    pieces = {f"f{i}": piece for i, piece in enumerate(refine(before, after))}
    old = ([n for n, p in pieces.items() if p.before == dim] for dim in range(len(before)))
    new = ([n for n, p in pieces.items() if p.after == dim] for dim in range(len(after)))
    return Rule.of(
        with_whole(view, _compounds(old)),
        [_compounds(new)],
        view.shapes,
        view.out_shapes,
        sizes={name: piece.size for name, piece in pieces.items()},
        whole={n for n, p in pieces.items() if p.before is None or p.after is None},
        linear=linear,
    )


def _compounds(terms: Iterable[Iterable[str]]) -> list[str]:
    return ["(" + " ".join(term or ("1",)) + ")" for term in map(tuple, terms)]


def local_reshape(view: OpView, local: LocalView) -> LocalOp:
    """The new shape is the local result's.

    It has no 0, which Reshape may read as "copy the dim": no part of a cut dim is empty, and
    tensors without elements share no factors (`refine`), so their Reshape runs as it is.
    """
    assert 0 not in local.out_shapes[0], f"{view.node.name!r}: {local.out_shapes[0]}"
    return with_constant(view, 1, np.array(local.out_shapes[0], np.int64))


def flatten(view: OpView) -> Rule:
    """``d0 d1 d2 d3 -> (d0 d1) (d2 d3)``."""
    dims = names("d", len(view.shape(0)))
    axis = view.int_attr("axis", 1)
    parts = _compounds((dims[:axis], dims[axis:]))
    return Rule.of([dims], [parts], view.shapes, view.out_shapes)


def squeezed_axes(view: OpView) -> frozenset[int]:
    """Dims that a Squeeze drops: those named, or all of size 1."""
    shape = view.shape(0)
    axes = view.ints("axes", 1)
    if axes is None:
        return frozenset(axis for axis, size in enumerate(shape) if size == 1)
    return frozenset(axis % len(shape) for axis in axes)


def squeeze(view: OpView) -> Rule:
    """``d0 1 d2 -> d0 d2``."""
    axes = squeezed_axes(view)
    dims = ["1" if i in axes else f"d{i}" for i in range(len(view.shape(0)))]
    kept = [name for i, name in enumerate(dims) if i not in axes]
    return Rule.of(with_whole(view, dims), [kept], view.shapes, view.out_shapes)


def local_squeeze(view: OpView, _: LocalView) -> LocalOp:
    """Axes are named, since a local dim may have become 1."""
    if view.ints("axes", 1) is not None:
        return LocalOp((view.node,))
    axes = sorted(squeezed_axes(view))
    if view.opset < AXES_INPUT:
        return same_node(view, axes=tuple(axes))
    named = replace(view.node, inputs=(view.node.inputs[0], ""))
    return with_constant(OpView(named, view.graph), 1, np.array(axes, np.int64))


def unsqueeze(view: OpView) -> Rule:
    """``d0 d1 -> d0 1 d1``."""
    axes = view.ints("axes", 1)
    if axes is None:
        raise OpaqueError("axes are not given")
    rank = len(view.out_shape())
    dims = names("d", len(view.shape(0)))
    left = iter(dims)
    added = {axis % rank for axis in axes}
    result = ["1" if i in added else next(left) for i in range(rank)]
    return Rule.of(with_whole(view, dims), [result], view.shapes, view.out_shapes)


ROWS: Mapping[str, OpRow] = {
    "Flatten": OpRow(flatten, view=True),
    "Reshape": OpRow(reshape, local_reshape, view=True),
    "Squeeze": OpRow(squeeze, local_squeeze, view=True),
    "Unsqueeze": OpRow(unsqueeze, view=True),
}
