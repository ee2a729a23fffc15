"""Gather, Scatter and their relatives, OneHot, Compress: indexed dims are whole, others cut.

The rows of a table that Gather looks up are cut too: each device gives those that it has, and zeros
for the others. So are the dims that ScatterElements, ScatterND and TensorScatter write to, as the
positions of a cache: each device writes what lies in its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from partitioner.ir.graph import Attr, Node
from partitioner.ir.layout import Interval
from partitioner.ir.ops.rules.dims import names, replaced
from partitioner.ir.ops.rules.indexing import gather_elements, moved_rows, scatter_elements
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

#: First opset that has Where, and Less of whole numbers.
PART_OF_ROWS = 9
#: First opset whose Slice and Scatter have the forms in which a part is written.
PART_WRITTEN = 11
#: Types of tables for which ONNX Runtime has Where.
TABLES = ("float16", "float32", "float64")


def _gather(view: OpView) -> Rule:
    """``d0 d1 d2, i0 i1 -> d0 i0 i1 d2`` along dim 1.

    Dim 1 of a table of floats is a sum over it, of one element that is not 0; else it is whole, as
    where ONNX Runtime cannot look up a part of it.
    """
    dims, dim, index = names("d", view.rank()), view.dim("axis", 0), names("i", view.rank(1))
    result, looked_up = replaced(dims, dim, *index), dims[dim]
    whole = view.opset < PART_OF_ROWS or view.rank() < 2
    if whole or view.out_type.dtype not in TABLES:
        return view.rule([dims, index], [result], whole={looked_up})
    return view.rule([dims, index], [result], reduce={looked_up: "sum"}, points=result)


@dataclass
class _Writer:
    """Nodes that a device runs in place of one, with their constants and types."""

    view: OpView
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)

    def call(
        self,
        op: str,
        *inputs: str,
        dtype: str,
        shape: Sequence[int],
        made: str = "",
        attrs: Mapping[str, Attr] | None = None,
    ) -> str:
        """Add a node; returns its result, a temporary unless it is `made`."""
        name = f"{self.view.node.name}.{len(self.nodes)}.part"
        self.nodes.append(Node(name, op, inputs, (made or name,), attrs or {}))
        if not made:
            self.types[name] = TensorType.of(dtype, shape)
        return made or name

    def constant(self, array: np.ndarray) -> str:
        """A new constant, or that of the same contents."""
        for name, known in self.constants.items():
            if known.dtype == array.dtype and np.array_equal(known, array):
                return name
        name = f"{self.view.node.name}.{len(self.constants)}.constant"
        self.constants[name] = array
        return name

    def number(self, number: int) -> str:
        """An int64."""
        return self.constant(np.array(number, np.int64))

    def numbers(self, *numbers: int) -> str:
        """A vector of int64."""
        return self.constant(np.array(numbers, np.int64))

    def from_number(self, x: str, start: int, type_: TensorType) -> str:
        """Compare integers of this type with `start`: True from there on."""
        least = self.constant(np.array(start, type_.dtype))
        below = self.call("Less", x, least, dtype="bool", shape=type_.shape)
        return self.call("Not", below, dtype="bool", shape=type_.shape)

    def in_run(self, x: str, start: int, end: int, type_: TensorType) -> str:
        """Compare integers of this type with a run: True from `start` to before `end`."""
        low, above = self.from_number(x, start, type_), self.constant(np.array(end, type_.dtype))
        high = self.call("Less", x, above, dtype="bool", shape=type_.shape)
        return self.call("And", low, high, dtype="bool", shape=type_.shape)

    def places(
        self, ids: str, intervals: Sequence[Interval], size: int, outside: int, type_: TensorType
    ) -> tuple[str, str]:
        """Where ids of a dim lie in a device's part, and whether they do.

        Args:
            ids: Positions in the whole dim; negative ones count from the end.
            intervals: What the device has of the dim.
            outside: The place of ids that lie elsewhere. An id outside the whole dim gets `size`,
                which the operator refuses.
        """
        dtype, shape = type_.dtype, type_.shape

        def call(op: str, *inputs: str, dtype: str = dtype) -> str:
            return self.call(op, *inputs, dtype=dtype, shape=shape)

        def number(value: int) -> str:
            return self.constant(np.array(value, dtype))

        def in_run(start: int, end: int) -> str:
            return self.in_run(wanted, start, end, type_)

        counted = call("Add", ids, number(size))  # of an index that counts from the end
        wanted = call("Where", call("Less", ids, number(0), dtype="bool"), counted, ids)
        place, inside, before = number(outside), "", 0
        for start, length in intervals:
            here = in_run(start, start + length)
            place = call("Where", here, call("Sub", wanted, number(start - before)), place)
            inside = call("Or", inside, here, dtype="bool") if inside else here
            before += length
        return call("Where", in_run(0, size), place, number(size)), inside

    def local(self) -> LocalOp:
        """The nodes."""
        return LocalOp(tuple(self.nodes), self.constants, self.types)


def _local_gather(view: OpView, local: LocalView) -> LocalOp:
    """A device looks up what it has, and gives zeros for the rest."""
    dim, size = view.dim("axis", 0), view.shape()[view.dim("axis", 0)]
    (table, ids), (result,), part = view.node.inputs, view.node.outputs, local.shapes[0][dim]
    if part == size:
        return LocalOp((view.node,))
    index_type, shape = view.types[1], local.shapes[1]
    assert index_type is not None
    write, dtype, out = _Writer(view), view.out_type.dtype, local.out_shapes[0]
    zero = write.constant(np.zeros((), view.out_type.dtype))
    if not part:
        write.call("Expand", zero, write.numbers(*out), dtype=dtype, shape=out, made=result)
        return write.local()
    intervals = local.regions[0][dim]
    place, inside = write.places(ids, intervals, size, 0, index_type.with_shape(shape))
    rows = write.call("Gather", table, place, dtype=dtype, shape=out, attrs=view.node.attrs)
    dims = *shape, *(1 for _ in local.shapes[0][dim + 1 :])
    mask = write.call("Reshape", inside, write.numbers(*dims), dtype="bool", shape=dims)
    write.call("Where", mask, rows, zero, dtype=dtype, shape=out, made=result)
    return write.local()


def _gather_nd(view: OpView) -> Rule:
    """``b v0 v1 d, b i k -> b i d`` where k = 2 numbers index dims v0 and v1."""
    batch = names("b", view.int_attr("batch_dims", 0))
    indexed = names("v", view.shape(1)[-1])
    inner = names("d", view.rank() - len(indexed) - len(batch))
    index = [*batch, *names("i", view.rank(1) - 1 - len(batch))]
    return view.rule(
        [[*batch, *indexed, *inner], [*index, "k"]], [[*index, *inner]], whole={*indexed, "k"}
    )


def _scatter_nd(view: OpView) -> Rule:
    """``v0 v1 d, i k, i d -> v0 v1 d``: each device writes the updates of its part, given all."""
    indexed = names("v", view.shape(1)[-1])
    inner = names("d", view.rank() - len(indexed))
    index = names("i", view.rank(1) - 1)
    data, whole = [*indexed, *inner], {*index, "k"}
    return view.rule([data, [*index, "k"], [*index, *inner]], [data], whole=whole)


def _local_scatter_nd(view: OpView, local: LocalView) -> LocalOp:
    """Each cut dim has one more position, to which updates of other devices' parts are written."""
    whole, part, index = view.shape(), local.shapes[0], local.shapes[1]
    cut = [dim for dim in range(index[-1]) if part[dim] != whole[dim]]
    if not cut:
        return LocalOp((view.node,))
    write, column = _Writer(view), (*index[:-1], 1)
    columns = []
    for dim in range(index[-1]):
        number, of_column = write.numbers(dim), TensorType.of("int64", column)
        one = write.call(
            "Gather", view.node.inputs[1], number, dtype="int64", shape=column, attrs={"axis": -1}
        )
        if dim in cut:
            one, _ = write.places(one, local.regions[0][dim], whole[dim], part[dim], of_column)
        columns.append(one)
    places = write.call("Concat", *columns, dtype="int64", shape=index, attrs={"axis": -1})
    return _written(write, local, cut, places)


