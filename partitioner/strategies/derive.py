"""Strategies of every node on a mesh, derived from the factor rules alone.

A strategy cuts link classes of factors over mesh axes. Each class has cuts of its own: balanced,
and in proportion to the devices' speed (`strategies.cuts`). Layouts with segments (a Concat
of shards, heads inside a fused projection) come from the neighbours: the layout that a strategy
gives to a value's dim is offered to every other node that touches the value, through its rule,
until nothing new appears. Pointwise ops and data movement make no cuts of their own as long as a
neighbour offers any: they follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, LayoutError, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.rule import PENDING, DimExpr, Rule
from partitioner.strategies.cuts import ClassCut, ClassCuts

#: Cuts of one class over one set of axes that are kept, by the mesh's number of axes: the first
#: one and the finest ones. Strategies multiply over axes, so meshes of several keep fewer. Cuts by
#: speed have as many places of their own: they and the balanced ones do not compete.
MAX_CUTS_A_CLASS = {1: 4}
MAX_CUTS_A_CLASS_OTHERWISE = 2
#: Sweeps over the graph, forward and back in turn, to spread layouts.
MAX_SWEEPS = 6

#: Stands for the index of a dim: a value may be a pending sum.
PENDING_DIM = -1

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Rules:
    """Every node's rule, or why it has none; found once a graph."""

    by_node: Mapping[str, Rule | str]

    @classmethod
    def of(cls, graph: Graph) -> Rules:
        """Look every node up in the op table; equal rules are one object."""
        return cls(rules_of(graph))

    def rule(self, node: Node) -> Rule | None:
        """The node's rule, None if it is opaque."""
        found = self.by_node[node.name]
        return found if isinstance(found, Rule) else None

    def why_opaque(self, node: Node) -> str:
        """Why the node has no rule, "" if it has one."""
        found = self.by_node[node.name]
        return found if isinstance(found, str) else ""

    @property
    def opaque(self) -> Mapping[str, str]:
        """Why, by name of each node without a rule."""
        return {name: why for name, why in self.by_node.items() if isinstance(why, str)}


def axis_sets(mesh: DeviceMesh) -> tuple[Axes, ...]:
    """Non-empty sets of mesh axes, in mesh order, small sets first."""
    names = mesh.names
    return tuple(s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n))


def strategies(
    graph: Graph, rules: Rules, mesh: DeviceMesh, speeds: Mapping[int, float] | None = None
) -> Mapping[str, tuple[PlacedNode, ...]]:
    """Distinct strategies of every node on a mesh, the uncut one first; none for opaque nodes.

    Args:
        graph: The model.
        rules: Its rules.
        mesh: The device group.
        speeds: Of every device, in any one unit (`strategies.speeds`); None if they are equal.
    """
    choice = ClassCuts(mesh, tuple(speeds[device] for device in mesh.devices) if speeds else None)
    cuts = _Spread(graph, rules, mesh, choice).run() if mesh.axes else {}
    found = {}
    for node in graph.nodes:
        rule = rules.rule(node)
        if rule is not None:
            found[node.name] = tuple(_placed(graph, node, rule, mesh, cuts.get(node.name, {})))
        elif not mesh.axes:
            found[node.name] = (place(graph, node, mesh, {}, None),)
        else:
            found[node.name] = ()
    return found


def _placed(
    graph: Graph, node: Node, rule: Rule, mesh: DeviceMesh, cuts: Mapping[Axes, list[ClassCut]]
) -> Iterator[PlacedNode]:
    seen = set()
    for layouts in _assignments(mesh, cuts):
        try:
            placed = place(graph, node, mesh, layouts, rule)
        except LayoutError:
            continue
        signature = (placed.ins, placed.outs)
        if signature not in seen:
            seen.add(signature)
            yield placed


def _assignments(
    mesh: DeviceMesh, cuts: Mapping[Axes, list[ClassCut]]
) -> Iterator[dict[str, DimLayout]]:
    """Every way to give disjoint axis sets to distinct classes."""
    yield {}
    for count in range(1, len(mesh.names) + 1):
        for sets in itertools.combinations(sorted(cuts), count):
            used = [axis for axes in sets for axis in axes]
            if len(used) != len(set(used)):
                continue
            for chosen in itertools.product(*(cuts[axes] for axes in sets)):
                names = [name for cut in chosen for name in cut]
                if len(names) == len(set(names)):
                    yield {name: layout for cut in chosen for name, layout in cut.items()}


