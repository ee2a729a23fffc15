"""Reductions over dims, running sums and products, and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from partitioner.ir.graph import Attr
from partitioner.ir.ops.local import mean_of_part, other_node
from partitioner.ir.ops.rules.elementwise import TRANSCENDENTAL
from partitioner.ir.ops.rules.reduction import along, reduce
from partitioner.ir.ops.signature import Shape, names
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import numpy_dtype

#: Operators that reduce no dim if the list of dims is empty; the others reduce all.
_NONE_IF_EMPTY = frozenset({"aten::all.dims", "aten::any.dims", "aten::count_nonzero.dim_IntList"})

#: FLOPs an operand element of reductions whose partial results cannot be combined.
WHOLE: Mapping[str, float] = {
    **dict.fromkeys(("all", "all.dim", "all.dims", "any", "any.dim", "any.dims"), 1.0),
    **dict.fromkeys(("argmax", "argmin", "max.dim", "min.dim"), 1.0),
    **dict.fromkeys(("kthvalue", "median.dim", "mode", "nanmedian.dim"), 3.0),
    "aminmax": 2.0,
    **dict.fromkeys(("linalg_vector_norm", "norm.Scalar", "norm.ScalarOpt_dim"), 2.0),
    **dict.fromkeys(("std.correction", "std_mean.correction"), 4.0),
    **dict.fromkeys(("var.correction", "var_mean.correction"), 4.0),
    "logsumexp": TRANSCENDENTAL + 2,
}


def _reduced_dims(view: OpView) -> frozenset[int]:
    rank, dim = view.rank(), view.attr("dim")
    if dim is None or (dim == () and view.node.op not in _NONE_IF_EMPTY):
        return frozenset(range(rank))
    named = dim if isinstance(dim, tuple) else (view.int_attr("dim", 0),)
    return frozenset(int(i) % rank for i in named if rank)


def _reduce(view: OpView, how: str = "", flops: float = 1.0, sums: tuple[int, ...] = ()) -> Rule:
    keep = bool(view.attr("keepdim", False))
    return reduce(view, _reduced_dims(view), how, keep=keep, flops=flops, sums=sums)


def _combine(view: OpView, how: str) -> Rule:
    """Partial results are combined unless they are booleans, which are not exchanged."""
    return _reduce(view, "" if view.out_type.dtype == "bool" else how)


def _count(view: OpView, shape: Shape) -> int:
    return math.prod(shape[i] for i in _reduced_dims(view))


def _local_mean(view: OpView, local: LocalView) -> LocalOp:
    dims, keepdim = _reduced_dims(view), bool(view.attr("keepdim", False))
    of: dict[str, Attr] = {"dim": tuple(sorted(dims)), "keepdim": keepdim}
    sum_of = partial(other_node, view, "aten::sum.dim_IntList", **of, dtype=view.out_type.dtype)
    return mean_of_part(view, local, dims, sum_of)


def _local_extreme(view: OpView, local: LocalView) -> LocalOp:
    """A device without elements gives the other end of the element type's range."""
    if _count(view, local.shapes[0]) or not _count(view, view.shape()):
        return LocalOp((view.node,))
    dtype = view.out_type.dtype
    attrs: dict[str, Attr] = {
        "size": local.out_shapes[0],
        "fill_value": end_of_range(dtype, largest=view.node.op in ("aten::amin", "aten::min")),
        "dtype": dtype,
    }
    return LocalOp((replace(view.node, op="aten::full", inputs=(), attrs=attrs),))


def end_of_range(dtype: str, *, largest: bool = False) -> int | float:
    """The least number of an element type, or the largest."""
    if "float" in dtype:
        return math.inf if largest else -math.inf
    limits = np.iinfo(numpy_dtype(dtype))
    return int(limits.max if largest else limits.min)


def _cumulative(view: OpView, sums: tuple[int, ...] = ()) -> Rule:
    return along(view, _reduced_dims(view), flops=1, sums=sums)


def _histogram(view: OpView) -> Rule:
    """``d.. -> v``: counts add up. Without a range, that of all elements is taken."""
    if view.attr("min", 0) == view.attr("max", 0):
        return view.rule("d..", "v", whole="d.. v", points="d..", flops=1)
    return view.rule("d..", "v", reduce="d..", whole="v", points="d..", flops=1)


def _fourier(view: OpView) -> Rule:
    """``d0 d1 -> d0 f1``: transformed dims are whole; the last of them may change its size."""
    dims, over = names("d", view.rank()), {i % view.rank() for i in view.ints("dim") or ()}
    result = [f"f{i}" if i in over else name for i, name in enumerate(dims)]
    count = math.prod(view.shape()[i] for i in over)
    whole = [name for i in over for name in (dims[i], result[i])]
    return view.rule([dims], [result], whole=whole, points=dims, flops=5 * math.log2(max(count, 2)))


#: Sum or mean: pending sums of the operand pass.
_total = partial(_reduce, how="sum", sums=(0,))

ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}": OpRow(partial(_reduce, flops=flops)) for op, flops in WHOLE.items()},
    **{
        f"aten::{op}": OpRow(partial(_combine, how=how), _local_extreme)
        for how in ("max", "min")
        for op in (how, f"a{how}")
    },
    **{f"aten::{op}": OpRow(partial(_combine, how="prod")) for op in ("prod", "prod.dim_int")},
    **{f"aten::{op}": OpRow(_total, _local_mean, averages=True) for op in ("mean", "mean.dim")},
    **{f"aten::{op}": OpRow(_total) for op in ("sum", "sum.dim_IntList")},
    "aten::count_nonzero": OpRow(partial(_combine, how="sum")),
    "aten::count_nonzero.dim_IntList": OpRow(partial(_combine, how="sum")),
    **{f"aten::_fft_{kind}": OpRow(_fourier) for kind in ("c2c", "c2r", "r2c")},
    "aten::histc": OpRow(_histogram),
    "aten::cumprod": OpRow(_cumulative),
    "aten::cumsum": OpRow(partial(_cumulative, sums=(0,))),
}
