"""Rows of PyTorch's operators, by family. Keys are full overload names: "aten::sum.dim_IntList"."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.aten import (
    attention,
    bags,
    contraction,
    convolution,
    experts,
    factories,
    indexing,
    losses,
    movement,
    normalization,
    pointwise,
    pools,
    reduction,
    state,
    windows,
)
from partitioner.ir.ops.table import OpRow, merged

ROWS: Mapping[str, OpRow] = merged(
    attention,
    bags,
    contraction,
    convolution,
    experts,
    factories,
    indexing,
    losses,
    movement,
    normalization,
    pointwise,
    pools,
    reduction,
    state,
    windows,
)
