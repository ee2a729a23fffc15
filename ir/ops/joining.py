"""Parts of a dim put together and taken apart: Concat, Split, Slice.

The joined dim is a sum of factors, one a part. The parts are cut over the same axes, each with
its own layout, and a device's piece of the whole is its pieces of the parts one after the other:
so the local op is the same op with local sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from partitioner.ir.ops.dims import empty_parts, joined, names, replaced, with_whole
from partitioner.ir.ops.table import LocalOp, LocalView, OpaqueError, OpRow, OpView, same_node
from partitioner.ir.rule import Rule

#: First opsets in which sizes of Split, and starts and ends of Slice, are operands.
SPLIT_INPUT = 13
SLICE_INPUT = 10


def concat(view: OpView) -> Rule:
    """``d0 a0, d0 a1 -> d0 a0 + a1``."""
    rank = len(view.out_shape())
    axis = view.int_attr("axis", 1) % rank
    dims, parts = names("d", rank), names("a", len(view.node.inputs))
    sizes = {name: view.shape(i)[axis] for i, name in enumerate(parts)}
    return Rule.of(
        [replaced(dims, axis, name) for name in parts],
        [replaced(dims, axis, joined(parts, sizes))],
        view.shapes,
        view.out_shapes,
        whole=empty_parts(sizes),
    )


def split_axis(view: OpView) -> int:
    """The dim that is split."""
    return view.int_attr("axis", 0) % len(view.shape(0))


def split_sizes(view: OpView) -> tuple[int, ...]:
    """Sizes of the parts: as given, or equal with a smaller last one."""
    given = view.ints("split", 1)
    if given is not None:
        return given
    size, count = view.shape(0)[split_axis(view)], len(view.node.outputs)
    part = -(-size // count)
    return (*([part] * (count - 1)), size - part * (count - 1))


def split(view: OpView) -> Rule:
    """``d0 a0 + a1 -> d0 a0, d0 a1``."""
    axis, dims = split_axis(view), names("d", len(view.shape(0)))
    sizes = dict(zip(names("a", len(view.node.outputs)), split_sizes(view), strict=True))
    return Rule.of(
        with_whole(view, replaced(dims, axis, joined(tuple(sizes), sizes))),
        [replaced(dims, axis, part) for part in sizes],
        view.shapes,
        view.out_shapes,
        whole=empty_parts(sizes),
    )


def local_split(view: OpView, local: LocalView) -> LocalOp:
    """Sizes are given, since equal parts may have unequal pieces."""
    sizes = tuple(local.sizes[name] for name in names("a", len(view.node.outputs)))
    if view.opset < SPLIT_INPUT:
        return same_node(view, split=sizes)
    attrs = {key: value for key, value in view.node.attrs.items() if key != "num_outputs"}
    where = f"{view.node.name}.1.local"
    node = replace(view.node, inputs=(view.node.inputs[0], where), attrs=attrs)
    return LocalOp((node,), {where: np.array(sizes, np.int64)})


def _taken(view: OpView) -> dict[int, tuple[int, int, int]]:
    """(start, end, step) of every sliced dim, as given."""
    starts, ends = view.ints("starts", 1), view.ints("ends", 2)
    if starts is None or ends is None:
        raise OpaqueError("starts or ends are not given")
    rank = len(view.shape(0))
    axes = view.ints("axes", 3) or tuple(range(len(starts)))
    steps = view.ints("steps", 4) or (1,) * len(starts)
    return {
        axis % rank: bounds
        for axis, bounds in zip(axes, zip(starts, ends, steps, strict=True), strict=True)
    }


def _runs(view: OpView) -> dict[int, tuple[int, int, int]]:
    """Sizes (before, taken, after) of the dims that a step-1 slice takes a non-empty run of."""
    shape = view.shape(0)
    found = {}
    for axis, (start, end, step) in _taken(view).items():
        first, last, _ = slice(start, end).indices(shape[axis])
        if step == 1 and first < last:
            found[axis] = (first, last - first, shape[axis] - last)
    return found


def slice_(view: OpView) -> Rule:
    """``pre + d + post -> d`` for a run of step 1; dims sliced otherwise are whole."""
    shape, runs = view.shape(0), _runs(view)
    before, after = names("d", len(shape)), names("d", len(shape))
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    for axis in _taken(view):
        if axis in runs:
            parts = dict(zip((f"pre{axis}", f"d{axis}", f"post{axis}"), runs[axis], strict=True))
            before[axis] = joined(tuple(parts), parts)
            sizes.update(parts)
        else:
            before[axis], after[axis] = f"x{axis}", f"y{axis}"
            whole |= {before[axis], after[axis]}
    return Rule.of(
        with_whole(view, before),
        [after],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=whole,
        dropped=sizes,
    )


def local_slice(view: OpView, local: LocalView) -> LocalOp:
    """A run starts after the device's own elements before it, and ends with its own part."""
    bounds = {axis: (start, end) for axis, (start, end, _) in _taken(view).items()}
    for axis in _runs(view):
        first = local.sizes.get(f"pre{axis}", 0)
        bounds[axis] = (first, first + local.sizes[f"d{axis}"])
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


def taken_twice(_: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """Bytes moved by a slice: what is taken, read and written."""
    return 2 * outs[0]


ROWS: Mapping[str, OpRow] = {
    "Concat": OpRow(concat),
    "Slice": OpRow(slice_, local_slice, moved=taken_twice),
    "Split": OpRow(split, local_split),
}
