"""Cuts whose parts overlap: rows that neighbours both compute, so that they need not exchange them.

A chain of sliding windows needs a halo before each. If the layer before the last window computes
the halo too, that exchange is gone, and the one before it is wider: halos are fused. The *depth* of
a cut is the number of windows whose halos its parts hold. Each node is offered one such cut for
each depth, up to a bound, so the search decides where a chain of fused halos begins and ends. See
ADR 25.

Values are computed twice, never added up twice: a loop that is reduced has no such cut, so
gradients of weights and statistics take each row once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, LayoutError
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.rule import Rule

#: Elements that may be computed again, for each element of the dim.
MOST_REPEATED = 1.0

Axes = tuple[str, ...]
ClassCut = Mapping[str, DimLayout]  #: Layout of every factor of one link class.
_Demands = dict[str, dict[tuple[int, Axes], dict[int, DimLayout]]]  # of a value's dims, by depth


def with_overlaps(
    graph: Graph,
    rules: Mapping[str, Rule | str],
    mesh: DeviceMesh,
    cuts: Mapping[str, Mapping[Axes, Sequence[ClassCut]]],
    most: int,
) -> Mapping[str, Mapping[Axes, Sequence[ClassCut]]]:
    """Cuts of each node, and those in parts that overlap, which its readers' windows give.

    Args:
        rules: Rule of each node, or the reason why it has none.
        most: Greatest depth.
    """
    demands: _Demands = {}
    by_node: dict[str, Mapping[Axes, Sequence[ClassCut]]] = {}
    for node in reversed(graph.nodes):
        rule, plain = rules[node.name], cuts.get(node.name, {})
        if not isinstance(rule, Rule):
            continue
        row = row_of(node)
        deeper = [] if row is not None and row.stored else [*_taken(node, rule, mesh, demands)]
        offered = {axes: list(of_axes) for axes, of_axes in plain.items()}
        for axes, _, cut in deeper:
            if cut not in offered.setdefault(axes, []):
                offered[axes].append(cut)
        by_node[node.name] = offered
        known = [(0, cut) for of_axes in plain.values() for cut in of_axes]
        for depth, cut in (*known, *((depth, cut) for _, depth, cut in deeper)):
            _demand(node, rule, mesh, cut, depth, most, demands)
    return by_node


def _taken(
    node: Node, rule: Rule, mesh: DeviceMesh, demands: _Demands
) -> Iterator[tuple[Axes, int, ClassCut]]:
    """Axes, depth and cut for each demand on a result that the node's rule can meet."""
    for value, dims in zip(node.outputs, rule.results, strict=True):
        if dims is None:
            continue
        for (dim, axes), by_depth in demands.get(value, {}).items():
            for depth, layout in by_depth.items():
                cut = rule.factor_layouts(dims[dim], layout, mesh)
                if cut is not None and any(set(link) == set(cut) for link in rule.links):
                    yield axes, depth, cut


def _demand(
    node: Node,
    rule: Rule,
    mesh: DeviceMesh,
    cut: ClassCut,
    depth: int,
    most: int,
    demands: _Demands,
) -> None:
    """Note what a cut of a node reads of each operand in parts that overlap."""
    try:
        ins, _ = rule.shardings(cut, mesh)
    except LayoutError:
        return
    for operand, (value, at) in enumerate(zip(node.inputs, ins, strict=True)):
        dims = rule.operands[operand]
        if not value or dims is None:
            continue
        for dim, (expr, layout) in enumerate(zip(dims, at.dims, strict=True)):
            deep = depth + (rule.window(operand, expr) is not None)
            if not _overlaps(layout) or deep > most:
                continue
            known = demands.setdefault(value, {}).setdefault((dim, layout.axes), {})
            if deep not in known or all(
                a <= b and a + count >= b + size
                for (a, count), (b, size) in zip(layout.windows, known[deep].windows, strict=True)
            ):  # each part has the other layout's
                known[deep] = layout


def _overlaps(layout: DimLayout) -> bool:
    """Test whether parts overlap, by no more than the bound, and none is empty."""
    sizes = layout.sizes()
    repeated = sum(sizes) - layout.size
    has_more = bool(layout.windows) and 0 < repeated <= MOST_REPEATED * layout.size
    return has_more and min(sizes) > 0 and layout.is_complete
