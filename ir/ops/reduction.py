"""Reductions over dims, and ops that need a whole dim: Softmax, ArgMax, TopK, CumSum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from partitioner.ir.graph import Node
from partitioner.ir.ops.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import numpy_dtype


@dataclass(frozen=True)
class Reduction:
    """One Reduce op.

    Attributes:
        partial: How the parts of a cut dim join; "" if they do not (a root or log of a sum).
        axes_input: First opset in which the axes are an operand.
        flops: FLOPs an operand element.
    """

    partial: str
    axes_input: int = 18
    flops: float = 1.0


REDUCTIONS: Mapping[str, Reduction] = {
    "ReduceL1": Reduction("sum", flops=2),
    "ReduceL2": Reduction("", flops=2),
    "ReduceLogSum": Reduction(""),
    "ReduceLogSumExp": Reduction("", flops=TRANSCENDENTAL + 2),
    "ReduceMax": Reduction("max"),
    "ReduceMean": Reduction("sum"),
    "ReduceMin": Reduction("min"),
    "ReduceProd": Reduction("prod"),
    "ReduceSum": Reduction("sum", axes_input=13),
    "ReduceSumSquare": Reduction("sum", flops=2),
}


def reduced_axes(view: OpView) -> frozenset[int]:
    """Dims that a Reduce node reduces, none for one that is told to do nothing."""
    rank = len(view.shape(0))
    axes = view.ints("axes", 1)
    if axes:
        return frozenset(axis % rank for axis in axes)
    return frozenset() if view.int_attr("noop_with_empty_axes", 0) else frozenset(range(rank))


def reduce(view: OpView) -> Rule:
    """Reduced dims are cut where the parts can be joined exactly."""
    how = REDUCTIONS[view.node.op]
    kind = view.type(0)
    axes = reduced_axes(view)
    dims = [f"d{i}" for i in range(len(view.shape(0)))]
    lost = [dims[axis] for axis in sorted(axes)]
    # An integer mean rounds each part.
    joins = how.partial and not (
        view.node.op == "ReduceMean" and kind and "float" not in kind.dtype
    )
    return Rule.of(
        [dims, None][: len(view.node.inputs)],
        [_kept(dims, axes, bool(view.int_attr("keepdims", 1)))],
        view.shapes,
        view.out_shapes,
        reduce=dict.fromkeys(lost, how.partial) if joins else {},
        whole=() if joins else lost,
        flops=how.flops,
    )


def _kept(dims: list[str], axes: frozenset[int], keep: bool) -> list[str]:
    return [
        "1" if axis in axes else name for axis, name in enumerate(dims) if keep or axis not in axes
    ]


def local_mean(view: OpView, local: LocalView) -> LocalOp:
    """Where a reduced dim is cut, a device adds its own mean by its share of the elements."""
    axes = sorted(reduced_axes(view))
    return weighted_mean(view, local, axes, keepdims=view.int_attr("keepdims", 1))


def weighted_mean(view: OpView, local: LocalView, axes: list[int], *, keepdims: int) -> LocalOp:
    """The node over a device's part, times the part's share of the elements of `axes`.

    Never a sum that is divided later: half precision would overflow where the mean does not. A
    device without elements adds the sum of none.
    """
    node, kind = view.node, view.type(0)
    assert kind is not None
    whole = math.prod(view.shape(0)[axis] for axis in axes)
    own = math.prod(local.shapes[0][axis] for axis in axes)
    if own == whole:
        return LocalOp((node,))
    if own == 0:
        return _sum_of_none(view, axes, keepdims)
    mean, share = f"{node.name}.mean", f"{node.name}.share"
    return LocalOp(
        (
            replace(node, name=mean, outputs=(mean,)),
            Node(node.name, "Mul", (mean, share), node.outputs),
        ),
        {share: np.array(own / whole, numpy_dtype(kind.dtype))},
        {mean: kind.with_shape(local.out_shapes[0])},
    )


def _sum_of_none(view: OpView, axes: list[int], keepdims: int) -> LocalOp:
    """ReduceSum of a part without elements, in the form of the graph's opset."""
    node, where = view.node, f"{view.node.name}.axes"
    add = Node(node.name, "ReduceSum", node.inputs[:1], node.outputs, {"keepdims": keepdims})
    if view.opset < REDUCTIONS["ReduceSum"].axes_input:
        return LocalOp((replace(add, attrs={"keepdims": keepdims, "axes": tuple(axes)}),))
    return LocalOp(
        (replace(add, inputs=(node.inputs[0], where)),), {where: np.array(axes, np.int64)}
    )


def _shape_kept(view: OpView, axes: set[int], flops: float) -> Rule:
    dims = [f"d{i}" for i in range(len(view.shape(0)))]
    return Rule.of(
        [dims, *([None] * (len(view.node.inputs) - 1))],
        [dims],
        view.shapes,
        view.out_shapes,
        whole={dims[axis] for axis in axes},
        flops=flops,
    )


def softmax_like(flops: float) -> Callable[[OpView], Rule]:
    """Rule of Softmax and its relatives: before opset 13 all dims from `axis` on are one."""

    def rule(view: OpView) -> Rule:
        rank = len(view.shape(0))
        if view.opset >= 13:
            return _shape_kept(view, {view.int_attr("axis", -1)}, flops)
        return _shape_kept(view, set(range(view.int_attr("axis", 1) % rank, rank)), flops)

    return rule


def cumulative(view: OpView) -> Rule:
    """CumSum and CumProd: the dim is the second operand, a constant."""
    return _shape_kept(view, {int(view.constant(1).reshape(-1)[0])}, 1)


def arg_reduce(view: OpView) -> Rule:
    """ArgMax and ArgMin give places in the whole dim."""
    rank = len(view.shape(0))
    axis = view.int_attr("axis", 0) % rank
    dims = [f"d{i}" for i in range(rank)]
    out = _kept(dims, frozenset({axis}), bool(view.int_attr("keepdims", 1)))
    whole = {dims[axis]}
    return Rule.of([dims], [out], view.shapes, view.out_shapes, whole=whole, flops=1)


def top_k(view: OpView) -> Rule:
    """The dim of the search is whole, its places are k of it."""
    shape = view.shape(0)
    axis = view.int_attr("axis", -1) % len(shape)
    dims = [f"d{i}" for i in range(len(shape))]
    out = [*dims[:axis], "k", *dims[axis + 1 :]]
    return Rule.of(
        [dims, None][: len(view.node.inputs)],
        [out if name else None for name in view.node.outputs],
        view.shapes,
        view.out_shapes,
        whole={dims[axis], "k"},
        points=dims,
        flops=math.log2(max(shape[axis], 2)),  # comparisons of a sort
    )


ROWS: Mapping[str, OpRow] = {
    **{op: OpRow(reduce) for op in REDUCTIONS if op != "ReduceMean"},
    "ReduceMean": OpRow(reduce, local_mean),
    **{op: OpRow(arg_reduce) for op in ("ArgMax", "ArgMin")},
    **{op: OpRow(cumulative) for op in ("CumProd", "CumSum")},
    "Hardmax": OpRow(softmax_like(2)),
    "LogSoftmax": OpRow(softmax_like(TRANSCENDENTAL + 4)),
    "Softmax": OpRow(softmax_like(TRANSCENDENTAL + 4)),
    "TopK": OpRow(top_k),
}
