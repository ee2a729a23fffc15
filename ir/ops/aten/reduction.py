"""Reductions over dims, and operators that need a whole dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from partitioner.ir.graph import Attr, Node
from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.dims import names
from partitioner.ir.ops.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType, numpy_dtype

#: Operators that reduce no dim if the list of dims is empty; the others reduce all.
_NONE_IF_EMPTY = frozenset({"aten::all.dims", "aten::any.dims", "aten::count_nonzero.dim_IntList"})

#: FLOPs an operand element of reductions whose parts do not join.
WHOLE: Mapping[str, float] = {
    **dict.fromkeys(("all", "all.dim", "all.dims", "any", "any.dim", "any.dims"), 1.0),
    **dict.fromkeys(("argmax", "argmin", "max.dim", "min.dim"), 1.0),
    "aminmax": 2.0,
    **dict.fromkeys(("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim"), 2.0),
    **dict.fromkeys(("std.correction", "std_mean.correction"), 4.0),
    **dict.fromkeys(("var.correction", "var_mean.correction"), 4.0),
    "logsumexp": TRANSCENDENTAL + 2,
}


def reduced_dims(view: OpView) -> frozenset[int]:
    """Dims that are reduced: those named, or all."""
    rank, dim = len(view.shape(0)), view.attr("dim")
    if dim is None or (dim == () and view.node.op not in _NONE_IF_EMPTY):
        return frozenset(range(rank))
    asked = dim if isinstance(dim, tuple) else (view.int_attr("dim", 0),)
    return frozenset(int(one) % rank for one in asked if rank)


def reduction(
    view: OpView, how: str = "", flops: float = 1.0, linear: tuple[int, ...] = ()
) -> Rule:
    """Reduced dims are cut where their parts join by `how`, whole otherwise."""
    lost, keep = reduced_dims(view), bool(view.attr("keepdim", False))
    dims = names("d", len(view.shape(0)))
    kept = ["1" if i in lost else one for i, one in enumerate(dims) if keep or i not in lost]
    gone = [dims[i] for i in sorted(lost)]
    return Rule.of(
        [dims],
        [kept if name else None for name in view.node.outputs],
        view.shapes,
        view.out_shapes,
        reduce=dict.fromkeys(gone, how) if how else {},
        whole=() if how else gone,
        linear=linear,
        flops=flops,
    )


def total(view: OpView) -> Rule:
    """A sum or mean: parts join, and pending sums pass."""
    return reduction(view, "sum", linear=sums(view, 0))


def joins(how: str) -> Callable[[OpView], Rule]:
    """Rule of a reduction whose parts join; truth values are not exchanged in parts."""
    return lambda view: reduction(view, "" if _made(view).dtype == "bool" else how)


def needs_all(flops: float) -> Callable[[OpView], Rule]:
    """Rule of a reduction whose dims are whole."""
    return lambda view: reduction(view, flops=flops)


def _made(view: OpView) -> TensorType:
    return view.graph.types[next(name for name in view.node.outputs if name)]


def _count(view: OpView, shape: tuple[int, ...]) -> int:
    return math.prod(shape[i] for i in reduced_dims(view))


def local_mean(view: OpView, local: LocalView) -> LocalOp:
    """Where a reduced dim is cut, a device adds its own mean by its share of the elements.

    Never a sum that is divided later: half precision would overflow where the mean does not. A
    device without elements adds the sum of none.
    """
    node, made = view.node, _made(view)
    own, whole = _count(view, local.shapes[0]), _count(view, view.shape(0))
    if own == whole:
        return LocalOp((node,))
    if own == 0:
        attrs: dict[str, Attr] = {
            "dim": tuple(sorted(reduced_dims(view))),
            "keepdim": bool(view.attr("keepdim", False)),
            "dtype": made.dtype,
        }
        return LocalOp((replace(node, op="aten::sum.dim_IntList", attrs=attrs),))
    mean = f"{node.name}.mean"
    return LocalOp(
        (
            replace(node, name=mean, outputs=(mean,)),
            Node(node.name, "aten::mul.Tensor", (mean, ""), node.outputs, {"other": own / whole}),
        ),
        types={mean: made.with_shape(local.out_shapes[0])},
    )


def local_extreme(view: OpView, local: LocalView) -> LocalOp:
    """A device without elements gives the other end of the element type's range."""
    if _count(view, local.shapes[0]) or not _count(view, view.shape(0)):
        return LocalOp((view.node,))
    kind = _made(view).dtype
    largest = view.node.op in ("aten::amin", "aten::min")
    attrs: dict[str, Attr] = {
        "size": local.out_shapes[0],
        "fill_value": _end_of_range(kind, largest),
        "dtype": kind,
    }
    return LocalOp((replace(view.node, op="aten::full", inputs=(), attrs=attrs),))


def _end_of_range(kind: str, largest: bool) -> int | float:
    if "float" in kind:
        return math.inf if largest else -math.inf
    limits = np.iinfo(numpy_dtype(kind))
    return int(limits.max if largest else limits.min)


def cumulative(view: OpView) -> Rule:
    """A running sum or product: the dim is whole."""
    dims = names("d", len(view.shape(0)))
    adds = view.node.op == "aten::cumsum"
    return Rule.of(
        [dims],
        [dims],
        view.shapes,
        view.out_shapes,
        whole={dims[i] for i in reduced_dims(view)},
        linear=sums(view, 0) if adds else (),
        flops=1,
    )


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(needs_all(flops)) for op, flops in WHOLE.items()},
    **{f"aten::{op}": OpRow(joins("max"), local_extreme) for op in ("amax", "max")},
    **{f"aten::{op}": OpRow(joins("min"), local_extreme) for op in ("amin", "min")},
    **{f"aten::{op}": OpRow(cumulative) for op in ("cumprod", "cumsum")},
    **{f"aten::{op}": OpRow(joins("prod")) for op in ("prod", "prod.dim_int")},
    **{f"aten::{op}": OpRow(joins("sum")) for op in ("count_nonzero", "count_nonzero.dim_IntList")},
    **{f"aten::{op}": OpRow(total, local_mean) for op in ("mean", "mean.dim")},
    **{f"aten::{op}": OpRow(total) for op in ("sum", "sum.dim_IntList")},
}
