"""Matrix products: MatMul, Gemm, and their quantised and fused relatives."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.table import OpaqueError, OpRow, OpView, Shape
from partitioner.ir.rule import Rule


def broadcast_dims(shape: Shape, rank: int, prefix: str = "b") -> list[str]:
    """Factor names of a broadcast operand, aligned at the last dim; size-1 dims are ``"1"``."""
    offset = rank - len(shape)
    return ["1" if size == 1 else f"{prefix}{offset + i}" for i, size in enumerate(shape)]


def matmul_dims(a: Shape, b: Shape, out: Shape) -> tuple[list[str], list[str], list[str]]:
    """Dims of ``... m k, ... k n -> ... m n`` with NumPy's rules for vectors and batches."""
    batch = len(out) - (len(a) > 1) - (len(b) > 1)
    rows, columns = ["m"] * (len(a) > 1), ["n"] * (len(b) > 1)
    left = [*broadcast_dims(a[:-2], batch), *rows, "k"]
    right = [*broadcast_dims(b[:-2], batch), "k", *columns]
    return left, right, [*broadcast_dims(out[:batch], batch), *rows, *columns]


def matmul(view: OpView) -> Rule:
    """``... m k, ... k n -> ... m n``."""
    left, right, result = matmul_dims(view.shape(0), view.shape(1), view.out_shape())
    return Rule.of(
        [left, right], [result], view.shapes, view.out_shapes, reduce={"k": "sum"}, flops=2
    )


def fused_matmul(view: OpView) -> Rule:
    """MatMul with factors of two or more dims transposed, and scaled."""
    if view.int_attr("transBatchA", 0) or view.int_attr("transBatchB", 0):
        raise OpaqueError("transBatchA or transBatchB is set")
    flip_a = bool(view.int_attr("transA", 0)) and len(view.shape(0)) > 1
    flip_b = bool(view.int_attr("transB", 0)) and len(view.shape(1)) > 1
    left, right, result = matmul_dims(view.shape(0), view.shape(1), view.out_shape())
    operands = [_flipped(left) if flip_a else left, _flipped(right) if flip_b else right]
    return Rule.of(operands, [result], view.shapes, view.out_shapes, reduce={"k": "sum"}, flops=2)


def _flipped(dims: list[str]) -> list[str]:
    return [*dims[:-2], dims[-1], dims[-2]]


def matmul_integer(view: OpView) -> Rule:
    """MatMul of quantised factors; zero points for the tensor, a row of A or a column of B."""
    left, right, result = matmul_dims(view.shape(0), view.shape(1), view.out_shape())
    operands = [left, right, *_settings(view, (2,), left, "m"), *_settings(view, (3,), right, "n")]
    return Rule.of(
        view.present(operands),
        [result],
        view.shapes,
        view.out_shapes,
        reduce={"k": "sum"},
        flops=2,
    )


def qlinear_matmul(view: OpView) -> Rule:
    """MatMul of quantised factors, quantised again: k is whole, since the sum is rounded."""
    left, right, result = matmul_dims(view.shape(0), view.shape(3), view.out_shape())
    operands = [
        *(left, *_settings(view, (1, 2), left, "m")),
        *(right, *_settings(view, (4, 5), right, "n")),
        *_settings(view, (6, 7), result, "m"),
    ]
    return Rule.of(operands, [result], view.shapes, view.out_shapes, whole={"k"}, flops=2)


def _settings(
    view: OpView, indices: tuple[int, ...], dims: list[str], line: str
) -> list[list[str] | None]:
    """Dims of scales and zero points: one for all, one a row or column, or of the tensor's rank."""
    return [_setting(view, index, dims, line) for index in indices]


def _setting(view: OpView, index: int, dims: list[str], line: str) -> list[str] | None:
    held = view.type(index)
    if held is None:
        return None
    named = [line] if held.rank == 1 else dims
    if held.rank > 1 and held.rank != len(dims):
        raise OpaqueError(f"operand {index} of shape {held.shape} has a scale form without a rule")
    return [
        "1" if size == 1 else name
        for name, size in zip(named[: held.rank], held.shape, strict=True)
    ]


def gemm(view: OpView) -> Rule:
    """``m k, k n, (m|1) (n|1) -> m n`` with either factor transposed."""
    return _gemm(view, linear=True)


def fused_gemm(view: OpView) -> Rule:
    """Gemm followed by an activation: k is whole, since the activation needs the whole sum."""
    return _gemm(view, linear=False)


def _gemm(view: OpView, *, linear: bool) -> Rule:
    a = ["k", "m"] if view.int_attr("transA", 0) else ["m", "k"]
    b = ["n", "k"] if view.int_attr("transB", 0) else ["k", "n"]
    bias = view.type(2)
    operands: list[list[str] | None] = [a, b, None]
    if bias is not None:
        names = ["m", "n"][2 - bias.rank :]
        operands[2] = [
            "1" if size == 1 else name for name, size in zip(names, bias.shape, strict=True)
        ]
    return Rule.of(
        view.present(operands),
        [["m", "n"]],
        view.shapes,
        view.out_shapes,
        reduce={"k": "sum"} if linear else {},
        whole=() if linear else {"k"},
        addends={2},
        flops=2,
    )


ROWS: Mapping[str, OpRow] = {
    "Gemm": OpRow(gemm),
    "MatMul": OpRow(matmul),
    "MatMulInteger": OpRow(matmul_integer),
    "QLinearMatMul": OpRow(qlinear_matmul),
    "com.microsoft::FusedGemm": OpRow(fused_gemm),
    "com.microsoft::FusedMatMul": OpRow(fused_matmul),
}
