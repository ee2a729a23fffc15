"""Windows over space: convolutions, pools, upsampling and samples at a grid, and their gradients.

Batch, groups and channels are cut, space is not. The places of maxima that PyTorch gives count
inside a plane, so they stay right in a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from partitioner.ir.graph import Attr
from partitioner.ir.ops.rules.convolution import ConvDims, conv, conv_transpose
from partitioner.ir.ops.rules.dims import names
from partitioner.ir.ops.signature import Shape
from partitioner.ir.ops.table import (
    Localize,
    LocalOp,
    LocalView,
    OpRow,
    OpView,
    local_groups,
    local_shape,
    same_node,
)
from partitioner.ir.rule import Rule

#: Points that an element of an upsampled result is made of, by mode, in one dim.
TAPS: Mapping[str, int] = {"nearest": 1, "linear": 2, "cubic": 4}

#: Mode and number of spatial dims of PyTorch's operators.
UPSAMPLING: Mapping[str, tuple[str, int]] = {
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


def _dims(view: OpView, weights: Shape, out: str) -> ConvDims:
    groups = view.int_attr("groups", 1)
    if view.attr("transposed"):
        return ConvDims.transposed(weights, groups)
    return ConvDims.of(weights, groups, out)


def _convolution(view: OpView) -> Rule:
    """Data, weights, bias; transposed or not. Linear in the data where there is no bias."""
    dims, linear = _dims(view, view.shape(1), "s"), [0] if view.type(2) is None else []
    if view.attr("transposed"):
        return conv_transpose(view, dims, linear)
    return conv(view, dims, [dims.data, dims.weights, dims.channel], bias=2, linear=linear)


def _grad_input(view: OpView) -> Rule:
    """``result, weights -> data``: output channels are summed."""
    dims = _dims(view, view.shape(1), "o")
    return _gradient(view, dims, dims.weights, dims.data, "co")


def _grad_weight(view: OpView) -> Rule:
    """``result, data -> weights``: the batch is summed."""
    dims = _dims(view, view.out_shape, "o")
    return _gradient(view, dims, dims.data, dims.weights, "n")


def _gradient(
    view: OpView, dims: ConvDims, other: Sequence[str], gradient: Sequence[str], summed: str
) -> Rule:
    """Rule of a gradient, which does the work of the convolution."""
    inner, outer = dims.data[2:], dims.result[2:]
    return view.rule(
        [dims.result, other],
        [gradient],
        sizes=dims.sizes,
        reduce=summed,
        whole=[*inner, *outer, *dims.kernel],
        linear=[0],
        points=dims.loops(inner if view.attr("transposed") else outer),
        flops=2,
    )


def _local_gradient(size: str) -> Localize:
    """A device makes its part of the gradient, whose shape is attribute `size`."""

    def localize(view: OpView, local: LocalView) -> LocalOp:
        groups: dict[str, Attr] = {"groups": local.sizes["g"]} if "g" in local.sizes else {}
        return same_node(view, **groups, **{size: local.out_shapes[0]})

    return localize


def _window(view: OpView, space: int) -> int:
    """Places of the window of attribute `kernel_size`, which may be given for all dims at once."""
    kernel = view.ints("kernel_size") or (1,)
    return math.prod(kernel) if len(kernel) == space else kernel[0] ** space


def _planes(view: OpView, space: int, prefix: str = "s") -> list[str]:
    """Dims of a tensor whose last `space` dims are places: ``n0 n1 s0 s1``."""
    return [*names("n", view.rank() - space), *names(prefix, space)]


def _pool(view: OpView, space: int, *, linear: bool) -> Rule:
    """A pool over `space` dims, one FLOP a point of the window."""
    dims = _planes(view, space)
    return view.rule(
        [dims],
        [dims, dims],
        halo=dims[-space:],
        linear=[0] if linear else [],
        flops=float(_window(view, space)),
    )


def _resampled(
    view: OpView,
    space: int,
    operands: str = "s",
    *,
    linear: bool = True,
    flops: float = 1,
    of_result: bool = False,
) -> Rule:
    """``n.. s.. -> n.. o..``, where operands have the places of the first or of the result.

    Args:
        view: The node.
        space: Number of spatial dims.
        operands: Prefix of the places of each operand: s, or o as the result's.
        linear: Whether the op is linear in operand 0.
        flops: FLOPs an element of operand 0.
        of_result: They are an element of the result.
    """
    own, other = _planes(view, space), _planes(view, space, "o")
    return view.rule(
        [own if prefix == "s" else other for prefix in operands],
        [other, other],
        whole=[*own[-space:], *other[-space:]],
        linear=[0] if linear else [],
        points=other if of_result else own,
        flops=flops,
    )


def _pool_backward(view: OpView, space: int, operands: str) -> Rule:
    """The gradient of a pool, whose data has the result's places."""
    return _resampled(view, space, operands, flops=float(_window(view, space)))


def _upsample(view: OpView, mode: str, space: int, *, backward: bool = False) -> Rule:
    """A multiply-add a point of the larger side: the result, of the gradient the operand.

    All are linear in the data, whatever the mode; a copy costs no FLOPs.
    """
    points = TAPS[mode] ** space
    flops = 0.0 if points == 1 else 2.0 * points
    return _resampled(view, space, flops=flops, of_result=not backward)


