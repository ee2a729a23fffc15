"""Convolutions: batch, groups, channels and space are cut; space with a halo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partitioner.ir.ops.rules import sliding
from partitioner.ir.ops.rules.sliding import Slide
from partitioner.ir.ops.signature import Shape, Signature, broadcast, compound, names
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class ConvDims:
    """Dims of a convolution's tensors."""

    data: list[str]  #: ``n (g ci) s..``.
    weights: list[str]  #: ``(g co) ci k..``; ``(g ci) co k..`` of a transposed convolution.
    channel: list[str]  #: Dims of a bias, ``(g co)``.
    #: ``n (g co) s..``. Where data and result differ in size, windows slide over one.
    result: list[str]
    kernel: list[str]  #: Factors of the window.
    sizes: dict[str, int]  #: Sizes of the channel factors.
    transposed: bool  #: The convolution is transposed.

    @classmethod
    def of(cls, weights: Shape, groups: int, *, transposed: bool = False) -> ConvDims:
        """Dims for weights of a shape."""
        first, second = weights[0] // groups, weights[1]
        kernel = names("k", len(weights) - 2)
        if transposed:
            sizes = {"g": groups, "ci": first, "co": second}
        else:
            sizes = {"g": groups, "co": first, "ci": second}
            kernel = broadcast(weights[2:], kernel)
        inner = compound(g=groups, ci=sizes["ci"])
        outer = compound(g=groups, co=sizes["co"])
        channels = [inner, compound(co=second)] if transposed else [outer, compound(ci=second)]
        return cls(
            ["n", inner, *names("s", len(kernel))],
            [*channels, *kernel],
            [outer],
            ["n", outer, *names("s", len(kernel))],
            [name for name in kernel if name != "1"],
            sizes,
            transposed,
        )


def conv(
    signature: Signature,
    dims: ConvDims,
    operands: Sequence[Sequence[str] | None],
    slides: Sequence[Slide],
    *,
    bias: int | None = None,
    rounded: bool = False,
    linear: Iterable[int] = (),
) -> Rule:
    """Rule of a convolution with operands of these dims, the data first; input channels are summed.

    They are whole if the sum is `rounded`. `bias` is the index of the operand that is one.
    """
    shapes = signature.shape(), signature.out_shape
    windows = sliding.windows(slides, *shapes, dims.data, transposed=dims.transposed)
    flops = 2.0
    if dims.transposed:  # an element of the data, not of the result, meets all of the kernel
        flops *= math.prod(signature.shape()[2:]) / max(math.prod(signature.out_shape[2:]), 1)
    return signature.rule(
        operands,
        [dims.result],
        sizes=dims.sizes,
        reduce="ci",
        whole=[*dims.kernel, "ci"] if rounded else dims.kernel,
        windows=windows,
        addends=() if bias is None else {bias},
        linear=linear,
        flops=flops,
    )
