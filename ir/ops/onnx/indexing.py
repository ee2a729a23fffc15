"""Gather, Scatter and their relatives, OneHot, Compress: indexed dims are whole, others cut.

The rows of a table that Gather looks up are cut too: each device gives those that it has, and zeros
for the others. So are the dims that ScatterElements, ScatterND and TensorScatter write to, as the
positions of a cache: each device writes what lies in its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from partitioner.ir.graph import Attr, Constant, Node
from partitioner.ir.layout import Interval
from partitioner.ir.ops.local import same_node
from partitioner.ir.ops.rules.indexing import gather_elements, moved_rows, scatter_elements
from partitioner.ir.ops.signature import names, replaced
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
    """``d0 d1 d2, i0 i1 -> d0 i0 i1 d2``: rows of a table of floats are a sum of one and zeros."""
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
    local: LocalView
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)

    def add(
        self,
        op: str,
        *reads: str,
        shape: Sequence[int] | None = None,
        made: str = "",
        attrs: Mapping[str, Attr] | None = None,
    ) -> str:
        """Add a node; returns its result, `made` or a temporary (by default of broadcast shape)."""
        name = f"{self.view.node.name}.{len(self.nodes)}.part"
        self.nodes.append(Node(name, op, reads, (made or name,), attrs or {}))
        if not made:
            dtype = self.type(reads[-1] if op == "Where" else reads[0]).dtype
            if shape is None:
                shape = np.broadcast_shapes(*(self.type(value).shape for value in reads))
            self.types[name] = TensorType.of("bool" if op == "Less" else dtype, shape)
        return made or name

    def type(self, value: str) -> TensorType:
        """The type of a constant, a temporary, or an operand of the device."""
        if value in self.constants:
            return Constant.of(self.constants[value]).type
        if value in self.types:
            return self.types[value]
        index = max(i for i, read in enumerate(self.view.node.inputs) if read == value)
        operand = self.view.types[index]
        assert operand is not None
        return operand.with_shape(self.local.shapes[index])

    def constant(self, array: np.ndarray) -> str:
        """A new constant, or that of the same contents."""
        for name, known in self.constants.items():
            if known.dtype == array.dtype and np.array_equal(known, array):
                return name
        name = f"{self.view.node.name}.{len(self.constants)}.constant"
        self.constants[name] = array
        return name

    def number(self, number: int, like: str = "") -> str:
        return self.constant(np.array(number, self.type(like).dtype if like else np.int64))

    def numbers(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        return self.add("Reshape", x, self.numbers(*shape), shape=shape)

    def from_number(self, x: str, start: int) -> str:
        """Compare integers with `start`: True from there on."""
        return self.add("Not", self.add("Less", x, self.number(start, x)))

    def in_run(self, x: str, start: int, end: int) -> str:
        """Compare integers with a run: True from `start` to before `end`."""
        low = self.from_number(x, start)
        return self.add("And", low, self.add("Less", x, self.number(end, x)))

    def places(
        self, ids: str, intervals: Sequence[Interval], size: int, outside: int
    ) -> tuple[str, str]:
        """Where ids lie in a part of a dim (else `outside`; `size` if in none), and whether."""
        counted = self.add("Add", ids, self.number(size, ids))  # of one that counts from the end
        wanted = self.add("Where", self.add("Less", ids, self.number(0, ids)), counted, ids)
        place, inside, before = self.number(outside, ids), "", 0
        for start, length in intervals:
            here = self.in_run(wanted, start, start + length)
            moved = self.add("Sub", wanted, self.number(start - before, ids))
            place = self.add("Where", here, moved, place)
            inside = self.add("Or", inside, here) if inside else here
            before += length
        known = self.in_run(wanted, 0, size)
        return self.add("Where", known, place, self.number(size, ids)), inside

    def done(self) -> LocalOp:
        return LocalOp(tuple(self.nodes), self.constants, self.types)


def _local_gather(view: OpView, local: LocalView) -> LocalOp:
    """A device looks up what it has, and gives zeros for the rest."""
    dim, out = view.dim("axis", 0), local.out_shapes[0]
    size, part = view.shape()[dim], local.shapes[0][dim]
    (table, ids), (result,), write = view.node.inputs, view.node.outputs, _Writer(view, local)
    if part == size:
        return same_node(view)
    zero = write.constant(np.zeros((), view.out_type.dtype))
    if not part:
        write.add("Expand", zero, write.numbers(*out), made=result)
        return write.done()
    place, inside = write.places(ids, local.regions[0][dim], size, 0)
    rows = write.add("Gather", table, place, shape=out, attrs=view.node.attrs)
    mask = write.reshaped(inside, [*local.shapes[1], *(1 for _ in local.shapes[0][dim + 1 :])])
    write.add("Where", mask, rows, zero, made=result)
    return write.done()


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
        return same_node(view)
    write, columns, last = _Writer(view, local), [], {"axis": -1}
    for dim in range(index[-1]):
        ids, column = view.node.inputs[1], (*index[:-1], 1)
        one = write.add("Gather", ids, write.numbers(dim), shape=column, attrs=last)
        if dim in cut:
            one, _ = write.places(one, local.regions[0][dim], whole[dim], part[dim])
        columns.append(one)
    return _written(write, cut, write.add("Concat", *columns, shape=index, attrs=last))


def _written(write: _Writer, cut: Sequence[int], places: str) -> LocalOp:
    """The node on its part with one more position in each cut dim, which is left out then."""
    node, part = write.view.node, write.local.shapes[0]
    data, sizes = node.inputs[0], [*part]
    zero = write.constant(np.zeros((), write.view.out_type.dtype))
    for dim in cut:
        slab = [*sizes[:dim], 1, *sizes[dim + 1 :]]
        spare = write.add("Expand", zero, write.numbers(*slab), shape=slab)
        sizes[dim] += 1
        data = write.add("Concat", data, spare, shape=sizes, attrs={"axis": dim})
    whole = write.add(node.op, data, places, *node.inputs[2:], shape=sizes, attrs=node.attrs)
    ends = write.numbers(*(part[dim] for dim in cut))
    bounds = write.numbers(*(0 for _ in cut)), ends, write.numbers(*cut)
    write.add("Slice", whole, *bounds, made=node.outputs[0])
    return write.done()


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
        return same_node(view)
    write, cache, (rows, *first) = _Writer(view, local), view.node.inputs[0], view.node.inputs[1:]
    runs = [np.arange(start, start + length) for start, length in local.regions[0][dim]]
    own = np.concatenate(runs)[None] if runs else np.zeros((1, 0), np.int64)
    since = write.constant(own.astype(np.int64))
    if first and first[0]:
        # a lookup refuses a run that begins before the cache or, unless it goes round, ends behind
        begin, is_circular = first[0], view.attr("mode") in (b"circular", "circular")
        last = size - count + 1
        right = write.from_number(begin, 0) if is_circular else write.in_run(begin, 0, last)
        place = write.add("Where", right, write.number(0), write.number(1))
        zero = write.add("Gather", write.numbers(0), place, shape=(batch,))
        begin = write.add("Add", begin, zero)
        begin = write.add("Unsqueeze", begin, write.numbers(1), shape=(batch, 1))
        since = write.add("Sub", since, begin)
        if is_circular:
            since = write.add("Mod", since, write.number(size))
    else:
        grid = batch, shape[dim]
        since = write.add("Expand", since, write.numbers(*grid), shape=grid)
    inside = write.in_run(since, 0, count)
    beside = [n if i in (0, dim) else 1 for i, n in enumerate(shape)]
    mask = write.reshaped(inside, beside)
    if count > 1:
        place = write.reshaped(write.add("Where", inside, since, write.number(0)), beside)
        place = write.add("Expand", place, write.numbers(*shape), shape=shape)
        rows = write.add("GatherElements", rows, place, shape=shape, attrs={"axis": dim})
    write.add("Where", mask, rows, cache, made=view.node.outputs[0])
    return write.done()


def _one_hot(view: OpView) -> Rule:
    """``i0 i1 -> i0 hot i1``: the new dim is whole, as each device needs its values."""
    index, dim = names("i", view.rank()), view.dim("axis", -1, view.rank() + 1)
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
    dim = view.dim("axis", 0)
    size, part = view.shape()[dim], local.shapes[0][dim]
    if part == size:
        return same_node(view)
    write = _Writer(view, local)
    places, _ = write.places(view.node.inputs[1], local.regions[0][dim], size, part)
    return _written(write, [dim], places)


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
