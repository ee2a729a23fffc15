"""Reductions over dims, and ops along a whole dim, such as normalizations."""

from __future__ import annotations

import math
from collections.abc import Iterable

from partitioner.ir.ops.signature import Signature, compound, names, pattern, replaced
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


#: FLOPs an element: mean 1, variance 3, normalise 2, scale and shift 2.
CENTRED = 8.0

#: FLOPs an element without the mean: squares and sum 2, normalise 1, scale 1.
UNCENTRED = 4.0

#: Batch norm in inference: data, scale, bias, mean, variance. PyTorch's has two empty results more.
batch_norm = pattern("n c s.., c, c, c, c -> n c s.., z, z", whole="z", points="n c s..", flops=4)


def grouped(signature: Signature, groups: int) -> tuple[str, str, dict[str, int]]:
    """The dim of channels, ``(g c)``, the dim of groups, ``g``, and the sizes of g and c."""
    sizes = {"g": groups, "c": signature.shape()[1] // groups}
    return compound(**sizes), compound(g=groups), sizes


def group_norm(signature: Signature, groups: int, *, scale_a_group: bool = False) -> Rule:
    """Data, scale, bias (a channel or `scale_a_group`) -> result, mean, inverse deviation."""
    channel, group, sizes = grouped(signature, groups)
    scale = group if scale_a_group else channel
    return signature.rule(
        f"n {channel} s.., {scale}, {scale}",
        f"n {channel} s.., n {group}, n {group}",
        sizes=sizes,
        whole="c s..",
        flops=CENTRED,
    )
