"""Elements found by index: gather, scatter and their relatives; sorting.

The dims that are searched are whole, all others are cut. Where places are added up, the places
are cut too: each device adds its own to a partial result. Where the indices cover only the first
places of a dim, the dim is ``d + rest``, as in the rows of ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.ir.ops.aten.sums import sums
from partitioner.ir.ops.contraction import broadcast_dims
from partitioner.ir.ops.dims import names, replaced
from partitioner.ir.ops.table import OpaqueError, OpRow, OpView, Shape
from partitioner.ir.rule import Rule


def read_places(ins: tuple[int, ...], outs: tuple[int, ...]) -> int:
    """Bytes moved: the indices, and each place read and written."""
    return sum(ins[1:]) + 2 * outs[0]


@dataclass(frozen=True)
class _Indexed:
    """Dims of an advanced index ``x[:, a, b]``.

    Attributes:
        data: Dims of the indexed tensor; searched ones are ``v<dim>``.
        indices: Dims of each index, None where there is none.
        places: Dims of the broadcast indices.
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

    @classmethod
    def of(cls, view: OpView) -> _Indexed:
        """From a node whose operands are the tensor and then its indices.

        Raises:
            OpaqueError: A mask is an index: its result has no static shape.
        """
        count = view.int_attr("indices", 0)
        found = [view.type(1 + i) for i in range(count)]
        if any(kind is not None and kind.dtype in ("bool", "uint8") for kind in found):
            raise OpaqueError("an index is a mask")
        shapes = [None if kind is None else kind.shape for kind in found]
        rank = max((len(shape) for shape in shapes if shape is not None), default=0)
        indices = [None if s is None else broadcast_dims(s, rank, "i") for s in shapes]
        places = [_named(indices, f"i{dim}") for dim in range(rank)]
        where = [dim for dim, shape in enumerate(shapes) if shape is not None]
        data = [f"v{d}" if d in where else f"d{d}" for d in range(len(view.shape(0)))]
        return cls(data, indices, places, _read(data, where, places))


def _named(indices: list[list[str] | None], name: str) -> str:
    """A dim of the broadcast indices: 1 if it is so in all of them."""
    return name if any(name in (dims or ()) for dims in indices) else "1"


def _read(data: list[str], where: list[int], places: list[str]) -> list[str]:
    """Places come first, or where the indices are if these lie side by side."""
    rest = [name for dim, name in enumerate(data) if dim not in where]
    together = where and where[-1] - where[0] + 1 == len(where)
    first = where[0] if together else 0
    return [*rest[:first], *places, *rest[first:]]


def index(view: OpView) -> Rule:
    """``d0 v1 d2, i0 -> d0 i0 d2``."""
    own = _Indexed.of(view)
    return Rule.of(
        [own.data, *own.indices],
        [own.result],
        view.shapes,
        view.out_shapes,
        whole=own.searched,
        linear=sums(view, 0),
        points=[name for name in own.result if name != "1"],
    )


def index_put(view: OpView) -> Rule:
    """``d0 v1 d2, i0, d0 i0 d2 -> d0 v1 d2``; places that add up are cut."""
    own = _Indexed.of(view)
    values = view.shape(len(view.node.inputs) - 1)
    written = own.result[len(own.result) - len(values) :]
    written = ["1" if size == 1 else name for size, name in zip(values, written, strict=True)]
    adds = bool(view.attr("accumulate"))
    return _written(view, own, written, adds)


def _written(view: OpView, own: _Indexed, values: list[str], adds: bool) -> Rule:
    places = [name for name in own.places if name != "1"]
    return Rule.of(
        [own.data, *own.indices, values],
        [own.data],
        view.shapes,
        view.out_shapes,
        whole={*own.searched, *([] if adds else places)},
        reduce=dict.fromkeys(places, "sum"),
        addends={0} if adds else (),
        linear=sums(view, 0, len(view.node.inputs) - 1),
        points=[name for name in own.result if name != "1"],
        flops=1 if adds else 0,
    )


def _dim(view: OpView) -> int:
    return view.int_attr("dim", 0) % max(len(view.shape(0)), 1)


def index_select(view: OpView) -> Rule:
    """``d0 v d2, i -> d0 i d2``."""
    dims, dim = names("d", len(view.shape(0))), _dim(view)
    result = replaced(dims, dim, "i")
    data = replaced(dims, dim, "v")
    return Rule.of(
        [data, ["i"]],
        [result],
        view.shapes,
        view.out_shapes,
        whole={"v"},
        linear=sums(view, 0),
        points=result,
    )


def index_add(view: OpView) -> Rule:
    """``d0 v d2, i, d0 i d2 -> d0 v d2``: each device adds its own places."""
    return _by_slices(view, adds=True)


def index_copy(view: OpView) -> Rule:
    """The same, written: each device writes all places."""
    return _by_slices(view, adds=False)


