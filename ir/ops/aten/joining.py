"""Parts of a dim put together and taken apart, and the gradients: cat, split, slices, pads.

A dim of which a part is taken or given is a sum of factors: what lies before, the part, what lies
after. A device's piece of the dim is its pieces of these one after the other, so the local
operator is the same one with local sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partitioner.ir.graph import Attr
from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.aten.views import renamed
from partitioner.ir.ops.dims import empty_parts, joined, names, replaced
from partitioner.ir.ops.table import LocalOp, LocalView, OpaqueError, OpRow, OpView, same_node
from partitioner.ir.rule import Rule


def cat(view: OpView) -> Rule:
    """``d0 a0, d0 a1 -> d0 a0 + a1``; an empty vector may stand for a tensor of any rank."""
    rank = len(view.out_shape())
    axis, dims = view.int_attr("dim", 0) % rank, names("d", rank)
    parts = names("a", len(view.node.inputs))
    shapes = [view.shape(i) for i in range(len(parts))]
    sizes = {
        name: shape[axis] if len(shape) == rank else 0
        for name, shape in zip(parts, shapes, strict=True)
    }
    operands = [
        replaced(dims, axis, name) if len(shape) == rank else [name]
        for name, shape in zip(parts, shapes, strict=True)
    ]
    return Rule.of(
        operands,
        [replaced(dims, axis, joined(parts, sizes))],
        view.shapes,
        view.out_shapes,
        whole=empty_parts(sizes),
        linear=sums(view, *range(len(parts))),
    )


def stack(view: OpView) -> Rule:
    """A new dim, which is whole, with one operand an element."""
    dims = names("d", len(view.shape(0)))
    place = view.int_attr("dim", 0) % (len(dims) + 1)
    count = len(view.node.inputs)
    return Rule.of(
        [dims] * count,
        [[*dims[:place], "n", *dims[place:]]],
        view.shapes,
        view.out_shapes,
        whole={"n"},
        linear=sums(view, *range(count)),
    )


def split_sizes(view: OpView) -> tuple[int, ...]:
    """Sizes of the parts: as given, or of one size with a smaller last one."""
    given = view.ints("split_sizes")
    if given is not None:
        return given
    size = view.shape(0)[_axis(view)]
    part = view.int_attr("split_size", 1)
    return tuple(min(part, size - part * i) for i in range(len(view.node.outputs)))


def _axis(view: OpView) -> int:
    return view.int_attr("dim", 0) % len(view.shape(0))


def split(view: OpView) -> Rule:
    """``d0 a0 + a1 -> d0 a0, d0 a1``."""
    axis, dims = _axis(view), names("d", len(view.shape(0)))
    sizes = dict(zip(names("a", len(view.node.outputs)), split_sizes(view), strict=True))
    results = zip(view.node.outputs, sizes, strict=True)
    return Rule.of(
        [replaced(dims, axis, joined(tuple(sizes), sizes))],
        [replaced(dims, axis, part) if name else None for name, part in results],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=empty_parts(sizes),
        dropped=sizes,
        linear=sums(view, 0),
    )


def local_split(view: OpView, local: LocalView) -> LocalOp:
    """Sizes are given, since equal parts may have unequal pieces."""
    parts = zip(names("a", len(view.node.outputs)), split_sizes(view), strict=True)
    sizes = tuple(local.sizes.get(name, size) for name, size in parts)
    attrs: dict[str, Attr] = {"split_sizes": sizes, "dim": _axis(view)}
    return LocalOp((replace(view.node, op="aten::split_with_sizes", attrs=attrs),))


def _run(view: OpView, size: int) -> Mapping[str, int] | None:
    """Sizes of what is before, in and after a slice of a dim; None for steps and empty slices."""
    start, end = view.attr("start"), view.attr("end")
    first, last, _ = slice(
        start if isinstance(start, int) else None, end if isinstance(end, int) else None
    ).indices(size)
    if view.int_attr("step", 1) != 1 or first >= last:
        return None
    return {"pre": first, "run": last - first, "post": size - last}


def _sliced(
    view: OpView, size: int, rank: int
) -> tuple[list[str], list[str], Mapping[str, int], set[str]]:
    """Dims of the whole and of the slice, sizes, factors that may not be cut."""
    axis, dims = view.int_attr("dim", 0) % rank, names("d", rank)
    sizes = _run(view, size)
    if sizes is None:
        return replaced(dims, axis, "x"), replaced(dims, axis, "y"), {}, {"x", "y"}
    whole = replaced(dims, axis, joined(tuple(sizes), sizes))
    return whole, replaced(dims, axis, "run"), sizes, set()


def slice_(view: OpView) -> Rule:
    """``pre + run + post -> run`` for a step of 1; dims sliced otherwise are whole."""
    shape = view.shape(0)
    before, after, sizes, whole = _sliced(view, shape[_axis(view)], len(shape))
    return renamed(view, before, after, whole=whole, sizes=sizes)


def slice_backward(view: OpView) -> Rule:
    """``run -> pre + run + post``: zeros around."""
    out = view.out_shape()
    after, before, sizes, whole = _sliced(view, out[_axis(view)], len(out))
    return renamed(view, before, after, whole=whole, sizes=sizes)


def slice_scatter(view: OpView) -> Rule:
    """``pre + run + post, run -> pre + run + post``: the second operand in place of the run."""
    shape = view.shape(0)
    around, part, sizes, whole = _sliced(view, shape[_axis(view)], len(shape))
    return Rule.of(
        [around, part],
        [around],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=whole,
        linear=sums(view, 0, 1),
    )


def local_slice(view: OpView, local: LocalView) -> LocalOp:
    """A run starts after the device's own elements before it, and ends with its own part."""
    attrs: dict[str, Attr] = {}
    if "run" in local.sizes:
        first = local.sizes.get("pre", 0)
        attrs = {"start": first, "end": first + local.sizes["run"]}
    if view.attr("input_sizes") is not None:
        attrs["input_sizes"] = local.out_shapes[0]
    return same_node(view, **attrs)


