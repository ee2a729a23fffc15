"""Rows of PyTorch's operators, by family. Keys are full overload names: "aten::sum.dim_IntList"."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.errors import IRError
from partitioner.ir.ops.aten import (
    attention,
    contraction,
    convolution,
    dropout,
    factories,
    gradients,
    indexing,
    joining,
    losses,
    movement,
    normalization,
    pointwise,
    pooling,
    reduction,
    softmax,
    state,
    upsampling,
    views,
    vocabulary,
)
from partitioner.ir.ops.table import OpRow

_FAMILIES = (
    attention,
    contraction,
    convolution,
    dropout,
    factories,
    gradients,
    indexing,
    joining,
    losses,
    movement,
    normalization,
    pointwise,
    pooling,
    reduction,
    softmax,
    state,
    upsampling,
    views,
    vocabulary,
)


def _merge() -> Mapping[str, OpRow]:
    rows: dict[str, OpRow] = {}
    for family in _FAMILIES:
        for op, row in family.ROWS.items():
            if op in rows:
                raise IRError(f"op {op!r} has two rows")
            rows[op] = row
    return rows


ROWS: Mapping[str, OpRow] = _merge()