def _by_slices(view: OpView, *, adds: bool) -> Rule:
    dims, dim = names("d", len(view.shape(0))), _dim(view)
    data, source = replaced(dims, dim, "v"), replaced(dims, dim, "i")
    return Rule.of(
        [data, ["i"], source],
        [data],
        view.shapes,
        view.out_shapes,
        whole={"v"} if adds else {"v", "i"},
        reduce={"i": "sum"},
        addends={0} if adds else (),
        linear=sums(view, 0, 2),
        points=source,
        flops=2 if adds else 0,
    )


@dataclass(frozen=True)
class _Covered:
    """Dims of data and of indices of the same rank, and sizes of what the indices leave out."""

    data: list[str]
    places: list[str]
    sizes: dict[str, int]

    @classmethod
    def of(cls, view: OpView) -> _Covered:
        """From a node whose operands are the data and the indices.

        Raises:
            OpaqueError: Data or indices are a single number.
        """
        if not view.shape(0) or not view.shape(1):
            raise OpaqueError("the data or the index has no dims")
        rank, searched = len(view.shape(0)), _dim(view)
        data, places = names("d", rank), names("d", rank)
        data[searched], places[searched] = "v", "i"
        sizes: dict[str, int] = {}
        for dim, (all_, some) in enumerate(zip(view.shape(0), view.shape(1), strict=True)):
            if dim != searched and all_ != some:
                sizes |= {f"d{dim}": some, f"rest{dim}": all_ - some}
                data[dim] = f"d{dim} + rest{dim}"
        return cls(data, places, sizes)


def gather(view: OpView) -> Rule:
    """``d0 v, d0 i -> d0 i``; the gradient may be asked for as a sparse tensor or not."""
    own = _Covered.of(view)
    return Rule.of(
        [own.data, own.places],
        [own.places],
        view.shapes,
        view.out_shapes,
        sizes=own.sizes,
        whole={"v"},
        dropped=own.sizes,
        linear=sums(view, 0),
        points=own.places,
    )


def scatter(view: OpView) -> Rule:
    """``d0 v, d0 i, d0 i -> d0 v``."""
    return _scatter(view, adds=False, linear=sums(view, 0, 2))


def scatter_value(view: OpView) -> Rule:
    """``d0 v, d0 i -> d0 v``; a number other than 0 is no pending sum's."""
    return _scatter(view, adds=False, linear=sums(view, 0) if view.attr("value") == 0 else ())


def scatter_add(view: OpView) -> Rule:
    """``d0 v, d0 i, d0 i -> d0 v``: each device adds its own places."""
    return _scatter(view, adds=True, linear=sums(view, 0, 2))


def scatter_reduce(view: OpView) -> Rule:
    """``d0 v, d0 i, d0 i -> d0 v``: each place is reduced over all that is written there."""
    return _scatter(view, adds=False, linear=())


def _scatter(view: OpView, *, adds: bool, linear: tuple[int, ...]) -> Rule:
    """See above.

    Raises:
        OpaqueError: Only a part of the source is written.
    """
    own = _Covered.of(view)
    if len(view.shapes) > 2 and view.shape(2) != view.shape(1):
        raise OpaqueError(f"the source is {view.shape(2)}, the index {view.shape(1)}")
    return Rule.of(
        [own.data, *[own.places] * (len(view.node.inputs) - 1)],
        [own.data],
        view.shapes,
        view.out_shapes,
        sizes=own.sizes,
        whole={"v"} if adds else {"v", "i"},
        reduce={"i": "sum"},
        addends={0} if adds else (),
        linear=linear,
        points=own.places,
        flops=1 if adds else 0,
    )


def sort(view: OpView) -> Rule:
    """``d0 v -> d0 k, d0 k``: values and their places in the whole dim."""
    shape: Shape = view.shape(0)
    if not shape:
        raise OpaqueError("a single number is sorted")
    dim = view.int_attr("dim", -1) % len(shape)
    dims = names("d", len(shape))
    result = replaced(dims, dim, "k")
    return Rule.of(
        [replaced(dims, dim, "v")],
        [result if name else None for name in view.node.outputs],
        view.shapes,
        view.out_shapes,
        whole={"v", "k"},
        points=replaced(dims, dim, "v"),
        flops=math.log2(max(shape[dim], 2)),  # comparisons of a sort
    )


ROWS: Mapping[str, OpRow] = {
    "aten::_unsafe_index.Tensor": OpRow(index, moved=read_places),
    "aten::_unsafe_index_put": OpRow(index_put),
    "aten::gather": OpRow(gather, moved=read_places),
    "aten::index.Tensor": OpRow(index, moved=read_places),
    "aten::index_add": OpRow(index_add),
    "aten::index_copy": OpRow(index_copy),
    "aten::index_put": OpRow(index_put),
    "aten::index_select": OpRow(index_select, moved=read_places),
    "aten::scatter.src": OpRow(scatter),
    "aten::scatter.value": OpRow(scatter_value),
    "aten::scatter_add": OpRow(scatter_add),
    "aten::scatter_reduce.two": OpRow(scatter_reduce),
    "aten::sort": OpRow(sort),
    "aten::sort.stable": OpRow(sort),
    "aten::topk": OpRow(sort),
}
