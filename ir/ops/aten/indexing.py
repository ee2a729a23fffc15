"""Elements found by index: gather, scatter and their relatives; sorting.

The dims that are searched are whole, all others are cut. Where places are added up, the places
are cut too: each device adds its own to a partial result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from partitioner.ir.ops.rules.dims import broadcast, names, replaced
from partitioner.ir.ops.rules.indexing import gather_elements, moved_rows, scatter_elements
from partitioner.ir.ops.rules.reduction import top_k
from partitioner.ir.ops.signature import OpaqueError
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class _Indexed:
    """Dims of an advanced index ``x[:, a, b]``.

    Attributes:
        data: Dims of the indexed tensor; searched ones are ``v<dim>``.
        indices: Dims of each index, None where there is none.
        places: Dims of the broadcast indices, without those of size 1.
        result: Dims of what is read or written.
    """

    data: list[str]
    indices: list[list[str] | None]
    places: list[str]
    result: list[str]

    @property
    def searched(self) -> set[str]:
        """Dims that are whole."""
        return {name for name in self.data if name.startswith("v")}

    @property
    def loops(self) -> list[str]:
        """Factors of what is read or written."""
        return [name for name in self.result if name != "1"]

    @classmethod
    def of(cls, view: OpView) -> _Indexed:
        """From a node whose operands are the tensor and then its indices.

        Raises:
            OpaqueError: A mask is an index: its result has no static shape.
        """
        kinds = [view.type(1 + i) for i in range(view.int_attr("indices", 0))]
        if any(kind is not None and kind.dtype in ("bool", "uint8") for kind in kinds):
            raise OpaqueError("an index is a mask")
        all_places = names("i", max((kind.rank for kind in kinds if kind is not None), default=0))
        indices = [None if kind is None else broadcast(kind.shape, all_places) for kind in kinds]
        factors = {name for dims in indices for name in dims or ()}
        where = [dim for dim, kind in enumerate(kinds) if kind is not None]
        data = [f"v{d}" if d in where else f"d{d}" for d in range(view.rank())]
        # Places come first, or where the indices are if these lie side by side.
        together = where and where[-1] - where[0] + 1 == len(where)
        first = where[0] if together else 0
        rest = [name for dim, name in enumerate(data) if dim not in where]
        broadcast_places = [name if name in factors else "1" for name in all_places]
        result = [*rest[:first], *broadcast_places, *rest[first:]]
        return cls(data, indices, [name for name in all_places if name in factors], result)


def _index(view: OpView) -> Rule:
    """``d0 v1 d2, i0 -> d0 i0 d2``."""
    dims = _Indexed.of(view)
    return view.rule(
        [dims.data, *dims.indices],
        [dims.result],
        whole=dims.searched,
        points=dims.loops,
        sums=[0],
    )


def _index_put(view: OpView) -> Rule:
    """``d0 v1 d2, i0, d0 i0 d2 -> d0 v1 d2``; places that add up are cut."""
    dims, adds = _Indexed.of(view), bool(view.attr("accumulate"))
    last = len(view.types) - 1
    return view.rule(
        [dims.data, *dims.indices, broadcast(view.shape(last), dims.result)],
        [dims.data],
        whole={*dims.searched, *([] if adds else dims.places)},
        reduce=dims.places,
        addends={0} if adds else (),
        points=dims.loops,
        flops=1 if adds else 0,
        sums=[0, last],
    )


def _index_select(view: OpView) -> Rule:
    """``d0 v d2, i -> d0 i d2``."""
    dims, dim = names("d", view.rank()), view.dim("dim", 0)
    data, result = replaced(dims, dim, "v"), replaced(dims, dim, "i")
    return view.rule([data, "i"], [result], whole={"v"}, points=result, sums=[0])


def _index_write(view: OpView, *, adds: bool) -> Rule:
    """``d0 v d2, i, d0 i d2 -> d0 v d2``: each device adds its own places, or writes all."""
    dims, dim = names("d", view.rank()), view.dim("dim", 0)
    data, source = replaced(dims, dim, "v"), replaced(dims, dim, "i")
    return view.rule(
        [data, "i", source],
        [data],
        whole={"v"} if adds else {"v", "i"},
        reduce="i",
        addends={0} if adds else (),
        points=source,
        flops=2 if adds else 0,
        sums=[0, 2],
    )


def _gather(view: OpView) -> Rule:
    """The gradient may be asked for as a sparse tensor or not."""
    return gather_elements(view, view.dim("dim", 0), sums=[0])


def _scatter(view: OpView, *, adds: bool = False) -> Rule:
    return scatter_elements(view, view.dim("dim", 0), adds=adds, sums=[0, 2])


def _scatter_value(view: OpView) -> Rule:
    """A number other than 0 is no pending sum's."""
    return scatter_elements(view, view.dim("dim", 0), sums=[0] if view.attr("value") == 0 else [])


def _scatter_reduce(view: OpView) -> Rule:
    """Each place is reduced over all that is written there."""
    return scatter_elements(view, view.dim("dim", 0))


def _sort(view: OpView) -> Rule:
    if not view.shape():
        raise OpaqueError("a single number is sorted")
    return top_k(view, view.dim("dim", -1), "v")


ROWS: Mapping[str, OpRow] = {
    **{f"aten::{op}.Tensor": OpRow(_index, moved=moved_rows) for op in ("_unsafe_index", "index")},
    **{f"aten::{op}": OpRow(_index_put) for op in ("_unsafe_index_put", "index_put")},
    **{f"aten::{op}": OpRow(_sort) for op in ("sort", "sort.stable", "topk")},
    "aten::gather": OpRow(_gather, moved=moved_rows),
    "aten::index_add": OpRow(partial(_index_write, adds=True)),
    "aten::index_copy": OpRow(partial(_index_write, adds=False)),
    "aten::index_select": OpRow(_index_select, moved=moved_rows),
    "aten::scatter.src": OpRow(_scatter),
    "aten::scatter.value": OpRow(_scatter_value),
    "aten::scatter_add": OpRow(partial(_scatter, adds=True)),
    "aten::scatter_reduce.two": OpRow(_scatter_reduce),
}
