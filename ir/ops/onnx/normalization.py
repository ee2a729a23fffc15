"""Normalizations: the normalised dims are whole, all others are cut."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from partitioner.ir.ops.local import local_groups
from partitioner.ir.ops.rules.reduction import CENTRED, UNCENTRED, along, batch_norm, group_norm
from partitioner.ir.ops.signature import OpaqueError, broadcast, names, pattern
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def _batch_norm(view: OpView) -> Rule:
    """Inference: a scale and a shift a channel."""
    if view.int_attr("training_mode", 0) or len(view.node.writes) > 1:
        raise OpaqueError("training mode: statistics run over the whole batch")
    if not view.int_attr("spatial", 1):
        raise OpaqueError("spatial is 0: statistics are per position")
    return batch_norm(view)


def _layer_norm(view: OpView, flops: float, *, skips: bool = False) -> Rule:
    """Dims from `axis` on are whole; results Y, mean, inverse deviation.

    Of a residual sum (and bias), the fourth result, the last dim is normalised.
    """
    first, out = view.rank() - 1 if skips else view.dim("axis", -1), names("b", view.rank())
    operands = [shape if shape is None else broadcast(shape, out) for shape in view.shapes]
    dims = broadcast(view.shape(), out)
    mean = [*dims[:first], *["1"] * len(dims[first:])]
    return view.rule(operands, [dims, mean, mean, dims], whole=dims[first:], flops=flops)


ROWS: Mapping[str, OpRow] = {
    "BatchNormalization": OpRow(_batch_norm),
    "GroupNormalization": OpRow(  # scale and bias are a group's before opset 21
        lambda view: group_norm(
            view, view.positive("num_groups", 1), scale_a_group=view.opset < 21
        ),
        local_groups("num_groups"),
    ),
    "InstanceNormalization": OpRow(pattern("n c s.., c, c -> n c s..", whole="s..", flops=CENTRED)),
    "LayerNormalization": OpRow(partial(_layer_norm, flops=CENTRED)),
    "LpNormalization": OpRow(lambda view: along(view, [view.int_attr("axis", -1)], flops=3)),
    "MeanVarianceNormalization": OpRow(
        lambda view: along(view, view.ints("axes") or (0, 2, 3), flops=CENTRED)
    ),
    "RMSNormalization": OpRow(partial(_layer_norm, flops=UNCENTRED)),
    "SimplifiedLayerNormalization": OpRow(partial(_layer_norm, flops=UNCENTRED)),
    "com.microsoft::SkipLayerNormalization": OpRow(
        partial(_layer_norm, flops=CENTRED + 2, skips=True)
    ),
    "com.microsoft::SkipSimplifiedLayerNormalization": OpRow(
        partial(_layer_norm, flops=UNCENTRED + 2, skips=True)
    ),
}
