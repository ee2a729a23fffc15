"""Tensors made from shapes and scalars: Shape, Size, ConstantOfShape, Range, EyeLike."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from partitioner.ir.graph import Node
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, with_constant
from partitioner.ir.rule import Rule


def shape_of(view: OpView) -> Rule:
    """The operand's dims are cut and the result is not: sizes are known without elements."""
    dims = names("d", len(view.shape(0)))
    result = names("n", len(view.out_shape()))
    return Rule.of([dims], [result], view.shapes, view.out_shapes, whole=result, dropped=dims)


def local_shape(view: OpView, _: LocalView) -> LocalOp:
    """The whole operand's sizes, as a constant."""
    start, end = view.int_attr("start", 0), view.attr("end")
    sizes = view.shape(0)[start : end if isinstance(end, int) else None]
    return _constant(view, np.array(sizes, np.int64))


def local_size(view: OpView, _: LocalView) -> LocalOp:
    """The whole operand's number of elements, as a constant."""
    return _constant(view, np.array(math.prod(view.shape(0)), np.int64))


def _constant(view: OpView, array: np.ndarray) -> LocalOp:
    name = f"{view.node.name}.local"
    return LocalOp((Node(view.node.name, "Identity", (name,), view.node.outputs),), {name: array})


def filled(view: OpView) -> Rule:
    """Every device fills its part."""
    dims = names("d", len(view.out_shape()))
    return Rule.of([None], [dims], view.shapes, view.out_shapes)


def local_filled(view: OpView, local: LocalView) -> LocalOp:
    """The wanted shape is the local result's."""
    return with_constant(view, 0, np.array(local.out_shapes[0], np.int64))


def made_whole(view: OpView) -> Rule:
    """Made whole on each device from operands that are whole too."""
    dims = names("d", len(view.out_shape()))
    operands = [None for _ in view.node.inputs]
    return Rule.of(operands, [dims], view.shapes, view.out_shapes, whole=dims)


ROWS: Mapping[str, OpRow] = {
    "ConstantOfShape": OpRow(filled, local_filled),
    "EyeLike": OpRow(made_whole),
    "Range": OpRow(made_whole),
    "Shape": OpRow(shape_of, local_shape, moved=lambda _, outs: outs[0]),
    "Size": OpRow(shape_of, local_size, moved=lambda _, outs: outs[0]),
}
