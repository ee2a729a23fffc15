"""Convolutions: batch, groups and channels are cut, windows over space are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, Shape, same_node
from partitioner.ir.rule import Rule


def space(prefix: str, rank: int) -> list[str]:
    """Factor names of the spatial dims of a tensor of `rank` dims: ``s0 s1`` for images."""
    return [f"{prefix}{i}" for i in range(rank - 2)]


def compound(**factors: int) -> str:
    """The product of factors by size, without those of size 1: ``"(g co)"``, ``"g"``, ``"1"``."""
    kept = [name for name, size in factors.items() if size != 1]
    return f"({' '.join(kept)})" if len(kept) > 1 else (kept or ["1"])[0]


@dataclass(frozen=True)
class ConvDims:
    """Dims of a convolution's tensors, and its factors' sizes.

    Attributes:
        data: Of the data.
        weights: Of the weights.
        channel: Of a bias.
        result: Of the result.
        sizes: Of the channel factors.
        kernel: Factors of the window.
    """

    data: list[str]
    weights: list[str]
    channel: list[str]
    result: list[str]
    sizes: dict[str, int]
    kernel: list[str]


def conv_dims(weights: Shape, group: int, out: str = "s") -> ConvDims:
    """``n (g ci) s.., (g co) ci k.., (g co) -> n (g co) s..``.

    Args:
        weights: Shape of the weights.
        group: Number of groups.
        out: Prefix of the result's places.
    """
    sizes = {"g": group, "co": weights[0] // group, "ci": weights[1]}
    inner = compound(g=group, ci=sizes["ci"])
    outer = compound(g=group, co=sizes["co"])
    kernel = ["1" if size == 1 else f"k{i}" for i, size in enumerate(weights[2:])]
    return ConvDims(
        ["n", inner, *space("s", len(weights))],
        [outer, compound(ci=sizes["ci"]), *kernel],
        [outer],
        ["n", outer, *space(out, len(weights))],
        sizes,
        [name for name in kernel if name != "1"],
    )


def transposed_dims(weights: Shape, group: int) -> ConvDims:
    """``n (g ci) s.., (g ci) co k.., (g co) -> n (g co) o..``."""
    sizes = {"g": group, "ci": weights[0] // group, "co": weights[1]}
    inner = compound(g=group, ci=sizes["ci"])
    outer = compound(g=group, co=sizes["co"])
    places, kernel, out = (space(prefix, len(weights)) for prefix in "sko")
    return ConvDims(
        ["n", inner, *places],
        [inner, compound(co=sizes["co"]), *kernel],
        [outer],
        ["n", outer, *out],
        sizes,
        kernel,
    )


def channel_loops(sizes: Mapping[str, int]) -> list[str]:
    """The batch and the channel factors that there are."""
    return ["n", *(name for name, size in sizes.items() if size != 1)]


def conv(view: OpView) -> Rule:
    """``n (g ci) s.., (g co) ci k.., (g co) -> n (g co) s..``; ci is summed."""
    dims = _conv_dims(view, 1)
    return conv_rule(view, [dims.data, dims.weights, dims.channel], dims, bias=2)


def conv_integer(view: OpView) -> Rule:
    """Conv of quantised tensors; zero points for the tensor or an output channel."""
    dims = _conv_dims(view, 1)
    settings = [_per_channel(view, index, dims.channel) for index in (2, 3)]
    return conv_rule(view, [dims.data, dims.weights, *settings], dims)


def qlinear_conv(view: OpView) -> Rule:
    """Conv of quantised tensors, quantised again: ci is whole, since the sum is rounded."""
    dims = _conv_dims(view, 3)
    settings = [_per_channel(view, index, dims.channel) for index in (1, 2, 4, 5, 6, 7)]
    operands = [dims.data, *settings[:2], dims.weights, *settings[2:], dims.channel]
    return conv_rule(view, operands, dims, rounds=True)


def _conv_dims(view: OpView, weights: int) -> ConvDims:
    return conv_dims(view.shape(weights), view.int_attr("group", 1))


def _per_channel(view: OpView, index: int, channel: list[str]) -> list[str] | None:
    held = view.type(index)
    if held is None:
        return None
    return channel if held.numel > 1 else ["1"] * held.rank


def conv_rule(
    view: OpView,
    operands: Sequence[list[str] | None],
    dims: ConvDims,
    *,
    rounds: bool = False,
    bias: int | None = None,
    linear: Iterable[int] = (),
) -> Rule:
    """Rule of a convolution that is not transposed.

    Args:
        view: The node.
        operands: Dims of its operands.
        dims: Of its tensors.
        rounds: The result is rounded, so ci cannot be summed in parts.
        bias: Operand that is a bias.
        linear: See `Rule`.
    """
    rank = len(dims.result)
    return Rule.of(
        view.present(operands),
        [dims.result],
        view.shapes,
        view.out_shapes,
        sizes=dims.sizes,
        reduce={} if rounds else {"ci": "sum"},
        whole={*space("k", rank), *(("ci",) if rounds else ())},
        halo=space("s", rank),
        addends=() if bias is None else {bias},
        linear=linear,
        flops=2,
    )


def conv_transpose(view: OpView) -> Rule:
    """``n (g ci) s.., (g ci) co k.., (g co) -> n (g co) o..``; ci is summed."""
    return transposed_rule(view, transposed_dims(view.shape(1), view.int_attr("group", 1)))


def transposed_rule(view: OpView, dims: ConvDims, linear: Iterable[int] = ()) -> Rule:
    """Rule of a transposed convolution of data, weights and bias."""
    places = dims.data[2:]
    return Rule.of(
        view.present([dims.data, dims.weights, dims.channel]),
        [dims.result],
        view.shapes,
        view.out_shapes,
        sizes=dims.sizes,
        reduce={"ci": "sum"},
        whole={*places, *dims.kernel, *dims.result[2:]},
        addends={2},
        linear=linear,
        points=[*channel_loops(dims.sizes), *places, *dims.kernel],
        flops=2,
    )


def local_group(view: OpView, local: LocalView) -> LocalOp:
    """A device convolves its own groups."""
    if "g" not in local.sizes:
        return LocalOp((view.node,))
    return same_node(view, group=local.sizes["g"])


def lrn(view: OpView) -> Rule:
    """The window runs over channels: they are whole, everything else is cut."""
    dims = ["n", "c", *space("s", len(view.shape(0)))]
    flops = 2.0 * view.int_attr("size", 1) + 10  # a window of squares, then a power
    return Rule.of([dims], [dims], view.shapes, view.out_shapes, whole={"c"}, flops=flops)


ROWS: Mapping[str, OpRow] = {
    "Conv": OpRow(conv, local_group),
    "ConvInteger": OpRow(conv_integer, local_group),
    "ConvTranspose": OpRow(conv_transpose, local_group),
    "LRN": OpRow(lrn),
    "QLinearConv": OpRow(qlinear_conv, local_group),
}
