"""A node of a graph as one device runs it, on its parts of the operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from partitioner.ir.errors import naming
from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import row_of
from partitioner.ir.ops.table import LocalOp, LocalView, OpView
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import ProgramError


def local_op(graph: Graph, placed: PlacedNode, point: Mapping[str, int]) -> LocalOp:
    """Give what the device at a mesh coordinate runs for a node; ProgramError if its row fails."""
    row = row_of(placed.node)
    if placed.rule is None or row.localize is None or not placed.layouts:
        return LocalOp((placed.node,))
    shapes, out_shapes = (
        tuple(() if at is None else at.sharding.local_shape(at.mesh, point) for at in side)
        for side in (placed.ins, placed.outs)
    )
    where = row.where or placed.rule.slides(placed.layouts)
    regions, out_regions = (
        tuple(() if at is None else at.region(point) for at in side) if where else ()
        for side in (placed.ins, placed.outs)
    )
    sizes = placed.rule.local_sizes(placed.layouts, placed.mesh, point)
    group = placed.group(point)
    held = tuple(
        tuple(() if at is None else at.region(placed.mesh.coord(device)) for at in placed.ins)
        for device in group
    )
    view = LocalView(sizes, shapes, out_shapes, regions, out_regions, group, held)
    node = placed.node
    what = f"model {graph.name!r}: node {node.name!r} ({node.op}) on one device"
    with naming(what, ProgramError):
        return row.localize(OpView(node, graph), view)


def localized(
    graph: Graph,
    placed: PlacedNode,
    point: Mapping[str, int],
    operands: Sequence[str],
    results: Mapping[str, str],
    named: Callable[[str], str],
) -> LocalOp:
    """`local_op` under other names.

    `operands` are names of the node's inputs and captures, which may differ where one value is read
    twice; `results` names of its results, by value; `named` gives names to constants and
    temporaries.
    """
    local, node = local_op(graph, placed, point), placed.node
    reads, new = (*node.inputs, *node.captures), (*local.constants, *local.types)
    clashes = {*reads, *node.outputs}.intersection(new)
    if clashes:
        raise ProgramError(f"{node.name!r}: the model's {min(clashes)!r} bears a reserved name")
    names = {name: named(name) for name in new}
    made = {value: results[value] for value in node.writes} | names
    return LocalOp(
        tuple(_renamed(step, reads, operands, made) for step in local.nodes),
        {names[name]: array for name, array in local.constants.items()},
        {names[name]: type_ for name, type_ in local.types.items()},
    )


def _renamed(
    node: Node, operands: Sequence[str], slots: Sequence[str], results: Mapping[str, str]
) -> Node:
    by_value = dict(zip(reversed(operands), reversed(slots), strict=True))

    def name(slot: int, value: str) -> str:
        if value in results:
            return results[value]
        if slot < len(operands) and operands[slot] == value:
            return slots[slot]
        return by_value.get(value, value)

    return replace(
        node,
        inputs=tuple(name(slot, value) for slot, value in enumerate(node.inputs)),
        outputs=tuple(results.get(value, value) for value in node.outputs),
        captures=tuple(by_value[value] for value in node.captures),
    )
