"""Strategies of every node on a mesh, derived from the factor rules alone.

A strategy cuts link classes of factors over mesh axes. Each class has cuts of its own: balanced,
and in proportion to shares of the devices (`shares.py`). Layouts with segments (a Concat of
shards, heads inside a fused projection) come from the neighbours: the layout that a strategy gives
to a value's dim is offered to every other node that touches the value, through its rule, until
nothing new appears. Pointwise ops and data movement have no cuts of their own if a neighbour offers
any. Last come cuts in parts that overlap (`overlaps`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import (
    DimLayout,
    LayoutError,
    Sharding,
    folded_cut,
    loaded_cut,
    share_cut,
)
from partitioner.ir.loops.factors import PENDING, DimExpr, FactorKind
from partitioner.ir.loops.windows import Parts, Window
from partitioner.ir.mesh import COPIES, DeviceMesh
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.rule import Rule
from partitioner.strategies.overlaps import with_overlaps

#: Cuts of one class over one set of axes that are kept, by the mesh's number of axes: the first
#: one and the finest ones. Strategies multiply over axes, so meshes of several keep fewer. Cuts in
#: proportion to shares have as many places of their own: they and the balanced ones do not compete.
MAX_CUTS_A_CLASS = {1: 4}
MAX_CUTS_A_CLASS_OTHERWISE = 2
#: Sweeps over the graph, forward and back in turn, to spread layouts.
MAX_SWEEPS = 6

#: Parts of a factor that are cut from either end (`folded_cut`) at most; each is a segment.
MOST_FOLDED = 32

#: In place of the index of a dim: the value may be a pending sum.
PENDING_DIM = -1

Axes = tuple[str, ...]
ClassCut = Mapping[str, DimLayout]  #: Layout of every factor of one link class.
_Cuts = Mapping[str, Mapping[Axes, Sequence[ClassCut]]]  # of each node
#: The cuts of graphs by mesh and the shares of its devices, and the strategies by these and the
#: windows that are fused.
_CUTS: WeakKeyDictionary[Graph, dict[ClassCuts, _Cuts]] = WeakKeyDictionary()
_KNOWN: WeakKeyDictionary[
    Graph, dict[tuple[ClassCuts, int], Mapping[str, tuple[PlacedNode, ...]]]
] = WeakKeyDictionary()


@dataclass(frozen=True)
class Rules:
    """The rule of every node of a graph, or the reason why it has none."""

    by_node: Mapping[str, Rule | str]

    @classmethod
    def of(cls, graph: Graph) -> Rules:
        """Rules from the op table; equal rules are one object."""
        return cls(rules_of(graph))

    def rule(self, node: Node) -> Rule | None:
        """The node's rule, None if it is opaque."""
        rule = self.by_node[node.name]
        return rule if isinstance(rule, Rule) else None

    def why_opaque(self, node: Node) -> str:
        """The reason why the node has no rule, "" if it has one."""
        rule = self.by_node[node.name]
        return rule if isinstance(rule, str) else ""

    @property
    def opaque(self) -> Mapping[str, str]:
        """The reason for each node without a rule, by name."""
        return {name: why for name, why in self.by_node.items() if isinstance(why, str)}


def axis_sets(mesh: DeviceMesh) -> tuple[Axes, ...]:
    """Non-empty sets of mesh axes to cut over, in mesh order, small sets first."""
    names = [name for name in mesh.names if name != COPIES]
    return tuple(s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n))


def strategies(
    graph: Graph,
    rules: Rules,
    mesh: DeviceMesh,
    shares: Sequence[Mapping[int, float]] = (),
    *,
    fused: int = 0,
    check: Callable[[], None] = lambda: None,
) -> Mapping[str, tuple[PlacedNode, ...]]:
    """Distinct strategies of every node on a mesh, the uncut one first; none for opaque nodes.

    They are kept while the graph lives.

    Args:
        shares: Shares of every device, in any one unit, to cut in proportion to beside balanced.
        fused: Most windows whose halos a cut's parts hold, see `overlaps`.
        check: Called at each node; it may raise, where the clock is to end this.
    """
    of_mesh = tuple(tuple(share[device] for device in mesh.devices) for share in shares)
    choice = ClassCuts(mesh, of_mesh)
    known, known_cuts = _KNOWN.setdefault(graph, {}), _CUTS.setdefault(graph, {})
    if (choice, fused) in known:
        return known[choice, fused]
    if choice not in known_cuts:
        found = _Propagation(graph, rules, choice, check).run() if mesh.axes else {}
        known_cuts[choice] = found
    cuts = known_cuts[choice]
    if fused and cuts:
        cuts = with_overlaps(graph, rules.by_node, mesh, cuts, fused)
    by_node: dict[str, tuple[PlacedNode, ...]] = {}
    for node in graph.nodes:
        check()
        rule = rules.rule(node)
        if rule is None:
            by_node[node.name] = () if mesh.axes else (place(graph, node, mesh, {}, None),)
            continue
        own, distinct = cuts.get(node.name, {}), dict[object, PlacedNode]()
        for layouts in itertools.chain(_assignments(mesh, own), _dispatches(rule, mesh, own)):
            with suppress(LayoutError):
                placed = place(graph, node, mesh, layouts, rule)
                distinct.setdefault((placed.ins, placed.outs), placed)
        by_node[node.name] = tuple(distinct.values())
    known[choice, fused] = by_node
    return by_node