def select_backward(view: OpView) -> Rule:
    """Zeros but for one element of a dim, which is whole."""
    dims = names("d", len(view.out_shape()))
    axis = view.int_attr("dim", 0) % len(dims)
    kept = [*dims[:axis], *dims[axis + 1 :]]
    return renamed(view, kept, replaced(dims, axis, "x"), whole={"x"})


def select_scatter(view: OpView) -> Rule:
    """The second operand in place of one element of a dim, which is whole."""
    axis, dims = _axis(view), names("d", len(view.shape(0)))
    around = replaced(dims, axis, "x")
    return Rule.of(
        [around, [*dims[:axis], *dims[axis + 1 :]]],
        [around],
        view.shapes,
        view.out_shapes,
        whole={"x"},
        linear=sums(view, 0, 1),
    )


def local_sizes(view: OpView, local: LocalView) -> LocalOp:
    """The whole shape of a gradient is the local result's."""
    return same_node(view, input_sizes=local.out_shapes[0])


def _pads(view: OpView) -> Mapping[int, tuple[int, int]]:
    """(before, after) of every padded dim; negative numbers crop."""
    pads, rank = view.ints("pad") or (), len(view.shape(0))
    pairs = zip(pads[::2], pads[1::2], strict=True)
    return {rank - 1 - i: pair for i, pair in enumerate(pairs) if any(pair)}


def pad(view: OpView) -> Rule:
    """``d -> pre + d + post``, or the reverse at an end that is cropped; linear if padded by 0."""
    before = names("d", len(view.shape(0)))
    after = list(before)
    sizes: dict[str, int] = {}
    for axis, (first, last) in _pads(view).items():
        own = {f"pre{axis}": abs(first), f"d{axis}": 0, f"post{axis}": abs(last)}
        own[f"d{axis}"] = view.shape(0)[axis] + min(first, 0) + min(last, 0)
        if own[f"d{axis}"] <= 0:
            raise OpaqueError("nothing of the operand is left")
        pre, mid, post = own
        before[axis] = joined((pre, mid, post), {**own, pre: first < 0, post: last < 0})
        after[axis] = joined((pre, mid, post), {**own, pre: first > 0, post: last > 0})
        sizes.update(own)
    return Rule.of(
        [before],
        [after],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        dropped=sizes,
        linear=sums(view, 0) if view.attr("value", 0) == 0 else (),
    )


def local_pad(view: OpView, local: LocalView) -> LocalOp:
    """Pads are cut as the dim is."""
    pads = _pads(view)
    found: list[int] = []
    for axis in range(len(view.shape(0)) - 1, -1, -1):
        for name, pad in zip((f"pre{axis}", f"post{axis}"), pads.get(axis, (0, 0)), strict=True):
            size = local.sizes.get(name, 0)
            found.append(size if pad > 0 else -size)
    return same_node(view, pad=tuple(found))


ROWS: Mapping[str, OpRow] = {
    "aten::cat": OpRow(cat),
    "aten::constant_pad_nd": OpRow(pad, local_pad),
    "aten::select_backward": OpRow(select_backward, local_sizes),
    "aten::select_scatter": OpRow(select_scatter),
    "aten::slice.Tensor": OpRow(slice_, local_slice, view=True),
    "aten::slice_backward": OpRow(slice_backward, local_slice),
    "aten::slice_scatter": OpRow(slice_scatter, local_slice),
    "aten::split.Tensor": OpRow(split, local_split, view=True),
    "aten::split_with_sizes": OpRow(split, local_split, view=True),
    "aten::stack": OpRow(stack),
}
