"""Normalizations: the normalised dims are whole, all others are cut."""

from __future__ import annotations

from partitioner.ir.ops.rules.dims import compound
from partitioner.ir.ops.signature import Signature, pattern
from partitioner.ir.rule import Rule

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
