"""Products of tensors, summed over the factors that the result lacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partitioner.ir.ops.signature import Shape, Signature, broadcast, names
from partitioner.ir.rule import Rule


def contraction(
    signature: Signature,
    operands: Sequence[Sequence[str] | None],
    result: Sequence[str],
    *,
    rounded: bool = False,
    addends: Iterable[int] = (),
    sums: Iterable[int] = (),
    flops: float = 2,
) -> Rule:
    """Product of operands; factors that the result lacks are summed, or whole if `rounded`."""
    summed = {name for dims in operands for name in dims or ()}.difference(result)
    return signature.rule(
        operands,
        [result],
        whole=summed if rounded else (),
        reduce=() if rounded else summed,
        addends=addends,
        sums=sums,
        flops=flops,
    )


def matmul_dims(
    a: Shape, b: Shape, out: Shape, *, transpose_a: bool = False, transpose_b: bool = False
) -> tuple[list[str], list[str], list[str]]:
    """Dims of ``.. m k, .. k n -> .. m n`` with NumPy's rules for vectors and batches."""
    batch = names("b", len(out) - (len(a) > 1) - (len(b) > 1))
    rows, columns = ["m"] * (len(a) > 1), ["n"] * (len(b) > 1)
    left, right = [*rows, "k"], ["k", *columns]
    return (
        [*broadcast(a[:-2], batch), *(reversed(left) if transpose_a else left)],
        [*broadcast(b[:-2], batch), *(reversed(right) if transpose_b else right)],
        [*broadcast(out[: len(batch)], batch), *rows, *columns],
    )


def matmul(signature: Signature, *, transpose_a: bool = False, transpose_b: bool = False) -> Rule:
    """``.. m k, .. k n -> .. m n``; operands of two or more dims may be transposed.

    Where each matrix of a batch meets one vector, the matrices may be pending sums: those that are
    gathered by row from a table of which each device has a part.
    """
    a, b, out = signature.shape(0), signature.shape(1), signature.out_shape
    left, right, result = matmul_dims(a, b, out, transpose_a=transpose_a, transpose_b=transpose_b)
    batched = len(a) == len(b) >= 3
    sums = [0] if batched and out[-1] == 1 else [1] if batched and out[-2] == 1 else []
    return contraction(signature, [left, right], result, sums=sums)
