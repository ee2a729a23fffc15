"""Tensors made from shapes and scalars: Shape, Size, ConstantOfShape, Range, EyeLike."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from partitioner.ir.graph import Node
from partitioner.ir.ops.local import local_shape_operand
from partitioner.ir.ops.signature import pattern
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView

#: Ops that draw random numbers, others each time they run: never folded, never merged.
RANDOM = frozenset((
    "Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
))  # fmt: skip
#: The operand's dims are cut and the result is not: sizes are known without elements.
_measured = pattern("d.. -> n..", whole="n..", dropped="d..")
_made_whole = pattern("_ -> d..", whole="d..")


def _local_shape(view: OpView, _: LocalView) -> LocalOp:
    start, end = view.int_attr("start", 0), view.attr("end")
    sizes = view.shape()[start : end if isinstance(end, int) else None]
    return _constant(view, np.array(sizes, np.int64))


def _constant(view: OpView, array: np.ndarray) -> LocalOp:
    name = f"{view.node.name}.local"
    return LocalOp((Node(view.node.name, "Identity", (name,), view.node.outputs),), {name: array})


ROWS: Mapping[str, OpRow] = {
    "ConstantOfShape": OpRow(pattern("_ -> d.."), local_shape_operand(0)),
    "EyeLike": OpRow(_made_whole),
    "Range": OpRow(_made_whole),
    "Shape": OpRow(_measured, _local_shape, moved=lambda _, outs: outs[0]),
    "Size": OpRow(
        _measured,
        lambda view, _: _constant(view, np.array(math.prod(view.shape()), np.int64)),
        moved=lambda _, outs: outs[0],
    ),
}