def _any_upsample(view: OpView, *, backward: bool = False) -> Rule:
    """Our own pair, which names its mode."""
    mode = str(view.attr("mode")).partition("-")[0]
    return _upsample(view, mode, view.rank() - 2, backward=backward)


def _grid_sample(view: OpView, operands: str, results: str) -> Rule:
    """Places are cut, and channels but for the gradient of the grid, the second result."""
    gradient = any(kind is not None for kind in view.out_types[1:])
    return view.rule(
        operands,
        results,
        whole="c h w p q t" if gradient else "h w p q t",
        linear=[0],
        points="n c p q",
        flops=8,  # a bilinear sample is 4 weights and 4 multiply-adds
    )


def _unfold(view: OpView) -> Rule:
    """The windows side by side."""
    return view.rule(
        "n.. c h w",
        "n.. (c k) l",
        sizes={"k": _window(view, 2)},
        whole="h w k l",
        linear=[0],
        points="n.. c k l",
    )


def _fold(view: OpView) -> Rule:
    """The windows are added up."""
    return view.rule(
        "n.. (c k) l",
        "n.. c h w",
        sizes={"k": _window(view, 2)},
        whole="h w k l",
        linear=[0],
        points="n.. c k l",
        flops=1,
    )


def _pixel_shuffle(view: OpView) -> Rule:
    factor = view.int_attr("upscale_factor", 1)
    sizes = {"a": factor, "b": factor}
    return view.rule("n.. (c a b) h w", "n.. c (h a) (w b)", sizes=sizes, whole="a b", linear=[0])


def _pixel_unshuffle(view: OpView) -> Rule:
    factor = view.int_attr("downscale_factor", 1)
    sizes = {"a": factor, "b": factor}
    return view.rule("n.. c (h a) (w b)", "n.. (c a b) h w", sizes=sizes, whole="a b", linear=[0])


def _channel_shuffle(view: OpView) -> Rule:
    groups = view.int_attr("groups", 1)
    sizes = {"g": groups, "c": view.shape()[1] // groups}
    return view.rule("n (g c) s..", "n (c g) s..", sizes=sizes, linear=[0])


def _pools(space: int) -> dict[str, OpRow]:
    """Rows of pools over 2 or 3 dims; adaptive ones read every element about once."""
    rules = {
        f"_adaptive_avg_pool{space}d": partial(_resampled, space=space),
        f"_adaptive_avg_pool{space}d_backward": partial(_resampled, space=space, operands="so"),
        f"adaptive_max_pool{space}d": partial(_resampled, space=space, linear=False),
        f"adaptive_max_pool{space}d_backward": partial(_resampled, space=space, operands="sos"),
        f"avg_pool{space}d": partial(_pool, space=space, linear=True),
        f"avg_pool{space}d_backward": partial(_pool_backward, space=space, operands="so"),
        f"max_pool{space}d_with_indices": partial(_pool, space=space, linear=False),
        f"max_pool{space}d_with_indices_backward": partial(
            _pool_backward, space=space, operands="sos"
        ),
    }
    return {f"aten::{op}": OpRow(rule) for op, rule in rules.items()}


def _upsampling(mode: str, space: int, *, backward: bool = False) -> OpRow:
    rule = partial(_upsample, mode=mode, space=space, backward=backward)
    return OpRow(rule, local_shape("input_size") if backward else None)


ROWS: Mapping[str, OpRow] = {
    **_pools(2),
    **_pools(3),
    **{f"aten::{op}": _upsampling(*mode) for op, mode in UPSAMPLING.items()},
    **{f"aten::{op}.vec": _upsampling(*mode) for op, mode in UPSAMPLING.items()},
    **{
        f"aten::{op}_backward": _upsampling(*mode, backward=True) for op, mode in UPSAMPLING.items()
    },
    "aten::channel_shuffle": OpRow(_channel_shuffle, local_groups("groups")),
    "aten::col2im": OpRow(_fold),
    "aten::convolution": OpRow(_convolution, local_groups("groups")),
    "aten::grid_sampler_2d": OpRow(
        partial(_grid_sample, operands="n c h w, n p q t", results="n c p q")
    ),
    "aten::grid_sampler_2d_backward": OpRow(
        partial(_grid_sample, operands="n c p q, n c h w, n p q t", results="n c h w, n p q t")
    ),
    "aten::im2col": OpRow(_unfold),
    "aten::max_unpool2d": OpRow(partial(_resampled, space=2, operands="ss", linear=False, flops=0)),
    "aten::pixel_shuffle": OpRow(_pixel_shuffle),
    "aten::pixel_unshuffle": OpRow(_pixel_unshuffle),
    "partitioner::convolution_grad_input": OpRow(_grad_input, _local_gradient("input_size")),
    "partitioner::convolution_grad_weight": OpRow(_grad_weight, _local_gradient("weight_size")),
    "partitioner::upsample": OpRow(_any_upsample),
    "partitioner::upsample_backward": OpRow(
        partial(_any_upsample, backward=True), local_shape("input_size")
    ),
}
