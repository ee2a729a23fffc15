"""Matrix products: MatMul, Gemm, and their quantised and fused relatives."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def broadcast_dims(shape: tuple[int, ...], rank: int, prefix: str = "b") -> list[str]:
    """Factor names of a broadcast operand, aligned at the last dim; size-1 dims are ``"1"``."""
    offset = rank - len(shape)
    return ["1" if size == 1 else f"{prefix}{offset + i}" for i, size in enumerate(shape)]


def matmul(view: OpView) -> Rule:
    """``... m k, ... k n -> ... m n`` with NumPy's rules for vectors and broadcast batches."""
    a, b = view.shape(0), view.shape(1)
    out = view.out_shape()
    batch = len(out) - (len(a) > 1) - (len(b) > 1)
    left = [*broadcast_dims(a[:-2], batch), *(["m"] if len(a) > 1 else []), "k"]
    right = [*broadcast_dims(b[:-2], batch), "k", *(["n"] if len(b) > 1 else [])]
    result = [f"b{i}" if size != 1 else "1" for i, size in enumerate(out[:batch])]
    result += (["m"] if len(a) > 1 else []) + (["n"] if len(b) > 1 else [])
    return Rule.of([left, right], [result], [a, b], [out], reduce={"k": "sum"}, flops=2)


def gemm(view: OpView) -> Rule:
    """``m k, k n, (m|1) (n|1) -> m n`` with either factor transposed."""
    a = ["k", "m"] if view.int_attr("transA", 0) else ["m", "k"]
    b = ["n", "k"] if view.int_attr("transB", 0) else ["k", "n"]
    operands: list[list[str] | None] = [a, b]
    bias = view.type(2)
    if bias is not None:
        names = ["m", "n"][2 - bias.rank :]
        operands.append(
            [name if size != 1 else "1" for name, size in zip(names, bias.shape, strict=True)]
        )
    elif len(view.node.inputs) == 3:
        operands.append(None)
    return Rule.of(
        operands,
        [["m", "n"]],
        view.shapes,
        view.out_shapes,
        reduce={"k": "sum"},
        addends={2},
        flops=2,
    )


ROWS: Mapping[str, OpRow] = {"MatMul": OpRow(matmul), "Gemm": OpRow(gemm)}
