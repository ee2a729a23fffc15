"""Pools and other windows over planes: batch and channels are cut, space is not.

The places of maxima that PyTorch gives count inside a plane, so they stay right in a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from partitioner.ir.ops.dims import names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView, same_node
from partitioner.ir.rule import Rule


def planes(view: OpView, space: int, prefix: str = "s") -> list[str]:
    """Dims of a tensor whose last `space` dims are places: ``n0 n1 s0 s1``."""
    return [*names("n", len(view.shape(0)) - space), *names(prefix, space)]


def window(view: OpView, space: int) -> int:
    """Places of the window of attribute `kernel_size`, which may be given for all dims at once."""
    kernel = view.ints("kernel_size") or (1,)
    return math.prod(kernel) if len(kernel) == space else kernel[0] ** space


def pool(space: int, *, linear: bool) -> Callable[[OpView], Rule]:
    """Rule of a pool over `space` dims, one FLOP a point of the window."""

    def rule(view: OpView) -> Rule:
        dims = planes(view, space)
        return Rule.of(
            [dims],
            [dims if name else None for name in view.node.outputs],
            view.shapes,
            view.out_shapes,
            halo=dims[-space:],
            linear={0} if linear else (),
            flops=float(window(view, space)),
        )

    return rule


def adaptive_pool(space: int, *, linear: bool) -> Callable[[OpView], Rule]:
    """Rule of a pool to a given size: every element of the data is read about once."""

    def rule(view: OpView) -> Rule:
        return plane_rule(view, space, [False], linear=linear, flops=1)

    return rule


def pool_backward(
    space: int, operands: Sequence[bool], *, adaptive: bool = False
) -> Callable[[OpView], Rule]:
    """Rule of a pool's gradient.

    Args:
        space: Number of spatial dims.
        operands: For each operand whether its places are the result's (the data) or the
            gradient's.
        adaptive: There is no `kernel_size`.
    """

    def rule(view: OpView) -> Rule:
        flops = 1.0 if adaptive else float(window(view, space))
        return plane_rule(view, space, operands, linear=True, flops=flops)

    return rule


def plane_rule(
    view: OpView,
    space: int,
    operands: Sequence[bool],
    *,
    linear: bool,
    flops: float,
    of_result: bool = False,
) -> Rule:
    """Rule of ``n.. s.. -> n.. o..``, where operands have the places of the first or the result.

    Args:
        view: The node.
        space: Number of spatial dims.
        operands: For each operand whether its places are the result's.
        linear: Whether the op is linear in operand 0.
        flops: FLOPs an element of operand 0.
        of_result: They are an element of the result.
    """
    own, other = planes(view, space), planes(view, space, "o")
    return Rule.of(
        [other if results else own for results in operands],
        [other if name else None for name in view.node.outputs],
        view.shapes,
        view.out_shapes,
        whole={*own[-space:], *other[-space:]},
        linear={0} if linear else (),
        points=other if of_result else own,
        flops=flops,
    )


def unpool(view: OpView) -> Rule:
    """Values and their places -> a plane."""
    return plane_rule(view, 2, [False, False], linear=False, flops=0)


def unfold(view: OpView) -> Rule:
    """``n.. c h w -> n.. (c k) l``: the windows side by side."""
    lead = names("n", len(view.shape(0)) - 3)
    return Rule.of(
        [[*lead, "c", "h", "w"]],
        [[*lead, "(c k)", "l"]],
        view.shapes,
        view.out_shapes,
        sizes={"k": window(view, 2)},
        whole="hwkl",
        linear={0},
        points=[*lead, "c", "k", "l"],
    )


def fold(view: OpView) -> Rule:
    """``n.. (c k) l -> n.. c h w``: the windows are added up."""
    lead = names("n", len(view.shape(0)) - 2)
    return Rule.of(
        [[*lead, "(c k)", "l"]],
        [[*lead, "c", "h", "w"]],
        view.shapes,
        view.out_shapes,
        sizes={"k": window(view, 2)},
        whole="hwkl",
        linear={0},
        points=[*lead, "c", "k", "l"],
        flops=1,
    )


def pixel_shuffle(view: OpView) -> Rule:
    """``n.. (c a b) h w -> n.. c (h a) (w b)``."""
    factor = view.int_attr("upscale_factor", 1)
    lead = names("n", len(view.shape(0)) - 3)
    packed, spread = _packed(lead)
    sizes = {"a": factor, "b": factor}
    return Rule.of(
        [packed], [spread], view.shapes, view.out_shapes, sizes=sizes, whole="ab", linear={0}
    )


def pixel_unshuffle(view: OpView) -> Rule:
    """``n.. c (h a) (w b) -> n.. (c a b) h w``."""
    factor = view.int_attr("downscale_factor", 1)
    lead = names("n", len(view.shape(0)) - 3)
    packed, spread = _packed(lead)
    sizes = {"a": factor, "b": factor}
    return Rule.of(
        [spread], [packed], view.shapes, view.out_shapes, sizes=sizes, whole="ab", linear={0}
    )


def _packed(lead: list[str]) -> tuple[list[str], list[str]]:
    return [*lead, "(c a b)", "h", "w"], [*lead, "c", "(h a)", "(w b)"]


def channel_shuffle(view: OpView) -> Rule:
    """``n (g c) s.. -> n (c g) s..``."""
    groups = view.int_attr("groups", 1)
    rest = names("s", len(view.shape(0)) - 2)
    return Rule.of(
        [["n", "(g c)", *rest]],
        [["n", "(c g)", *rest]],
        view.shapes,
        view.out_shapes,
        sizes={"g": groups, "c": view.shape(0)[1] // groups},
        linear={0},
    )


def local_shuffle(view: OpView, local: LocalView) -> LocalOp:
    """A device shuffles its own groups."""
    return same_node(view, groups=local.sizes["g"])


def _of_dims(space: int) -> dict[str, OpRow]:
    """Rows of pools over 2 or 3 dims."""
    return {
        f"aten::_adaptive_avg_pool{space}d": OpRow(adaptive_pool(space, linear=True)),
        f"aten::_adaptive_avg_pool{space}d_backward": OpRow(
            pool_backward(space, [False, True], adaptive=True)
        ),
        f"aten::adaptive_max_pool{space}d": OpRow(adaptive_pool(space, linear=False)),
        f"aten::adaptive_max_pool{space}d_backward": OpRow(
            pool_backward(space, [False, True, False], adaptive=True)
        ),
        f"aten::avg_pool{space}d": OpRow(pool(space, linear=True)),
        f"aten::avg_pool{space}d_backward": OpRow(pool_backward(space, [False, True])),
        f"aten::max_pool{space}d_with_indices": OpRow(pool(space, linear=False)),
        f"aten::max_pool{space}d_with_indices_backward": OpRow(
            pool_backward(space, [False, True, False])
        ),
    }


ROWS: Mapping[str, OpRow] = {
    **_of_dims(2),
    **_of_dims(3),
    "aten::channel_shuffle": OpRow(channel_shuffle, local_shuffle),
    "aten::col2im": OpRow(fold),
    "aten::im2col": OpRow(unfold),
    "aten::max_unpool2d": OpRow(unpool),
    "aten::pixel_shuffle": OpRow(pixel_shuffle),
    "aten::pixel_unshuffle": OpRow(pixel_unshuffle),
}
