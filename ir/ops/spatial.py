"""Convolutions: batch, groups and channels are cut, windows over space are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, same_node
from partitioner.ir.rule import Rule


def space(prefix: str, rank: int) -> list[str]:
    """Factor names of the spatial dims of a tensor of `rank` dims: ``s0 s1`` for images."""
    return [f"{prefix}{i}" for i in range(rank - 2)]


def compound(**factors: int) -> str:
    """The product of factors by size, without those of size 1: ``"(g co)"``, ``"g"``, ``"1"``."""
    kept = [name for name, size in factors.items() if size != 1]
    return f"({' '.join(kept)})" if len(kept) > 1 else (kept or ["1"])[0]


def conv(view: OpView) -> Rule:
    """``n (g ci) s.., (g co) ci k.., (g co) -> n (g co) s..``; ci is summed."""
    x, w, bias, result, sizes = _conv_dims(view, 0, 1)
    return _conv_rule(view, [x, w, bias], result, sizes, linear=True, bias=2)


def conv_integer(view: OpView) -> Rule:
    """Conv of quantised tensors; zero points for the tensor or an output channel."""
    x, w, bias, result, sizes = _conv_dims(view, 0, 1)
    operands = [x, w, _per_channel(view, 2, bias), _per_channel(view, 3, bias)]
    return _conv_rule(view, operands, result, sizes, linear=True)


def qlinear_conv(view: OpView) -> Rule:
    """Conv of quantised tensors, quantised again: ci is whole, since the sum is rounded."""
    x, w, bias, result, sizes = _conv_dims(view, 0, 3)
    settings = [_per_channel(view, index, bias) for index in (1, 2, 4, 5, 6, 7)]
    operands = [x, *settings[:2], w, *settings[2:], bias]
    return _conv_rule(view, operands, result, sizes, linear=False)


def _conv_dims(
    view: OpView, x: int, w: int
) -> tuple[list[str], list[str], list[str], list[str], dict[str, int]]:
    """Dims of the data, the weights, a bias and the result, and the channel factors' sizes."""
    data, weights = view.shape(x), view.shape(w)
    group = view.int_attr("group", 1)
    sizes = {"g": group, "co": weights[0] // group, "ci": weights[1]}
    inner = compound(g=group, ci=sizes["ci"])
    outer = compound(g=group, co=sizes["co"])
    places = space("s", len(data))
    kernel = ["1" if size == 1 else f"k{i}" for i, size in enumerate(weights[2:])]
    return (
        ["n", inner, *places],
        [outer, compound(ci=sizes["ci"]), *kernel],
        [outer],
        ["n", outer, *places],
        sizes,
    )


def _per_channel(view: OpView, index: int, channel: list[str]) -> list[str] | None:
    held = view.type(index)
    if held is None:
        return None
    return channel if held.numel > 1 else ["1"] * held.rank


def _conv_rule(
    view: OpView,
    operands: Sequence[list[str] | None],
    result: list[str],
    sizes: dict[str, int],
    *,
    linear: bool,
    bias: int | None = None,
) -> Rule:
    rank = len(result)
    whole = set(space("k", rank)) | (set() if linear else {"ci"})
    return Rule.of(
        view.present(operands),
        [result],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        reduce={"ci": "sum"} if linear else {},
        whole=whole,
        halo=space("s", rank),
        addends=() if bias is None else {bias},
        flops=2,
    )


def conv_transpose(view: OpView) -> Rule:
    """``n (g ci) s.., (g ci) co k.., (g co) -> n (g co) o..``; ci is summed."""
    data, weights = view.shape(0), view.shape(1)
    group = view.int_attr("group", 1)
    ci, co = weights[0] // group, weights[1]
    inner, outer = compound(g=group, ci=ci), compound(g=group, co=co)
    places, kernel, out = (space(prefix, len(data)) for prefix in "sko")
    return Rule.of(
        view.present([["n", inner, *places], [inner, compound(co=co), *kernel], [outer]]),
        [["n", outer, *out]],
        view.shapes,
        view.out_shapes,
        sizes={"g": group, "ci": ci, "co": co},
        reduce={"ci": "sum"},
        whole={*places, *kernel, *out},
        addends={2},
        points=[
            *("n", *(name for name, size in (("g", group), ("ci", ci), ("co", co)) if size != 1)),
            *(*places, *kernel),
        ],
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
