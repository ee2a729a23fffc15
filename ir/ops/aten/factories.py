"""Tensors made from numbers and shapes: every device makes its part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from partitioner.ir.graph import Attr, Node
from partitioner.ir.ops.aten.pointwise import pointwise
from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, same_node
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType


def filled(view: OpView) -> Rule:
    """The same number everywhere."""
    return Rule.of([], [names("d", len(view.out_shape()))], [], view.out_shapes)


def local_size(view: OpView, local: LocalView) -> LocalOp:
    """The wanted shape is the local result's."""
    return same_node(view, size=local.out_shapes[0])


def new(zero: bool) -> Callable[[OpView], Rule]:
    """Rule of a tensor like another only in its element type: the other may be cut anyhow.

    Zeros are their own sum, so the other may be pending.
    """

    def rule(view: OpView) -> Rule:
        dims = names("d", len(view.out_shape()))
        like = dims if view.shape(0) == view.out_shape() else names("x", len(view.shape(0)))
        linear = sums(view, 0) if zero else ()
        return Rule.of([like], [dims], view.shapes, view.out_shapes, dropped=like, linear=linear)

    return rule


def local_strided(view: OpView, local: LocalView) -> LocalOp:
    """A part without contents in strides of its own: those of the whole do not fit it."""
    attrs = {key: value for key, value in view.node.attrs.items() if key != "stride"}
    attrs["size"] = local.out_shapes[0]
    return LocalOp((replace(view.node, op="aten::new_empty", attrs=attrs),))


def like(zero: bool) -> Callable[[OpView], Rule]:
    """Rule of a tensor of another's shape."""
    return lambda view: pointwise(view, 0.0, sums(view, 0) if zero else ())


def fill(view: OpView) -> Rule:
    """The second operand everywhere; of the first only the shape matters."""
    return pointwise(view, 0.0, sums(view, 1))


def made_whole(view: OpView) -> Rule:
    """Made whole on each device."""
    dims = names("d", len(view.out_shape()))
    return Rule.of([], [dims], [], view.out_shapes, whole=dims)


def arange(view: OpView) -> Rule:
    """Whole numbers are made in parts; steps of fractions are rounded from their start."""
    exact = all(isinstance(number, int) for number in _bounds(view))
    return filled(view) if exact else made_whole(view)


def _bounds(view: OpView) -> tuple[Attr | None, Attr | None]:
    return view.attr("start", 0), view.attr("step", 1)


def local_arange(view: OpView, local: LocalView) -> LocalOp:
    """The device's pieces one after the other."""
    node, kind = view.node, view.graph.types[view.node.outputs[0]]
    start, step = view.int_attr("start", 0), view.int_attr("step", 1)
    pieces = local.out_regions[0][0]
    held = pieces if len(pieces) > 1 else ()
    parts = tuple(f"{node.name}.{index}.part" for index in range(len(held))) or node.outputs
    nodes = []
    for name, (first, length) in zip(parts, pieces or ((0, 0),), strict=True):
        attrs: dict[str, Attr] = {
            "start": start + step * first,
            "end": start + step * (first + length),
            "step": step,
            "dtype": kind.dtype,
        }
        nodes.append(Node(name, "aten::arange.start_step", (), (name,), attrs))
    if not held:
        return LocalOp((replace(nodes[0], name=node.name),))
    joint = Node(node.name, "aten::cat", parts, node.outputs, {"tensors": len(parts), "dim": 0})
    types = {
        name: TensorType.of(kind.dtype, (length,))
        for name, (_, length) in zip(parts, held, strict=True)
    }
    return LocalOp((*nodes, joint), types=types)


def _written(_: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """Bytes moved where no operand is read."""
    return outs[0]


def _none(*_: tuple[int, ...]) -> int:
    """Bytes moved where nothing is written either."""
    return 0


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(filled, local_size) for op in ("full", "ones", "zeros")},
    **{f"aten::{op}": OpRow(made_whole) for op in ("eye", "eye.m", "linspace")},
    **{
        f"aten::{op}": OpRow(arange, local_arange, where=True)
        for op in ("arange", "arange.start", "arange.start_step")
    },
    **{
        f"aten::{op}": OpRow(like(zero=False), moved=_written)
        for op in ("fill.Scalar", "full_like", "ones_like")
    },
    **{
        f"aten::{op}": OpRow(new(zero=False), local_size, moved=_written)
        for op in ("new_full", "new_ones")
    },
    "aten::empty.memory_format": OpRow(filled, local_size, moved=_none),
    "aten::empty_like": OpRow(like(zero=False), moved=_none),
    "aten::fill.Tensor": OpRow(fill, moved=_written),
    "aten::new_empty": OpRow(new(zero=False), local_size, moved=_none),
    "aten::new_empty_strided": OpRow(new(zero=False), local_strided, moved=_none),
    "aten::new_zeros": OpRow(new(zero=True), local_size, moved=_written),
    "aten::scalar_tensor": OpRow(filled),
    "aten::zeros_like": OpRow(like(zero=True), moved=_written),
}
