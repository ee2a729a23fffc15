"""Tensors made from numbers and shapes; each device makes its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from partitioner.ir.graph import Attr, Node
from partitioner.ir.ops.local import local_shape, other_node
from partitioner.ir.ops.rules.elementwise import elementwise
from partitioner.ir.ops.signature import pattern
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

_filled = pattern("-> d..")
_made_whole = pattern("-> d..", whole="d..")


def _new(view: OpView, *, zero: bool = False) -> Rule:
    """A tensor of another's element type; that may be cut in any way and, for zeros, be pending."""
    like = "d.." if view.shape() == view.out_shape else "x.."
    return view.rule([like], ["d.."], dropped="x..", sums=[0] if zero else [])


def _written(_: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """Bytes moved where no operand is read."""
    return outs[0]


def _nothing(*_: tuple[int, ...]) -> int:
    """Bytes moved where nothing is read or written."""
    return 0


def _like(sums: list[int] | None = None, *, written: bool = True) -> OpRow:
    """Row of a tensor of the first operand's shape; its elements may be left unwritten."""
    rule = partial(elementwise, flops=0.0, sums=sums or ())
    return OpRow(rule, moved=_written if written else _nothing, uniform=written)


def _local_strided(view: OpView, local: LocalView) -> LocalOp:
    """An empty part has strides of its own: those of the whole do not fit it."""
    attrs = {key: value for key, value in view.node.attrs.items() if key != "stride"}
    return other_node(view, "aten::new_empty", **{**attrs, "size": local.out_shapes[0]})


def _arange(view: OpView) -> Rule:
    """Ranges of integers are made in parts; in others, rounding depends on the start."""
    exact = all(isinstance(view.attr(name, 0), int) for name in ("start", "step"))
    return _filled(view) if exact else _made_whole(view)


def _local_arange(view: OpView, local: LocalView) -> LocalOp:
    """Joins the device's pieces of the range."""
    node, dtype = view.node, view.out_type.dtype
    start, step = view.int_attr("start", 0), view.int_attr("step", 1)
    nodes, types = [], {}
    for index, (first, length) in enumerate(local.out_regions[0][0] or ((0, 0),)):
        name = f"{node.name}.{index}.part"
        types[name] = TensorType.of(dtype, (length,))
        attrs: dict[str, Attr] = {
            "start": start + step * first,
            "end": start + step * (first + length),
            "step": step,
            "dtype": dtype,
        }
        nodes.append(Node(name, "aten::arange.start_step", (), (name,), attrs))
    if len(nodes) == 1:
        return LocalOp((replace(nodes[0], name=node.name, outputs=node.outputs),))
    attrs = {"tensors": len(nodes), "dim": 0}
    joint = Node(node.name, "aten::cat", (*types,), node.outputs, attrs)
    return LocalOp((*nodes, joint), types=types)


ROWS: Mapping[str, OpRow] = {
    **{
        f"aten::{op}": OpRow(_filled, local_shape("size"), uniform=True)
        for op in ("full", "ones", "zeros")
    },
    **{f"aten::{op}": OpRow(_made_whole) for op in ("eye", "eye.m", "linspace")},
    **{
        f"aten::arange{overload}": OpRow(_arange, _local_arange, where=True)
        for overload in ("", ".start", ".start_step")
    },
    **{f"aten::{op}": _like() for op in ("fill.Scalar", "full_like", "ones_like")},
    **{
        f"aten::{op}": OpRow(_new, local_shape("size"), moved=_written, uniform=True)
        for op in ("new_full", "new_ones")
    },
    "aten::empty.memory_format": OpRow(_filled, local_shape("size"), moved=_nothing),
    "aten::empty_like": _like(written=False),
    "aten::fill.Tensor": _like([1]),
    "aten::new_empty": OpRow(_new, local_shape("size"), moved=_nothing),
    "aten::new_empty_strided": OpRow(_new, _local_strided, moved=_nothing),
    "aten::new_zeros": OpRow(
        partial(_new, zero=True), local_shape("size"), moved=_written, uniform=True
    ),
    "aten::scalar_tensor": OpRow(_filled),
    "aten::zeros_like": _like([0]),
}