def _written(write: _Writer, local: LocalView, cut: Sequence[int], places: str) -> LocalOp:
    """The node on its part with one more position in each cut dim, which is left out then."""
    node, dtype, sizes = write.view.node, write.view.out_type.dtype, [*local.shapes[0]]
    data, zero = node.inputs[0], write.constant(np.zeros((), dtype))
    for dim in cut:
        slab = [*sizes[:dim], 1, *sizes[dim + 1 :]]
        spare = write.call("Expand", zero, write.numbers(*slab), dtype=dtype, shape=slab)
        sizes[dim] += 1
        data = write.call("Concat", data, spare, dtype=dtype, shape=sizes, attrs={"axis": dim})
    inputs = data, places, *node.inputs[2:]
    all_of_it = write.call(node.op, *inputs, dtype=dtype, shape=sizes, attrs=node.attrs)
    ends = write.numbers(*(local.shapes[0][dim] for dim in cut))
    bounds = write.numbers(*(0 for _ in cut)), ends, write.numbers(*cut)
    shape, (made,) = local.out_shapes[0], node.outputs
    write.call("Slice", all_of_it, *bounds, dtype=dtype, shape=shape, made=made)
    return write.local()


def _tensor_scatter(view: OpView) -> Rule:
    """``d0 v d2, d0 u d2, d0 -> d0 v d2``: a run of each sequence of a cache is written."""
    dims, dim = names("d", view.rank()), view.dim("axis", -2)
    cache, update = replaced(dims, dim, "v"), replaced(dims, dim, "u")
    whole = {"u"} if view.out_type.dtype in TABLES else {"u", "v"}
    return view.rule([cache, update, dims[:1]], [cache], whole=whole)