@dataclass
class _Spread:
    """Cuts by node and axis set, grown from each class's own cuts to the fixpoint."""

    graph: Graph
    rules: Rules
    mesh: DeviceMesh
    choice: ClassCuts

    def run(self) -> Mapping[str, Mapping[Axes, list[ClassCut]]]:
        self.cuts: dict[str, dict[Axes, list[ClassCut]]] = {}
        self.dims: dict[tuple[str, int, Axes], list[DimLayout]] = {}
        nodes = [(node, rule) for node in self.graph.nodes if (rule := self.rules.rule(node))]
        self.seen: dict[tuple[str, str, int, Axes], int] = {}
        for node, rule in nodes:
            self.cuts[node.name] = {}
            if not _follows(node, rule):
                self._originate(node, rule)
        self._sweep(nodes)
        left = [(node, rule) for node, rule in nodes if not any(self.cuts[node.name].values())]
        for node, rule in left:
            self._originate(node, rule)
        if left:
            self._sweep(nodes)
        return self.cuts

    def _originate(self, node: Node, rule: Rule) -> None:
        for axes in axis_sets(self.mesh):
            for link in rule.links:
                if link == (PENDING,):
                    continue
                for cut in self.choice.own(rule, link, axes):
                    self._offer(node, rule, axes, cut)

    def _sweep(self, nodes: Sequence[tuple[Node, Rule]]) -> None:
        for sweep in range(MAX_SWEEPS):
            order = reversed(nodes) if sweep % 2 else nodes
            news = [self._visit(node, rule) for node, rule in order]
            if not any(news):
                break

    def _visit(self, node: Node, rule: Rule) -> bool:
        """Offer the neighbours' layouts to a node; whether anything was new."""
        news = self._pass_sums(node, rule)
        for value, index, expr in _tensor_dims(node, rule):
            for axes in axis_sets(self.mesh):
                known = self.dims.get((value, index, axes), [])
                start = self.seen.get((node.name, value, index, axes), 0)
                self.seen[(node.name, value, index, axes)] = len(known)
                for layout in tuple(known[start:]):
                    found = rule.factor_layouts(expr, layout, self.mesh)
                    if found:
                        cut = self.choice.complete(rule, axes, found)
                        news |= self._offer(node, rule, axes, cut)
        return news

    def _pass_sums(self, node: Node, rule: Rule) -> bool:
        """Offer a linear op the axes over which its operands may be pending sums."""
        news = False
        for operand in rule.linear:
            for axes in axis_sets(self.mesh):
                if (node.inputs[operand], PENDING_DIM, axes) in self.dims:
                    size = rule.factors[PENDING].size
                    cut = {PENDING: DimLayout.even(size, axes, self.mesh)}
                    news |= self._offer(node, rule, axes, cut)
        return news

    def _offer(self, node: Node, rule: Rule, axes: Axes, cut: ClassCut) -> bool:
        held = self.cuts[node.name].setdefault(axes, [])
        if cut in held or not _fills(cut) or not _can_keep(node, cut):
            return False
        if not any(set(link) == set(cut) for link in rule.links):
            return False
        rivals = [c for c in held if set(c) == set(cut) and self._compete(c, cut)]
        most = MAX_CUTS_A_CLASS.get(len(self.mesh.axes), MAX_CUTS_A_CLASS_OTHERWISE)
        if len(rivals) >= most:
            coarsest = min(rivals[1:], key=_fineness)
            if _fineness(coarsest) >= _fineness(cut):
                return False
            held.remove(coarsest)
        try:
            ins, outs = rule.shardings(cut, self.mesh)
        except LayoutError:
            return False
        held.append(cut)
        for value, sharding in zip((*node.inputs, *node.outputs), (*ins, *outs), strict=True):
            if value:
                self._spread(value, sharding, axes)
        return True

    def _spread(self, value: str, sharding: Sharding, axes: Axes) -> None:
        """Make known how a strategy leaves or wants a value."""
        for index, layout in enumerate(sharding.dims):
            if layout.axes == axes:
                known = self.dims.setdefault((value, index, axes), [])
                if layout not in known:
                    known.append(layout)
        if {axis for axis, how in sharding.partial if how == "sum"} == set(axes):
            self.dims.setdefault((value, PENDING_DIM, axes), [])

    def _compete(self, one: ClassCut, other: ClassCut) -> bool:
        return len({self.choice.is_by_speed(cut.values()) for cut in (one, other)}) == 1


def _follows(node: Node, rule: Rule) -> bool:
    """Pointwise ops and data movement take the cuts of their neighbours."""
    row = row_of(node)
    if row is not None and row.stored:
        return False
    return rule.flops_per_point == 0 or rule.is_pointwise


def _tensor_dims(node: Node, rule: Rule) -> Iterable[tuple[str, int, DimExpr]]:
    for value, dims in zip(
        (*node.inputs, *node.outputs), (*rule.operands, *rule.results), strict=True
    ):
        if value and dims is not None:
            for index, expr in enumerate(dims):
                yield value, index, expr


def _fills(cut: ClassCut) -> bool:
    """Every coordinate owns something of every factor: no device runs an empty part."""
    return all(min(layout.sizes()) > 0 for layout in cut.values())


def _can_keep(node: Node, cut: ClassCut) -> bool:
    """Stored values are cut in ways that a DTensor can express; all else in any."""
    row = row_of(node)
    stored = row is not None and row.stored
    return not stored or all(layout.is_chunked for layout in cut.values())


def _fineness(cut: ClassCut) -> int:
    return sum(len(layout.segments) for layout in cut.values())
