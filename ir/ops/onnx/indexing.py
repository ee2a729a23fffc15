"""Gather, Scatter and their relatives, OneHot, Compress: indexed dims are whole, others cut.

The rows of a table that Gather looks up are cut too: each device gives those that it has, and zeros
for the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from partitioner.ir.graph import Node
from partitioner.ir.ops.rules.dims import names, replaced
from partitioner.ir.ops.rules.indexing import gather_elements, moved_rows, scatter_elements
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

#: First opset that has Where, and Less of whole numbers.
PART_OF_ROWS = 9
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


def _local_gather(view: OpView, local: LocalView) -> LocalOp:
    """A device looks up what it has, and gives zeros for the rest.

    An index outside the whole dim becomes one outside the part, which the operator refuses.
    """
    dim, size = view.dim("axis", 0), view.shape()[view.dim("axis", 0)]
    (table, ids), (result,), part = view.node.inputs, view.node.outputs, local.shapes[0][dim]
    if part == size:
        return LocalOp((view.node,))
    index_type, shape = view.types[1], local.shapes[1]
    assert index_type is not None
    zero, dims = (f"{view.node.name}.{what}" for what in ("zero", "dims"))
    nothing = np.zeros((), view.out_type.dtype)
    if not part:
        sizes = np.array(local.out_shapes[0], np.int64)
        expand = Node(view.node.name, "Expand", (zero, dims), (result,))
        return LocalOp((expand,), {zero: nothing, dims: sizes})
    nodes, types = list[Node](), dict[str, TensorType]()
    constants: dict[str, np.ndarray] = {}

    def call(op: str, *inputs: str, dtype: str = index_type.dtype) -> str:
        name = f"{view.node.name}.{len(nodes)}.part"
        nodes.append(Node(name, op, inputs, (name,)))
        types[name] = TensorType.of(dtype, shape)
        return name

    def number(value: int) -> str:
        name = f"{view.node.name}.{value}.number"
        constants[name] = np.array(value, index_type.dtype)
        return name

    counted = call("Add", ids, number(size))  # of an index that counts from the end
    wanted = call("Where", call("Less", ids, number(0), dtype="bool"), counted, ids)
    place, inside, before = number(0), "", 0
    for start, length in local.regions[0][dim]:
        low = call("Not", call("Less", wanted, number(start), dtype="bool"), dtype="bool")
        high = call("Less", wanted, number(start + length), dtype="bool")
        here = call("And", low, high, dtype="bool")
        place = call("Where", here, call("Sub", wanted, number(start - before)), place)
        inside = call("Or", inside, here, dtype="bool") if inside else here
        before += length
    right = call("Not", call("Less", wanted, number(0), dtype="bool"), dtype="bool")
    right = call("And", right, call("Less", wanted, number(size), dtype="bool"), dtype="bool")
    place = call("Where", right, place, number(size))
    rows, mask = (f"{view.node.name}.{what}" for what in ("rows", "inside"))
    constants[zero] = nothing
    constants[dims] = np.array([*shape, *(1 for _ in local.shapes[0][dim + 1 :])], np.int64)
    types[rows] = view.out_type.with_shape(local.out_shapes[0])
    types[mask] = TensorType.of("bool", tuple(int(n) for n in constants[dims]))
    nodes += [
        Node(rows, "Gather", (table, place), (rows,), view.node.attrs),
        Node(mask, "Reshape", (inside, dims), (mask,)),
        Node(view.node.name, "Where", (mask, rows, zero), (result,)),
    ]
    return LocalOp(tuple(nodes), constants, types)


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
    """``v0 v1 d, i k, i d -> v0 v1 d``: each device writes all updates of its part of d."""
    indexed = names("v", view.shape(1)[-1])
    inner = names("d", view.rank() - len(indexed))
    index = names("i", view.rank(1) - 1)
    data, whole = [*indexed, *inner], {*indexed, *index, "k"}
    return view.rule([data, [*index, "k"], [*index, *inner]], [data], whole=whole)


def _tensor_scatter(view: OpView) -> Rule:
    """``d0 v d2, d0 u d2, d0 -> d0 v d2``: a run of each sequence of a cache is written."""
    dims, dim = names("d", view.rank()), view.dim("axis", -2)
    cache, update = replaced(dims, dim, "v"), replaced(dims, dim, "u")
    return view.rule([cache, update, dims[:1]], [cache], whole={"u", "v"})


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


def _gather_elements(view: OpView) -> Rule:
    return gather_elements(view, view.dim("axis", 0))


def _scatter_elements(view: OpView) -> Rule:
    return scatter_elements(view, view.dim("axis", 0))


ROWS: Mapping[str, OpRow] = {
    "Compress": OpRow(_compress),
    "Gather": OpRow(_gather, _local_gather, moved=moved_rows, where=True),
    "GatherElements": OpRow(_gather_elements, moved=moved_rows),
    "GatherND": OpRow(_gather_nd, moved=moved_rows),
    "OneHot": OpRow(_one_hot),
    "Scatter": OpRow(_scatter_elements),
    "ScatterElements": OpRow(_scatter_elements),
    "ScatterND": OpRow(_scatter_nd),
    "TensorScatter": OpRow(_tensor_scatter),
}
