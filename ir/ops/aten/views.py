"""The same elements, or some of them, under another shape: the result is the operand's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.contraction import broadcast_dims
from partitioner.ir.ops.dims import names, replaced
from partitioner.ir.ops.reshape import reshape
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, same_node
from partitioner.ir.rule import Rule


def view_as(view: OpView) -> Rule:
    """The same elements in the same order."""
    return reshape(view, sums(view, 0))


def local_view(view: OpView, local: LocalView) -> LocalOp:
    """The new shape is the local result's.

    A part of a tensor may lie in other strides than the whole (it was cut out of a larger one,
    or moved), and `view` is only for strides that fit: `reshape` copies where they do not.
    """
    shape = local.out_shapes[0]
    return LocalOp((replace(view.node, op="aten::reshape", attrs={"shape": shape}),))


def renamed(
    view: OpView,
    before: Sequence[str],
    after: Sequence[str],
    *,
    whole: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """Rule of one operand whose elements are moved or left out, so that pending sums pass."""
    return Rule.of(
        [before],
        [after],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=whole,
        dropped=sizes or (),
        linear=sums(view, 0),
    )


def same(view: OpView) -> Rule:
    """The same tensor."""
    dims = names("d", len(view.shape(0)))
    return renamed(view, dims, dims)


def permuted(view: OpView) -> Rule:
    """Dims in another order: `permute`, `transpose` and `t`."""
    dims = names("d", len(view.shape(0)))
    order = view.attr("dims")
    if isinstance(order, tuple):
        return renamed(view, dims, [dims[int(dim)] for dim in order])
    after = list(dims)
    if after:
        one, other = (0, len(dims) - 1) if view.attr("dim0") is None else _swapped(view)
        after[one], after[other] = dims[other], dims[one]
    return renamed(view, dims, after)


def _swapped(view: OpView) -> tuple[int, int]:
    return view.int_attr("dim0", 0), view.int_attr("dim1", 0)


def expand(view: OpView) -> Rule:
    """``1 b1 -> b0 b1``: broadcast, as elementwise operators do."""
    out = view.out_shape()
    return renamed(view, broadcast_dims(view.shape(0), len(out)), broadcast_dims(out, len(out)))


def local_expand(view: OpView, local: LocalView) -> LocalOp:
    """The wanted shape is the local result's."""
    return same_node(view, size=local.out_shapes[0])


def unsqueeze(view: OpView) -> Rule:
    """``d0 d1 -> d0 1 d1``."""
    dims = names("d", len(view.shape(0)))
    place = view.int_attr("dim", 0) % (len(dims) + 1)
    return renamed(view, dims, [*dims[:place], "1", *dims[place:]])


def squeezed(view: OpView) -> frozenset[int]:
    """Dims that are dropped: those of size 1 among the named ones, or among all."""
    shape, dim = view.shape(0), view.attr("dim")
    if isinstance(dim, tuple):
        asked = [int(one) for one in dim]
    else:
        asked = list(range(len(shape))) if dim is None else [view.int_attr("dim", 0)]
    return frozenset(one % len(shape) for one in asked if shape and shape[one] == 1)


def squeeze(view: OpView) -> Rule:
    """``d0 1 d2 -> d0 d2``."""
    lost = squeezed(view)
    dims = ["1" if i in lost else name for i, name in enumerate(names("d", len(view.shape(0))))]
    return renamed(view, dims, [name for i, name in enumerate(dims) if i not in lost])


def local_squeeze(view: OpView, _: LocalView) -> LocalOp:
    """The dims are named, since a local dim may have become 1."""
    lost = tuple(sorted(squeezed(view)))
    return LocalOp((replace(view.node, op="aten::squeeze.dims", attrs={"dim": lost}),))


def select(view: OpView) -> Rule:
    """One element of a dim, which is whole."""
    dims = names("d", len(view.shape(0)))
    axis = view.int_attr("dim", 0) % len(dims)
    return renamed(view, replaced(dims, axis, "x"), [*dims[:axis], *dims[axis + 1 :]], whole=("x",))


def unbind(view: OpView) -> Rule:
    """Every element of a dim, which is whole, as a result."""
    dims = names("d", len(view.shape(0)))
    axis = view.int_attr("dim", 0) % len(dims)
    kept = [*dims[:axis], *dims[axis + 1 :]]
    return Rule.of(
        [replaced(dims, axis, "x")],
        [kept if name else None for name in view.node.outputs],
        view.shapes,
        view.out_shapes,
        whole={"x"},
        linear=sums(view, 0),
        dropped=kept,
    )


def diagonal(view: OpView) -> Rule:
    """A diagonal of two dims, which are whole, as the last dim."""
    dims = names("d", len(view.shape(0)))
    pair = {view.int_attr(name, 0) % len(dims) for name in ("dim1", "dim2")}
    kept = [name for i, name in enumerate(dims) if i not in pair]
    lost = tuple(dims[i] for i in sorted(pair))
    return renamed(view, dims, [*kept, "z"], whole=(*lost, "z"))


def unfold(view: OpView) -> Rule:
    """Windows of a dim, which is whole, as the last dim."""
    dims = names("d", len(view.shape(0)))
    axis = view.int_attr("dimension", 0) % len(dims)
    return renamed(view, dims, [*replaced(dims, axis, "n"), "w"], whole=(dims[axis], "n", "w"))


def as_real(view: OpView) -> Rule:
    """The real and the imaginary part of every element as the last dim, which is whole."""
    dims = names("d", len(view.shape(0)))
    return _of_pairs(view, dims, [*dims, "pair"])


def as_complex(view: OpView) -> Rule:
    """The last dim, which is whole, is the real and the imaginary part of an element."""
    dims = names("d", len(view.out_shape()))
    return _of_pairs(view, [*dims, "pair"], dims)


def _of_pairs(view: OpView, before: list[str], after: list[str]) -> Rule:
    return Rule.of([before], [after], view.shapes, view.out_shapes, whole={"pair"}, linear={0})


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(same, view=True) for op in ("alias", "detach")},
    **{f"aten::{op}": OpRow(permuted, view=True) for op in ("permute", "t", "transpose.int")},
    **{
        f"aten::{op}": OpRow(squeeze, local_squeeze, view=True)
        for op in ("squeeze", "squeeze.dim", "squeeze.dims")
    },
    **{
        f"aten::{op}": OpRow(view_as, local_view, view=True)
        for op in ("_unsafe_view", "reshape", "view")
    },
    "aten::diagonal": OpRow(diagonal, view=True),
    "aten::expand": OpRow(expand, local_expand, view=True),
    "aten::select.int": OpRow(select, view=True),
    "aten::unbind.int": OpRow(unbind, view=True),
    "aten::unfold": OpRow(unfold, view=True),
    "aten::unsqueeze": OpRow(unsqueeze, view=True),
    "aten::view_as_complex": OpRow(as_complex, view=True),
    "aten::view_as_real": OpRow(as_real, view=True),
}
