"""Reductions over dims, and ops along a whole dim."""

from __future__ import annotations

import math
from collections.abc import Iterable

from partitioner.ir.ops.rules.dims import names, replaced
from partitioner.ir.ops.signature import Signature
from partitioner.ir.rule import Rule


def reduce(
    signature: Signature,
    reduced: Iterable[int],
    how: str = "",
    *,
    keep: bool,
    flops: float = 1.0,
    sums: Iterable[int] = (),
) -> Rule:
    """Rule of a reduction over dims, which are whole if partial results cannot be combined.

    All results have the same dims. `how` combines partial results: "" if nothing does (a root or
    log of a sum). `flops` are FLOPs an operand element.
    """
    dims, lost = names("d", signature.rank()), sorted(reduced)
    result = ["1" if i in lost else name for i, name in enumerate(dims) if keep or i not in lost]
    return signature.rule(
        [dims],
        [result] * len(signature.out_types),
        reduce={dims[i]: how for i in lost} if how else (),
        whole=() if how else [dims[i] for i in lost],
        flops=flops,
        sums=sums,
    )


def along(
    signature: Signature,
    whole: Iterable[int],
    *,
    operands: int = 1,
    flops: float = 0.0,
    sums: Iterable[int] = (),
) -> Rule:
    """Rule of an op, such as a softmax, along whole dims, which count from either end."""
    dims = names("d", signature.rank())
    along_dims = {dims[i] for i in whole if dims}
    return signature.rule([dims] * operands, [dims], whole=along_dims, flops=flops, sums=sums)


def top_k(signature: Signature, dim: int, searched: str) -> Rule:
    """Rule of a search or sort: values and their indices, k of a dim called `searched`."""
    dims = replaced(names("d", signature.rank()), dim, searched)
    return signature.rule(
        [dims],
        [replaced(dims, dim, "k")] * len(signature.out_types),
        whole={searched, "k"},
        points=dims,
        flops=math.log2(max(signature.shape()[dim], 2)),  # comparisons of a sort
    )
