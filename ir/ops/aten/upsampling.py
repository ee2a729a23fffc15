"""Upsampling and sampling at a grid: batch and channels are cut, space is not.

All are linear in the data, whatever the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from partitioner.ir.ops.aten.pooling import plane_rule
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, same_node
from partitioner.ir.rule import Rule

#: Points that an element of the result is made of, by mode, in one dim.
TAPS: Mapping[str, int] = {"nearest": 1, "linear": 2, "cubic": 4}

#: Mode and number of spatial dims of PyTorch's operators.
OPERATORS: Mapping[str, tuple[str, int]] = {
    "_upsample_bicubic2d_aa": ("cubic", 2),
    "_upsample_bilinear2d_aa": ("linear", 2),
    "_upsample_nearest_exact1d": ("nearest", 1),
    "_upsample_nearest_exact2d": ("nearest", 2),
    "_upsample_nearest_exact3d": ("nearest", 3),
    "upsample_bicubic2d": ("cubic", 2),
    "upsample_bilinear2d": ("linear", 2),
    "upsample_linear1d": ("linear", 1),
    "upsample_nearest1d": ("nearest", 1),
    "upsample_nearest2d": ("nearest", 2),
    "upsample_nearest3d": ("nearest", 3),
    "upsample_trilinear3d": ("linear", 3),
}


def _flops(mode: str, space: int) -> float:
    """A multiply-add a point; a copy costs none."""
    points: int = TAPS[mode] ** space
    return 0.0 if points == 1 else 2.0 * points


def resize(mode: str, space: int, *, backward: bool = False) -> Callable[[OpView], Rule]:
    """Rule of a mode over `space` dims."""
    return lambda view: _rule(view, mode, space, backward)


def _rule(view: OpView, mode: str, space: int, backward: bool) -> Rule:
    """The loops are over the larger side: the result, of the gradient the operand."""
    flops = _flops(mode, space)
    return plane_rule(view, space, [False], linear=True, flops=flops, of_result=not backward)


def any_mode(backward: bool) -> Callable[[OpView], Rule]:
    """Rule of our own pair, which names its mode."""

    def rule(view: OpView) -> Rule:
        mode = str(view.attr("mode")).partition("-")[0]
        return _rule(view, mode, len(view.shape(0)) - 2, backward)

    return rule


def local_backward(view: OpView, local: LocalView) -> LocalOp:
    """The shape of the data is an attribute."""
    return same_node(view, input_size=tuple(local.out_shapes[0]))


def grid_sample(view: OpView) -> Rule:
    """``n c h w, n p q 2 -> n c p q``."""
    return _grid(view, [["n", "c", "h", "w"], _GRID], [["n", "c", "p", "q"]])


def grid_sample_backward(view: OpView) -> Rule:
    """``n c p q, n c h w, n p q 2 -> n c h w, n p q 2``; the grid's gradient needs all channels."""
    data, result = ["n", "c", "h", "w"], ["n", "c", "p", "q"]
    return _grid(view, [result, data, _GRID], [data, _GRID])


_GRID = ["n", "p", "q", "t"]


def _grid(view: OpView, operands: list[list[str]], results: list[list[str]]) -> Rule:
    wanted = [dims if name else None for dims, name in zip(results, view.node.outputs, strict=True)]
    whole = {*"hwpqt", *("c" if _GRID in wanted else "")}
    return Rule.of(
        operands,
        wanted,
        view.shapes,
        view.out_shapes,
        whole=whole,
        linear={0},
        points="ncpq",
        flops=8,  # a bilinear sample is 4 weights and 4 multiply-adds
    )


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{name}": OpRow(resize(*mode)) for name, mode in OPERATORS.items()},
    **{f"aten::{name}.vec": OpRow(resize(*mode)) for name, mode in OPERATORS.items()},
    **{
        f"aten::{name}_backward": OpRow(resize(*mode, backward=True), local_backward)
        for name, mode in OPERATORS.items()
    },
    "aten::grid_sampler_2d": OpRow(grid_sample),
    "aten::grid_sampler_2d_backward": OpRow(grid_sample_backward),
    "partitioner::upsample": OpRow(any_mode(backward=False)),
    "partitioner::upsample_backward": OpRow(any_mode(backward=True), local_backward),
}
