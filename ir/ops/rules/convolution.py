"""Convolutions: batch, groups and channels are cut, windows over space are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partitioner.ir.ops.rules.dims import compound, names
from partitioner.ir.ops.signature import Shape, Signature
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class ConvDims:
    """Dims of a convolution's tensors.

    Attributes:
        data: ``n (g ci) s..``.
        weights: ``(g co) ci k..``; ``(g ci) co k..`` if it is transposed.
        channel: Of a bias, ``(g co)``.
        result: ``n (g co) s..``; places are ``o..`` if they are not those of the data.
        kernel: Factors of the window.
        sizes: Of the channel factors.
    """

    data: list[str]
    weights: list[str]
    channel: list[str]
    result: list[str]
    kernel: list[str]
    sizes: dict[str, int]

    @classmethod
    def of(cls, weights: Shape, groups: int, out: str = "s") -> ConvDims:
        """From the shape of the weights; `out` is the prefix of the result's places."""
        sizes = {"g": groups, "co": weights[0] // groups, "ci": weights[1]}
        outer = compound(g=groups, co=sizes["co"])
        kernel = ["1" if size == 1 else f"k{i}" for i, size in enumerate(weights[2:])]
        return cls(
            ["n", compound(g=groups, ci=sizes["ci"]), *names("s", len(kernel))],
            [outer, compound(ci=sizes["ci"]), *kernel],
            [outer],
            ["n", outer, *names(out, len(kernel))],
            [name for name in kernel if name != "1"],
            sizes,
        )

    @classmethod
    def transposed(cls, weights: Shape, groups: int) -> ConvDims:
        """The same of a transposed convolution."""
        sizes = {"g": groups, "ci": weights[0] // groups, "co": weights[1]}
        inner, outer = compound(g=groups, ci=sizes["ci"]), compound(g=groups, co=sizes["co"])
        places, kernel, out = (names(prefix, len(weights) - 2) for prefix in "sko")
        return cls(
            ["n", inner, *places],
            [inner, compound(co=sizes["co"]), *kernel],
            [outer],
            ["n", outer, *out],
            kernel,
            sizes,
        )

    def loops(self, places: Sequence[str]) -> list[str]:
        """Batch, channels, places and window: the loops that FLOPs count."""
        channels = (name for name, size in self.sizes.items() if size != 1)
        return ["n", *channels, *places, *self.kernel]


def conv(
    signature: Signature,
    dims: ConvDims,
    operands: Sequence[Sequence[str] | None],
    *,
    bias: int | None = None,
    rounded: bool = False,
    linear: Iterable[int] = (),
) -> Rule:
    """Rule of a convolution that is not transposed; input channels are summed.

    Args:
        signature: Of the node.
        dims: Of its tensors.
        operands: Dims of the node's operands.
        bias: Operand that is a bias.
        rounded: The sum is rounded, so that input channels are whole.
        linear: See `Rule`.
    """
    return signature.rule(
        operands,
        [dims.result],
        sizes=dims.sizes,
        reduce="ci",
        whole=[*dims.kernel, *(["ci"] if rounded else [])],
        halo=dims.result[2:],
        addends=() if bias is None else {bias},
        linear=linear,
        flops=2,
    )


def conv_transpose(signature: Signature, dims: ConvDims, linear: Iterable[int] = ()) -> Rule:
    """Rule of a transposed convolution of data, weights and bias; input channels are summed."""
    places = dims.data[2:]
    return signature.rule(
        [dims.data, dims.weights, dims.channel],
        [dims.result],
        sizes=dims.sizes,
        reduce="ci",
        whole=[*places, *dims.kernel, *dims.result[2:]],
        addends={2},
        linear=linear,
        points=dims.loops(places),
        flops=2,
    )
