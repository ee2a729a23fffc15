"""Reductions over dims, and ops along a whole dim: Softmax, ArgMax, TopK, CumSum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from partitioner.ir.graph import Attr, Node
from partitioner.ir.ops.local import mean_of_part
from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.rules.reduction import along, reduce, top_k
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule

#: Reduction that combines partial results ("" for a root or log of a sum), FLOPs an element.
REDUCTIONS: Mapping[str, tuple[str, float]] = {
    "ReduceL1": ("sum", 2),
    "ReduceL2": ("", 2),
    "ReduceLogSum": ("", 1),
    "ReduceLogSumExp": ("", TRANSCENDENTAL + 2),
    "ReduceMax": ("max", 1),
    "ReduceMean": ("sum", 1),
    "ReduceMin": ("min", 1),
    "ReduceProd": ("prod", 1),
    "ReduceSum": ("sum", 1),
    "ReduceSumSquare": ("sum", 2),
}

#: First opset in which the axes of ReduceSum are an operand.
SUM_AXES_INPUT = 13


def reduced_dims(view: OpView) -> frozenset[int]:
    """Dims that a Reduce node reduces: none of them if it is a no-op."""
    rank = view.rank()
    axes = view.ints("axes", 1)
    if axes:
        return frozenset(axis % rank for axis in axes)
    return frozenset() if view.int_attr("noop_with_empty_axes", 0) else frozenset(range(rank))


def _reduce(view: OpView) -> Rule:
    """Reduced dims are cut where partial results can be combined exactly."""
    how, flops = REDUCTIONS[view.node.op]
    if view.node.op == "ReduceMean" and "float" not in view.out_type.dtype:
        how = ""  # an integer mean rounds each part
    keep = bool(view.int_attr("keepdims", 1))
    return reduce(view, reduced_dims(view), how, keep=keep, flops=flops)


def weighted_mean(
    view: OpView, local: LocalView, reduced: Iterable[int], *, keepdims: int
) -> LocalOp:
    """See `mean_of_part`."""
    dims = sorted(reduced)
    return mean_of_part(view, local, dims, lambda: _empty_sum(view, dims, keepdims))


def _empty_sum(view: OpView, dims: list[int], keepdims: int) -> LocalOp:
    """ReduceSum of a part without elements, in the form of the graph's opset."""
    node, axes = view.node, f"{view.node.name}.axes"
    add = Node(node.name, "ReduceSum", (node.inputs[0], axes), node.outputs, {"keepdims": keepdims})
    if view.opset >= SUM_AXES_INPUT:
        return LocalOp((add,), {axes: np.array(dims, np.int64)})
    attrs: dict[str, Attr] = {"keepdims": keepdims, "axes": tuple(dims)}
    return LocalOp((replace(add, inputs=node.inputs[:1], attrs=attrs),))


def softmax_dims(view: OpView, opset: int) -> tuple[int, ...]:
    """Dims that a softmax is over: before opset 13 all from `axis` on; they may be negative."""
    if opset >= 13:
        return (view.int_attr("axis", -1),)
    return tuple(range(view.dim("axis", 1), view.rank()))


def _softmax(view: OpView, flops: float) -> Rule:
    return along(view, softmax_dims(view, view.opset), flops=flops)


ROWS: Mapping[str, OpRow] = {
    **dict.fromkeys(REDUCTIONS, OpRow(_reduce)),
    "ReduceMean": OpRow(
        _reduce,
        lambda view, local: weighted_mean(
            view, local, reduced_dims(view), keepdims=view.int_attr("keepdims", 1)
        ),
    ),
    **{
        op: OpRow(  # indices in the whole dim
            lambda view: reduce(
                view, [view.dim("axis", 0)], keep=bool(view.int_attr("keepdims", 1))
            )
        )
        for op in ("ArgMax", "ArgMin")
    },
    **{
        op: OpRow(lambda view: along(view, [int(view.constant(1).reshape(-1)[0])], flops=1))
        for op in ("CumProd", "CumSum")
    },
    "Hardmax": OpRow(partial(_softmax, flops=2)),
    "LogSoftmax": OpRow(partial(_softmax, flops=TRANSCENDENTAL + 4)),
    "Softmax": OpRow(partial(_softmax, flops=TRANSCENDENTAL + 4)),
    "TopK": OpRow(lambda view: top_k(view, dim := view.dim("axis", -1), f"d{dim}")),
}
