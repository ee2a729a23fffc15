"""Elements found by index: gather, scatter and their relatives; sorting.

Indexed dims are whole, all others are cut. Where elements are added up, the dims of the indices
are cut too: each device adds its part to a partial result. A dim that is written at positions that
one vector holds is cut: each device writes what lies in its part, as to a cache of a decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from partitioner.ir.graph import Attr
from partitioner.ir.ops.local import interval_attrs
from partitioner.ir.ops.rules.indexing import gather_elements, moved_rows, scatter_elements
from partitioner.ir.ops.rules.reduction import top_k
from partitioner.ir.ops.signature import OpaqueError, broadcast, names, pattern, replaced
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule


def _index_dims(
    view: OpView,
) -> tuple[list[str], list[list[str] | None], list[str], list[str]]:
    """Dims of an advanced index ``x[:, a, b]``: of x, of each index, of all indices, of the result.

    Indexed dims of x are ``v<dim>``. The indices broadcast to common dims, which come first in the
    result, or in place of the indexed dims if these lie side by side.
    """
    indices = [view.type(1 + i) for i in range(view.int_attr("indices", 0))]
    if any(index is not None and index.dtype in ("bool", "uint8") for index in indices):
        raise OpaqueError("an index is a mask")  # the result has no static shape
    common = names("i", max((index.rank for index in indices if index is not None), default=0))
    dims = [None if index is None else broadcast(index.shape, common) for index in indices]
    factors = {name for index in dims for name in index or ()}
    common = [name if name in factors else "1" for name in common]
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    data = [f"v{dim}" if dim in indexed else f"d{dim}" for dim in range(view.rank())]
    kept = [name for name in data if name.startswith("d")]
    side_by_side = indexed and indexed[-1] - indexed[0] + 1 == len(indexed)
    first = indexed[0] if side_by_side else 0
    return data, dims, common, [*kept[:first], *common, *kept[first:]]


def _index(view: OpView) -> Rule:
    """``d0 v1 d2, i0 -> d0 i0 d2``."""
    data, indices, _, result = _index_dims(view)
    return view.rule(
        [data, *indices],
        [result],
        whole=[name for name in data if name.startswith("v")],
        points=[name for name in result if name != "1"],
        sums=[0],
    )


def _index_put(view: OpView) -> Rule:
    """``d0 v1 d2, i0, d0 i0 d2 -> d0 v1 d2``; indices are cut if elements are added up."""
    data, indices, common, written = _index_dims(view)
    adds, last = bool(view.attr("accumulate")), len(view.types) - 1
    whole = [name for name in data if name.startswith("v")]
    if not adds:
        whole = common if _written_dim(view) is not None else [*whole, *common]
    return view.rule(
        [data, *indices, broadcast(view.shape(last), written)],
        [data],
        whole=whole,
        reduce=common,
        addends={0} if adds else (),
        points=[name for name in written if name != "1"],
        flops=1 if adds else 0,
        sums=[0, last],
    )


def _written_dim(view: OpView) -> int | None:
    """The only dim that is written, at positions that one vector holds; None otherwise."""
    indices = [view.type(1 + i) for i in range(view.int_attr("indices", 0))]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[dims[0]] if len(dims) == 1 else None
    return dims[0] if index is not None and index.rank == 1 and index.dtype != "bool" else None


def _local_put(view: OpView, local: LocalView) -> LocalOp:
    dim = None if view.attr("accumulate") else _written_dim(view)
    if dim is None:
        return LocalOp((view.node,))
    return write_part(view, local, dim, 1 + dim, from_end=True)


def _by_vector(view: OpView) -> tuple[list[str], list[str]]:
    """Dims ``d0 v d2`` of the data, and ``d0 i d2`` of what a vector of i indices picks of them."""
    if not (view.rank(0) and view.rank(1)):
        raise OpaqueError("the data or the index has no dims")
    dims, dim = names("d", view.rank()), view.dim("dim", 0)
    return replaced(dims, dim, "v"), replaced(dims, dim, "i")


def _index_select(view: OpView) -> Rule:
    """``d0 v d2, i -> d0 i d2``."""
    data, result = _by_vector(view)
    return view.rule([data, "i"], [result], whole={"v"}, points=result, sums=[0])


def _index_write(view: OpView, *, adds: bool) -> Rule:
    """``d0 v d2, i, d0 i d2 -> d0 v d2``: each device adds its part of i, or writes to its of v."""
    data, source = _by_vector(view)
    return view.rule(
        [data, "i", source],
        [data],
        whole={"v" if adds else "i"},
        reduce="i",
        addends={0} if adds else (),
        points=source,
        flops=2 if adds else 0,
        sums=[0, 2],
    )


def _scatter(view: OpView, *, adds: bool = False, sums: Sequence[int] = (0, 2)) -> Rule:
    return scatter_elements(view, view.dim("dim", 0), adds=adds, sums=sums)


def _sort(view: OpView) -> Rule:
    if not view.shape():
        raise OpaqueError("a single number is sorted")
    return top_k(view, view.dim("dim", -1), "v")


def write_part(
    view: OpView,
    local: LocalView,
    dim: int,
    index: int | np.ndarray,
    source: str = "",
    *,
    from_end: bool = False,
) -> LocalOp:
    """The node for a device, which is told its part of the written dim unless it has all of it.

    `index` is the operand that holds the written positions, or these; negative ones count from the
    end if so told (`from_end`), and are out of range otherwise. The last operand is written by
    default.
    """
    size = view.shape()[dim]
    if local.shapes[0][dim] == size:
        return LocalOp((view.node,))
    constants: dict[str, np.ndarray] = {}
    if isinstance(index, int):
        positions = view.node.inputs[index]
    else:
        positions = f"{view.node.name}.at"
        constants[positions] = index.astype(np.int64)
    part = interval_attrs(local.regions[0][dim])
    attrs: dict[str, Attr] = {"dim": dim, "from_end": from_end, "size": size, **part}
    inputs = view.node.inputs[0], positions, source or view.node.inputs[-1]
    op = "partitioner::index_write_part"
    return LocalOp((replace(view.node, op=op, inputs=inputs, attrs=attrs),), constants)


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}.Tensor": OpRow(_index, moved=moved_rows) for op in ("_unsafe_index", "index")},
    **{
        f"aten::{op}": OpRow(_index_put, _local_put, overwrites=True, where=True)
        for op in ("_unsafe_index_put", "index_put")
    },
    **{f"aten::{op}": OpRow(_sort) for op in ("sort", "sort.stable", "topk")},
    "aten::bucketize.Tensor": OpRow(pattern("d.., n -> d..", whole="n", points="d..")),
    "aten::gather": OpRow(
        lambda view: gather_elements(view, view.dim("dim", 0), sums=[0]), moved=moved_rows
    ),
    "aten::index_add": OpRow(partial(_index_write, adds=True)),
    "aten::index_copy": OpRow(
        partial(_index_write, adds=False),
        lambda view, local: write_part(view, local, view.dim("dim", 0), 1),
        overwrites=True,
        where=True,
    ),
    "aten::index_select": OpRow(_index_select, moved=moved_rows),
    "aten::scatter.src": OpRow(_scatter),
    "aten::scatter.value": OpRow(  # linear if the number is 0
        lambda view: _scatter(view, sums=[0] if view.attr("value") == 0 else [])
    ),
    "aten::scatter_add": OpRow(partial(_scatter, adds=True)),
    # A reduction other than a sum takes all that is written to an element.
    "aten::scatter_reduce.two": OpRow(partial(_scatter, sums=())),
}
