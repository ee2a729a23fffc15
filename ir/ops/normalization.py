"""Normalizations: the normalised dims are whole, all others are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from partitioner.ir.ops.contraction import broadcast_dims
from partitioner.ir.ops.spatial import compound, space
from partitioner.ir.ops.table import LocalOp, LocalView, OpaqueError, OpRow, OpView, same_node
from partitioner.ir.rule import Rule

#: FLOPs an element: mean 1, variance 3, normalise 2, scale and shift 2.
CENTRED = 8.0

#: FLOPs an element without the mean: squares and sum 2, normalise 1, scale 1.
UNCENTRED = 4.0

Dims = Sequence[Sequence[str] | None]


def _rule(view: OpView, operands: Dims, results: Dims, whole: Sequence[str], flops: float) -> Rule:
    found = zip_longest(results, view.node.outputs)
    return Rule.of(
        view.present(operands),
        [dims if name else None for dims, name in found][: len(view.node.outputs)],
        view.shapes,
        view.out_shapes,
        whole=whole,
        flops=flops,
    )


def batch_norm(view: OpView) -> Rule:
    """Inference: a scale and a shift a channel.

    Raises:
        OpaqueError: It trains (statistics over the batch), or has statistics a place.
    """
    if view.int_attr("training_mode", 0) or len(view.node.writes) > 1:
        raise OpaqueError("training mode: statistics run over the whole batch")
    if not view.int_attr("spatial", 1):
        raise OpaqueError("spatial is 0: statistics a place")
    dims = ["n", "c", *space("s", len(view.shape(0)))]
    return _rule(view, [dims, ["c"], ["c"], ["c"], ["c"]], [dims], (), 4)


def layer_norm(view: OpView) -> Rule:
    """Dims from `axis` on are whole; results Y, mean, inverse deviation."""
    return _from_axis(view, CENTRED)


def rms_norm(view: OpView) -> Rule:
    """Dims from `axis` on are whole; results Y, inverse root of the mean square."""
    return _from_axis(view, UNCENTRED)


def _from_axis(view: OpView, flops: float) -> Rule:
    rank = len(view.shape(0))
    axis = view.int_attr("axis", -1) % rank
    dims = broadcast_dims(view.shape(0), rank)
    settings = [None if s is None else broadcast_dims(s, rank) for s in view.shapes[1:]]
    one = [*dims[:axis], *("1" for _ in dims[axis:])]
    return _rule(view, [dims, *settings], [dims, one, one], dims[axis:], flops)


def skip_norm(flops: float) -> Callable[[OpView], Rule]:
    """Rule of a residual sum (and bias), normalised over the last dim.

    Results: Y, mean, inverse deviation, the sum.
    """

    def rule(view: OpView) -> Rule:
        rank = len(view.shape(0))
        dims = broadcast_dims(view.shape(0), rank)
        others = [None if s is None else broadcast_dims(s, rank) for s in view.shapes[1:]]
        one = [*dims[:-1], "1"]
        return _rule(view, [dims, *others], [dims, one, one, dims], dims[-1:], flops + 2)

    return rule


def group_norm(view: OpView) -> Rule:
    """``n (g c) s..``: groups are cut; scale and bias a group (opset 18) or a channel (21)."""
    shape, groups = view.shape(0), view.int_attr("num_groups", 1)
    sizes = {"g": groups, "c": shape[1] // groups}
    channel = compound(**sizes)
    dims = ["n", channel, *space("s", len(shape))]
    setting = [channel if view.opset >= 21 else compound(g=groups)]
    return Rule.of(
        [dims, setting, setting],
        [dims],
        view.shapes,
        view.out_shapes,
        sizes=sizes,
        whole=["c", *dims[2:]],
        flops=CENTRED,
    )


def local_groups(view: OpView, local: LocalView) -> LocalOp:
    """A device normalises its own groups."""
    if "g" not in local.sizes:
        return LocalOp((view.node,))
    return same_node(view, num_groups=local.sizes["g"])


def instance_norm(view: OpView) -> Rule:
    """``n c s..``: an image and channel is normalised over space."""
    dims = ["n", "c", *space("s", len(view.shape(0)))]
    return _rule(view, [dims, ["c"], ["c"]], [dims], dims[2:], CENTRED)


def lp_norm(view: OpView) -> Rule:
    """Dim `axis` is whole."""
    dims = [f"d{i}" for i in range(len(view.shape(0)))]
    return _rule(view, [dims], [dims], [dims[view.int_attr("axis", -1)]], 3)


def mean_variance_norm(view: OpView) -> Rule:
    """Dims `axes` are whole."""
    dims = [f"d{i}" for i in range(len(view.shape(0)))]
    axes = view.ints("axes") or (0, 2, 3)
    return _rule(view, [dims], [dims], [dims[axis] for axis in axes], CENTRED)


ROWS: Mapping[str, OpRow] = {
    "BatchNormalization": OpRow(batch_norm),
    "GroupNormalization": OpRow(group_norm, local_groups),
    "InstanceNormalization": OpRow(instance_norm),
    "LayerNormalization": OpRow(layer_norm),
    "LpNormalization": OpRow(lp_norm),
    "MeanVarianceNormalization": OpRow(mean_variance_norm),
    "RMSNormalization": OpRow(rms_norm),
    "SimplifiedLayerNormalization": OpRow(rms_norm),
    "com.microsoft::SkipLayerNormalization": OpRow(skip_norm(CENTRED)),
    "com.microsoft::SkipSimplifiedLayerNormalization": OpRow(skip_norm(UNCENTRED)),
}