def _local_tensor_scatter(view: OpView, local: LocalView) -> LocalOp:
    """A device takes for each of its positions the update that is written there, if any."""
    dim, shape = view.dim("axis", -2), local.shapes[0]
    size, count, batch = view.shape()[dim], local.shapes[1][dim], shape[0]
    if shape[dim] == size:
        return LocalOp((view.node,))
    write, dtype, grid = _Writer(view), view.out_type.dtype, (batch, shape[dim])
    (made,), (cache, update, *first) = view.node.outputs, view.node.inputs
    runs = [np.arange(start, start + length) for start, length in local.regions[0][dim]]
    own = np.concatenate(runs)[None] if runs else np.zeros((1, 0), np.int64)
    since = write.constant(own.astype(np.int64))
    is_circular = view.attr("mode") in (b"circular", "circular")

    if first and first[0]:
        begin, of = first[0], (batch,)
        starts = TensorType.of("int64", of)
        # a lookup refuses a run that begins before the cache or, unless it goes round, ends behind
        if is_circular:
            right = write.from_number(begin, 0, starts)
        else:
            right = write.in_run(begin, 0, size - count + 1, starts)
        bounds = write.number(0), write.number(1)
        place = write.call("Where", right, *bounds, dtype="int64", shape=of)
        zero = write.call("Gather", write.numbers(0), place, dtype="int64", shape=of)
        begin = write.call("Add", begin, zero, dtype="int64", shape=of)
        begin = write.call("Unsqueeze", begin, write.numbers(1), dtype="int64", shape=(batch, 1))
        since = write.call("Sub", since, begin, dtype="int64", shape=grid)
        if is_circular:
            since = write.call("Mod", since, write.number(size), dtype="int64", shape=grid)
    else:
        since = write.call("Expand", since, write.numbers(*grid), dtype="int64", shape=grid)
    inside = write.in_run(since, 0, count, TensorType.of("int64", grid))
    beside = [n if i in (0, dim) else 1 for i, n in enumerate(shape)]
    mask = write.call("Reshape", inside, write.numbers(*beside), dtype="bool", shape=beside)
    rows = update
    if count > 1:
        zero = write.number(0)
        place = write.call("Where", inside, since, zero, dtype="int64", shape=grid)
        place = write.call("Reshape", place, write.numbers(*beside), dtype="int64", shape=beside)
        place = write.call("Expand", place, write.numbers(*shape), dtype="int64", shape=shape)
        rows = write.call(
            "GatherElements", update, place, dtype=dtype, shape=shape, attrs={"axis": dim}
        )
    write.call("Where", mask, rows, cache, dtype=dtype, shape=shape, made=made)
    return write.local()


def _one_hot(view: OpView) -> Rule:
    """``i0 i1 -> i0 hot i1``: the new dim is whole, as each device needs its values."""
    index = names("i", view.rank())
    dim = view.dim("axis", -1, len(index) + 1)
    return view.rule([index], [[*index[:dim], "hot", *index[dim:]]], whole={"hot"})


def _compress(view: OpView) -> Rule:
    """``d0 x -> d0 y``: the dim that is thinned is whole; without an axis all are."""
    if view.attr("axis") is None:
        return view.rule("d..", "y", whole="d.. y")
    dims, dim = names("d", view.rank()), view.dim("axis", 0)
    return view.rule([replaced(dims, dim, "x")], [replaced(dims, dim, "y")], whole={"x", "y"})


def _scatter_elements(view: OpView) -> Rule:
    return scatter_elements(view, view.dim("axis", 0), cuts_written=view.opset >= PART_WRITTEN)


def _local_scatter_elements(view: OpView, local: LocalView) -> LocalOp:
    """Scatter into part of a dim: as `_local_scatter_nd`."""
    dim, index = view.dim("axis", 0), view.type(1)
    size, part = view.shape()[dim], local.shapes[0][dim]
    if part == size:
        return LocalOp((view.node,))
    assert index is not None
    write, ids = _Writer(view), index.with_shape(local.shapes[1])
    places, _ = write.places(view.node.inputs[1], local.regions[0][dim], size, part, ids)
    return _written(write, local, [dim], places)


ROWS: Mapping[str, OpRow] = {
    "Compress": OpRow(_compress),
    "Gather": OpRow(_gather, _local_gather, moved=moved_rows, where=True),
    "GatherElements": OpRow(
        lambda view: gather_elements(view, view.dim("axis", 0)), moved=moved_rows
    ),
    "GatherND": OpRow(_gather_nd, moved=moved_rows),
    "OneHot": OpRow(_one_hot),
    "Scatter": OpRow(_scatter_elements),
    "ScatterElements": OpRow(_scatter_elements, _local_scatter_elements, where=True),
    "ScatterND": OpRow(_scatter_nd, _local_scatter_nd, where=True),
    "TensorScatter": OpRow(_tensor_scatter, _local_tensor_scatter, where=True),
}
