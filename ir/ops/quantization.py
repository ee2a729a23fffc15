"""Quantised storage: QuantizeLinear and DequantizeLinear per tensor, per axis and per block."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def linear(view: OpView) -> Rule:
    """Scales and zero points lie along the axis they are given for; a block shares one scale."""
    shape, scale = view.shape(0), view.shape(1)
    dims = ["1" if size == 1 else f"d{i}" for i, size in enumerate(shape)]
    axis = view.int_attr("axis", 1) % max(len(shape), 1)
    settings, whole = _per_tensor_or_axis(dims, scale, axis), set[str]()
    if len(scale) == len(shape) > 1 and view.int_attr("block_size", 0):
        dims, settings, whole = _per_block(dims, shape, scale, axis)
    operands = [dims, *(settings if held is not None else None for held in view.shapes[1:])]
    sizes = {"block": shape[axis] // scale[axis]} if "block" in whole else {}
    return Rule.of(
        operands, [dims], view.shapes, view.out_shapes, whole=whole, sizes=sizes, flops=3
    )


def _per_tensor_or_axis(dims: list[str], scale: tuple[int, ...], axis: int) -> list[str]:
    if not scale:
        return []
    return [dims[axis] if scale[0] != 1 else "1"]


def _per_block(
    dims: list[str], shape: tuple[int, ...], scale: tuple[int, ...], axis: int
) -> tuple[list[str], list[str], set[str]]:
    if shape[axis] % scale[axis]:  # The last block is short: its boundaries are not a factor's.
        return dims, [*dims[:axis], "blocks", *dims[axis + 1 :]], {dims[axis], "blocks"}
    before, after = dims[:axis], dims[axis + 1 :]
    return [*before, "(blocks block)", *after], [*before, "blocks", *after], {"block"}


ROWS: Mapping[str, OpRow] = {"DequantizeLinear": OpRow(linear), "QuantizeLinear": OpRow(linear)}
