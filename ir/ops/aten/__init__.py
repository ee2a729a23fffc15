"""Rows of PyTorch's operators, by family. Keys are full overload names: "aten::sum.dim_IntList"."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.aten import (
    attention,
    branches,
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
from partitioner.ir.ops.table import OpRow, merged

_FAMILIES = (
    attention,
    branches,
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

ROWS: Mapping[str, OpRow] = merged(_FAMILIES)