def _assignments(
    mesh: DeviceMesh, cuts: Mapping[Axes, Sequence[ClassCut]]
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


def _dispatches(
    rule: Rule, mesh: DeviceMesh, cuts: Mapping[Axes, Sequence[ClassCut]]
) -> Iterator[dict[str, DimLayout]]:
    """The assignments in which devices send each other rows along the axes of the owners."""
    if rule.dispatch is None:
        return
    rows, owners = rule.dispatch.rows, rule.dispatch.owners
    others: dict[Axes, list[ClassCut]] = {
        axes: [cut for cut in some if not {rows, owners} & cut.keys()]
        for axes, some in cuts.items()
    }
    lying = [(axes, c) for axes, some in cuts.items() for c in some if set(c) == {rows}]
    for axes, cut in lying:
        left = {more: some for more, some in others.items() if not set(axes) & set(more)}
        for inner, some in cuts.items():
            for owned in (c for c in some if set(c) == {owners} and set(inner) <= set(axes)):
                yield from ({**cut, **owned, **rest} for rest in _assignments(mesh, left))


@dataclass(frozen=True)
class ClassCuts:
    """Balanced cuts on a mesh, and cuts in proportion to shares of its devices.

    `shares` are in the mesh's order, each in any one unit.
    """

    mesh: DeviceMesh
    shares: tuple[tuple[float, ...], ...]

    def of_class(self, rule: Rule, link: tuple[str, ...], axes: Axes) -> tuple[ClassCut, ...]:
        """The balanced cuts of a class, and those in proportion to shares that differ.

        A factor along which the work rises is also cut so that each part has a chunk from either
        end; one whose elements have loads is also cut into parts of like loads, once of any sizes
        and once of equal ones. By shares, the factors of a class are cut in proportion to each
        other, as far as they have a common divisor of at least one unit a part.
        """
        mesh, sizes = self.mesh, {name: rule.factors[name].size for name in link}
        if rule.dispatch is not None and rule.dispatch.loads and link == (rule.dispatch.owners,):
            return self._by_load(rule.dispatch.owners, rule.dispatch.loads, axes)
        even = {name: self._even(size, axes) for name, size in sizes.items()}
        cuts = [even]
        for share in self.shares:
            if any(_by_share(mesh, size, axes, share, 1) != even[n] for n, size in sizes.items()):
                units = math.gcd(*sizes.values())
                whole = min(units, *sizes.values()) >= self.mesh.size(axes)
                cuts.append(
                    {
                        name: _by_share(mesh, size, axes, share, size // units if whole else 1)
                        for name, size in sizes.items()
                    }
                )
        parts = self.mesh.size(axes)
        rises = link == (rule.rising,) and parts <= MOST_FOLDED
        if len(cuts) == 1 and rises and sizes[rule.rising] >= 2 * parts:
            folded = DimLayout.cut(axes, folded_cut(sizes[rule.rising], parts))
            cuts.append({rule.rising: folded})
        return tuple(cut for index, cut in enumerate(cuts) if cut not in cuts[:index])

    def complete(self, rule: Rule, axes: Axes, layouts: ClassCut) -> ClassCut:
        """The cuts, with cuts for the factors that are linked to theirs.

        In proportion, because the parts of a fused projection are cut between the same heads; else
        balanced or by a share, as the given cut is.
        """
        linked: dict[str, DimLayout] = {}
        for link in rule.links:
            like = next((layouts[name] for name in link if name in layouts), None)
            if like is not None:
                share = self.nearest((like,))
                sizes = {name: rule.factors[name].size for name in link}
                linked |= {
                    name: _scaled(like, size) or _by_share(self.mesh, size, axes, share, 1)
                    for name, size in sizes.items()
                }
        return {**linked, **layouts}

    def nearest(self, layouts: Iterable[DimLayout]) -> tuple[float, ...]:
        """The share that parts are nearest to being in proportion to; () if to none (balanced)."""
        if not self.shares:
            return ()
        layouts = tuple(layouts)

        def distance(share: tuple[float, ...]) -> int:
            cuts = (_by_share(self.mesh, cut.size, cut.axes, share, 1) for cut in layouts)
            return sum(
                sum(abs(x - y) for x, y in zip(layout.sizes(), cut.sizes(), strict=True))
                for layout, cut in zip(layouts, cuts, strict=True)
            )

        return min(((), *self.shares), key=distance)

    def _even(self, size: int, axes: Axes) -> DimLayout:
        return DimLayout.even(size, axes, self.mesh)

    def _by_load(self, name: str, loads: tuple[float, ...], axes: Axes) -> tuple[ClassCut, ...]:
        """The even cut, and those by loads that differ from it."""
        parts, size = self.mesh.size(axes), len(loads)
        cuts = [self._even(size, axes)]
        if size >= parts:
            for share in self.shares or ((),):
                weights = _weights(self.mesh, axes, share) if share else (1.0,) * parts
                by_load = (loaded_cut(loads, weights, equal=equal) for equal in (False, True))
                cuts += [DimLayout.cut(axes, segments) for segments in by_load]
        return tuple({name: cut} for cut in dict.fromkeys(cuts))


@lru_cache(maxsize=65536)
def _by_share(
    mesh: DeviceMesh, size: int, axes: Axes, share: tuple[float, ...], unit: int
) -> DimLayout:
    weights = _weights(mesh, axes, share) if share else (1.0,)
    if len(set(weights)) == 1 or size // unit < len(weights):
        return DimLayout.even(size, axes, mesh)
    return DimLayout.cut(axes, [share_cut(size, weights, unit)])


@lru_cache(maxsize=4096)
def _weights(mesh: DeviceMesh, axes: Axes, share: tuple[float, ...]) -> tuple[float, ...]:
    """Least share of the devices at each coordinate, as all devices there have equal parts."""
    weights = [math.inf] * mesh.size(axes)
    for (_, point), of_device in zip(mesh.coords(), share, strict=True):
        index = mesh.linear(axes, point)
        weights[index] = min(weights[index], of_device)
    return tuple(weights)


@lru_cache(maxsize=65536)
def _scaled(layout: DimLayout, size: int) -> DimLayout | None:
    """The same cut of a dim of another size; None if that would cut an element."""
    parts = [[part * size for part in cuts] for cuts in layout.segments]
    if (
        layout.windows
        or not layout.size
        or any(part % layout.size for cuts in parts for part in cuts)
    ):
        return None
    return DimLayout.cut(
        layout.axes, [tuple(part // layout.size for part in cuts) for cuts in parts]
    )


@dataclass
class _Propagation:
    """Grows the cuts of each node and axis set from own cuts to the fixpoint."""

    graph: Graph
    rules: Rules
    choice: ClassCuts
    check: Callable[[], None]
    cuts: dict[str, dict[Axes, list[ClassCut]]] = field(default_factory=dict)
    layouts: dict[tuple[str, int, Axes], list[DimLayout]] = field(default_factory=dict)  # of dims
    seen: dict[tuple[str, str, int, Axes], int] = field(default_factory=dict)  # of them, by node

    def run(self) -> _Cuts:
        nodes = [(node, rule) for node in self.graph.nodes if (rule := self.rules.rule(node))]
        for node, rule in nodes:
            self.cuts[node.name] = {}
            if not _follows(node, rule):
                self._add_own_cuts(node, rule)
        self._sweep(nodes)
        uncut = [(node, rule) for node, rule in nodes if not any(self.cuts[node.name].values())]
        for node, rule in uncut:
            self._add_own_cuts(node, rule)
        if uncut:
            self._sweep(nodes)
        return self.cuts

    def _add_own_cuts(self, node: Node, rule: Rule) -> None:
        for axes in axis_sets(self.choice.mesh):
            for link in rule.links:
                if link != (PENDING,):
                    for cut in self.choice.of_class(rule, link, axes):
                        self._add(node, rule, axes, cut)

    def _sweep(self, nodes: Sequence[tuple[Node, Rule]]) -> None:
        for sweep in range(MAX_SWEEPS):
            order = reversed(nodes) if sweep % 2 else nodes
            news = [self._visit(node, rule) for node, rule in order]
            if not any(news):
                break

    def _visit(self, node: Node, rule: Rule) -> bool:
        """Offer the neighbours' layouts to a node; whether any cut was new."""
        self.check()
        mesh, news = self.choice.mesh, False
        for operand in rule.linear:  # may be a pending sum where the producer's result is one
            for axes in axis_sets(mesh):
                if (node.inputs[operand], PENDING_DIM, axes) in self.layouts:
                    size = rule.factors[PENDING].size
                    cut = {PENDING: DimLayout.even(size, axes, mesh)}
                    news |= self._add(node, rule, axes, cut)
        for value, dim, expr, window in _dims(node, rule):
            for axes in axis_sets(mesh):
                known = self.layouts.get((value, dim, axes), [])
                start = self.seen.get((node.name, value, dim, axes), 0)
                self.seen[(node.name, value, dim, axes)] = len(known)
                for layout in known[start:]:
                    if factors := rule.factor_layouts(expr, layout, mesh, window):
                        linked = self.choice.complete(rule, axes, factors)
                        news |= self._add(node, rule, axes, linked)
        return news

    def _add(self, node: Node, rule: Rule, axes: Axes, cut: ClassCut) -> bool:
        """Keep a cut of a node if it is new and possible; whether it was kept."""
        kept = self.cuts[node.name].setdefault(axes, [])
        if cut in kept or not _is_valid(node, rule, cut):
            return False
        if not any(set(link) == set(cut) for link in rule.links):
            return False
        share = self.choice.nearest(cut.values())
        rivals = [
            other
            for other in kept
            if set(other) == set(cut) and self.choice.nearest(other.values()) == share
        ]
        most = MAX_CUTS_A_CLASS.get(len(self.choice.mesh.axes), MAX_CUTS_A_CLASS_OTHERWISE)
        if len(rivals) >= most:
            coarsest = min(rivals[1:], key=_fineness)
            if _fineness(coarsest) >= _fineness(cut):
                return False
            kept.remove(coarsest)
        try:
            ins, outs = rule.shardings(cut, self.choice.mesh)
        except LayoutError:
            return False
        kept.append(cut)
        values = (*node.inputs, *node.outputs)
        for value, sharding in zip(values, (*ins, *outs), strict=True):
            if value:
                self._publish(value, sharding, axes)
        for (index, name), window in rule.windows.items():
            if name in cut and (layout := window.elements(cut[name])) is not None:
                self._offer(values[index], rule.dim_of(index, name), layout)
        return True

    def _publish(self, value: str, sharding: Sharding, axes: Axes) -> None:
        """Make a value's layouts known to the nodes that touch it."""
        for dim, layout in enumerate(sharding.dims):
            if layout.axes == axes and not layout.windows:
                self._offer(value, dim, layout)
        if {axis for axis, how in sharding.partial if how == "sum"} == set(axes):
            self.layouts.setdefault((value, PENDING_DIM, axes), [])

    def _offer(self, value: str, dim: int, layout: DimLayout) -> None:
        known = self.layouts.setdefault((value, dim, layout.axes), [])
        if layout not in known:
            known.append(layout)


def _dims(node: Node, rule: Rule) -> Iterator[tuple[str, int, DimExpr, Window | Parts | None]]:
    """(value, index, factors, window over it) of every dim of the node's tensors."""
    values, tensors = (*node.inputs, *node.outputs), (*rule.operands, *rule.results)
    for tensor, (value, dims) in enumerate(zip(values, tensors, strict=True)):
        for index, expr in enumerate(dims or ()):
            if value:
                yield value, index, expr, rule.window(tensor, expr)


def _follows(node: Node, rule: Rule) -> bool:
    """Test whether the op takes the cuts of its neighbours: pointwise, or moving data.

    Rows that are looked up in a table of which each device has a part are no mere movement.
    """
    row = row_of(node)
    if row is not None and row.stored:
        return False
    if any(factor.kind is FactorKind.REDUCE for factor in rule.factors.values()):
        return False
    return rule.flops_per_point == 0 or rule.is_pointwise


def _is_valid(node: Node, rule: Rule, cut: ClassCut) -> bool:
    """Test that no part is empty and that, for a stored value, a DTensor can express the cut.

    What a device adds to a part of the result, of no operand's dim, may be nothing.
    """
    row = row_of(node)
    stored = row is not None and row.stored
    return all(
        (min(layout.sizes()) > 0 or (len(cut) > 1 and name not in rule.read))
        and (not stored or layout.is_chunked)
        for name, layout in cut.items()
    )


def _fineness(cut: ClassCut) -> int:
    return sum(len(layout.segments) for layout in cut.values())
