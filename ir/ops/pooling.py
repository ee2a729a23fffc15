"""Pools: batch and channels are cut, windows over space are not; global pools are reductions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from partitioner.ir.ops.reduction import weighted_mean
from partitioner.ir.ops.spatial import space
from partitioner.ir.ops.table import LocalOp, LocalView, OpaqueError, OpRow, OpView
from partitioner.ir.rule import Rule


def pool(view: OpView) -> Rule:
    """``n c s.. -> n c s..``, one FLOP a point of the window.

    Raises:
        OpaqueError: The places of the maxima are wanted: they count through the whole tensor.
    """
    if len(view.node.writes) > 1:
        raise OpaqueError("result Indices counts through the whole tensor")
    kernel = view.ints("kernel_shape") or ()
    places = space("s", len(view.shape(0)))
    dims = ["n", "c", *places]
    return Rule.of(
        [dims],
        [dims, None][: len(view.node.outputs)],
        view.shapes,
        view.out_shapes,
        halo=places,
        flops=float(math.prod(kernel)),
    )


def global_pool(view: OpView) -> Rule:
    """``n c s.. -> n c 1..``: parts of space join where the reduction does."""
    how = {"GlobalAveragePool": "sum", "GlobalMaxPool": "max"}.get(view.node.op, "")
    places = space("s", len(view.shape(0)))
    return Rule.of(
        [["n", "c", *places]],
        [["n", "c", *("1" for _ in places)]],
        view.shapes,
        view.out_shapes,
        reduce=dict.fromkeys(places, how) if how else {},
        whole=() if how else places,
        flops=1 if how else 2,
    )


def local_average(view: OpView, local: LocalView) -> LocalOp:
    """Where space is cut, a device adds its own average by its share of the places."""
    return weighted_mean(view, local, list(range(2, len(view.shape(0)))), keepdims=1)


def regions(view: OpView) -> Rule:
    """RoiAlign and MaxRoiPool: ``n c h w, r 4 -> r c p q``; the regions name images of all n."""
    x = ["n", "c", "h", "w"]
    rois = ["r", "box"]
    windows = view.int_attr("sampling_ratio", 2) ** 2 or 4
    return Rule.of(
        [x, rois, ["r"]][: len(view.node.inputs)],
        [["r", "c", "p", "q"]],
        view.shapes,
        view.out_shapes,
        whole={"n", "h", "w", "box", "p", "q"},
        points=["r", "c", "p", "q"],
        flops=8.0 * windows,  # a bilinear sample is 4 weights and 4 multiply-adds
    )


ROWS: Mapping[str, OpRow] = {
    **{op: OpRow(pool) for op in ("AveragePool", "LpPool", "MaxPool")},
    "GlobalAveragePool": OpRow(global_pool, local_average),
    **{op: OpRow(global_pool) for op in ("GlobalLpPool", "GlobalMaxPool")},
    **{op: OpRow(regions) for op in ("MaxRoiPool", "RoiAlign")},
}
