"""Convolutions: batch, groups and channels are cut, windows over space are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partitioner.ir.ops.rules.dims import broadcast, compound, names
from partitioner.ir.ops.signature import Shape, Signature
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class ConvDims:
    """Dims of a convolution's tensors.

    Attributes:
        data: ``n (g ci) s..``.
        weights: ``(g co) ci k..``; ``(g ci) co k..`` of a transposed convolution.
        channel: Dims of a bias, ``(g co)``.
        result: ``n (g co) s..``, with spatial dims ``o..`` if they are apart.
        kernel: Factors of the window.
        sizes: Sizes of the channel factors.
        transposed: The convolution is transposed.
    """

    data: list[str]
    weights: list[str]
    channel: list[str]
    result: list[str]
    kernel: list[str]
    sizes: dict[str, int]
    transposed: bool

    @classmethod
    def of(
        cls, weights: Shape, groups: int, *, transposed: bool = False, apart: bool = False
    ) -> ConvDims:
        """Dims for weights of a shape.

        Args:
            weights: Shape of the weights.
            groups: Number of groups.
            transposed: The convolution is transposed.
            apart: Spatial dims of the result are ``o..``, as they always are if it is transposed.
        """
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
            ["n", outer, *names("o" if transposed or apart else "s", len(kernel))],
            [name for name in kernel if name != "1"],
            sizes,
            transposed,
        )

    @property
    def loops(self) -> list[str]:
        """Loops that do the multiply-adds: batch, channels, window positions, window."""
        channels = (name for name, size in self.sizes.items() if size != 1)
        return ["n", *channels, *(self.data if self.transposed else self.result)[2:], *self.kernel]


def conv(
    signature: Signature,
    dims: ConvDims,
    operands: Sequence[Sequence[str] | None],
    *,
    bias: int | None = None,
    rounded: bool = False,
    linear: Iterable[int] = (),
) -> Rule:
    """Rule of a convolution; input channels are summed.

    Args:
        signature: Signature of the node.
        dims: Dims of the convolution's tensors.
        operands: Dims of the node's operands.
        bias: Index of the operand that is a bias.
        rounded: The sum is rounded, so that input channels are whole.
        linear: See `Rule`.
    """
    inner, outer = dims.data[2:], dims.result[2:]
    windows = [*inner, *outer, *dims.kernel] if dims.transposed else dims.kernel
    return signature.rule(
        operands,
        [dims.result],
        sizes=dims.sizes,
        reduce="ci",
        whole=[*windows, "ci"] if rounded else windows,
        halo=() if dims.transposed else outer,
        addends=() if bias is None else {bias},
        linear=linear,
        points=dims.loops if dims.transposed else None,
        flops=2,
    )
