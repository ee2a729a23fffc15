"""Reductions over dims, and ops that need a dim whole."""

from __future__ import annotations

import math
from collections.abc import Iterable

from partitioner.ir.ops.rules.dims import names, replaced
from partitioner.ir.ops.signature import Signature
from partitioner.ir.rule import Rule


def reduce(
    signature: Signature,
    lost: Iterable[int],
    how: str = "",
    *,
    keep: bool,
    flops: float = 1.0,
    sums: Iterable[int] = (),
) -> Rule:
    """Reduced dims are cut where their parts join, and whole otherwise.

    Args:
        signature: Of the node; all results have the same dims.
        lost: Dims that are reduced, counted from the first.
        how: Reduction by which parts join; "" if none does (a root or log of a sum).
        keep: Reduced dims stay, of size 1.
        flops: FLOPs an operand element.
        sums: See `Options`.
    """
    dims, lost = names("d", signature.rank()), sorted(lost)
    kept = ["1" if i in lost else name for i, name in enumerate(dims) if keep or i not in lost]
    gone = [dims[i] for i in lost]
    return signature.rule(
        [dims],
        [kept] * len(signature.out_types),
        reduce=dict.fromkeys(gone, how) if how else (),
        whole=() if how else gone,
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
    """Result and the first operands have the same dims, of which some are whole."""
    dims = names("d", signature.rank())
    uncut = {dims[i] for i in whole if dims}
    return signature.rule([dims] * operands, [dims], whole=uncut, flops=flops, sums=sums)


def top_k(signature: Signature, dim: int, searched: str) -> Rule:
    """Values and their places, `k` of a `searched` dim: TopK, sort."""
    dims = replaced(names("d", signature.rank()), dim, searched)
    return signature.rule(
        [dims],
        [replaced(dims, dim, "k")] * len(signature.out_types),
        whole={searched, "k"},
        points=dims,
        flops=math.log2(max(signature.shape()[dim], 2)),  # comparisons of a sort
    )
