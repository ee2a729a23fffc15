"""Rows of ONNX's operators, by family; those of ONNX Runtime are ``com.microsoft::<name>``."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.onnx import (
    attention,
    contraction,
    elementwise,
    factories,
    feeding,
    indexing,
    movement,
    normalization,
    quantised,
    reduction,
    windows,
)
from partitioner.ir.ops.table import OpRow, merged

ROWS: Mapping[str, OpRow] = merged(
    attention,
    contraction,
    elementwise,
    factories,
    feeding,
    indexing,
    movement,
    normalization,
    quantised,
    reduction,
    windows,
)
