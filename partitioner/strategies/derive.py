"""Strategies of every node on a mesh, derived from the factor rules alone.

A strategy cuts link classes of factors over mesh axes. Each class has cuts of its own: balanced,
and in proportion to shares of the devices (`device_shares`). Layouts with segments (a Concat of
shards, heads inside a fused projection) come from the neighbours: the layout that a strategy gives
to a value's dim is offered to every other node that touches the value, through its rule, until
nothing new appears. Pointwise ops and data movement have no cuts of their own if a neighbour offers
any. Last come cuts in parts that overlap (`_with_overlaps`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.compute import node_seconds
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import (
    DimLayout,
    LayoutError,
    Sharding,
    folded_cut,
    loaded_cut,
    share_cut,
)
from partitioner.ir.loops.factors import PENDING, FactorKind
from partitioner.ir.mesh import COPIES, DeviceMesh
from partitioner.ir.ops import is_stored, rules_of
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.rule import Rule

#: Cuts of one class over one set of axes that are kept, by the mesh's number of axes: the first
#: one and the finest ones. Strategies multiply over axes, so meshes of several keep fewer. Cuts in
#: proportion to shares have as many places of their own: they and the balanced ones do not compete.
MAX_CUTS_A_CLASS = {1: 4}
MAX_CUTS_A_CLASS_OTHERWISE = 2
#: Sweeps over the graph, forward and back in turn, to spread layouts.
MAX_SWEEPS = 6

#: Parts of a factor that are cut from either end (`folded_cut`) at most; each is a segment.
MOST_FOLDED = 32

#: Elements that may be computed again in parts that overlap, for each element of the dim.
MOST_REPEATED = 1.0

#: In place of the index of a dim: the value may be a pending sum.
PENDING_DIM = -1

Axes = tuple[str, ...]
ClassCut = Mapping[str, DimLayout]  #: Layout of every factor of one link class.
_Cuts = Mapping[str, Mapping[Axes, Sequence[ClassCut]]]  # of each node
_Demands = dict[str, dict[tuple[int, Axes], dict[int, DimLayout]]]  # of a value's dims, by depth
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


@lru_cache(maxsize=1024)
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
        fused: Most windows whose halos a cut's parts hold, see `_with_overlaps`.
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
        cuts = _with_overlaps(graph, rules.by_node, mesh, cuts, fused)
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
        even = {name: DimLayout.even(size, axes, mesh) for name, size in sizes.items()}
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

    def _by_load(self, name: str, loads: tuple[float, ...], axes: Axes) -> tuple[ClassCut, ...]:
        """The even cut, and those by loads that differ from it."""
        parts, size = self.mesh.size(axes), len(loads)
        cuts = [DimLayout.even(size, axes, self.mesh)]
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
            # An op that is pointwise or moves data takes the cuts of its neighbours. Rows that are
            # looked up in a table of which each device has a part are no mere movement.
            kinds = (factor.kind for factor in rule.factors.values())
            is_stepping = rule.flops_per_point > 0 and not rule.is_pointwise
            if is_stored(node) or FactorKind.REDUCE in kinds or is_stepping:
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
        values, tensors = (*node.inputs, *node.outputs), (*rule.operands, *rule.results)
        for tensor, (value, dims) in enumerate(zip(values, tensors, strict=True)):
            of_value = enumerate(dims or ()) if value else ()
            for (dim, expr), axes in itertools.product(of_value, axis_sets(mesh)):
                known = self.layouts.get((value, dim, axes))
                if not known:
                    continue
                start = self.seen.get((node.name, value, dim, axes), 0)
                self.seen[(node.name, value, dim, axes)] = len(known)
                for layout in known[start:]:
                    window = rule.window(tensor, expr)
                    if factors := rule.factor_layouts(expr, layout, mesh, window):
                        linked = self.choice.complete(rule, axes, factors)
                        news |= self._add(node, rule, axes, linked)
        return news

    def _add(self, node: Node, rule: Rule, axes: Axes, cut: ClassCut) -> bool:
        """Keep a cut of a node if it is new and possible; whether it was kept."""
        kept = self.cuts[node.name].setdefault(axes, [])
        by_share = bool(self.choice.shares)
        if cut in kept or not _is_valid(node, rule, cut, by_share=by_share):
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


def _is_valid(node: Node, rule: Rule, cut: ClassCut, *, by_share: bool) -> bool:
    """Test that no part is empty and that, for a stored value, a DTensor can express the cut.

    On unlike devices, `by_share`, parts may have any sizes.

    What a device adds to a part of the result, of no operand's dim, may be nothing.
    """
    stored = is_stored(node)
    return all(
        (min(layout.sizes()) > 0 or (len(cut) > 1 and name not in rule.read))
        and (not stored or layout.is_chunked or (by_share and layout.is_in_order))
        for name, layout in cut.items()
    )


def _fineness(cut: ClassCut) -> int:
    return sum(len(layout.segments) for layout in cut.values())


def _with_overlaps(
    graph: Graph, rules: Mapping[str, Rule | str], mesh: DeviceMesh, cuts: _Cuts, most: int
) -> _Cuts:
    """Cuts of each node, and those in parts that overlap, which its readers' windows give.

    Neighbours both compute rows of such parts, so that they need not exchange them. A chain of
    sliding windows needs a halo before each. If the layer before the last window computes the halo
    too, that exchange is gone, and the one before it is wider: halos are fused. The *depth* of a
    cut is the number of windows whose halos its parts hold. Each node is offered one such cut for
    each depth, up to a bound, so the search decides where a chain of fused halos begins and ends.
    See ADR 25.

    Values are computed twice, never added up twice: a loop that is reduced has no such cut, so
    gradients of weights and statistics take each row once.

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
        deeper = [] if is_stored(node) else [*_taken(node, rule, mesh, demands)]
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


def device_shares(graph: Graph, rules: Rules, cluster: Cluster) -> tuple[Mapping[int, float], ...]:
    """Shares of the devices of a cluster, each in a unit of its own; none if all are equal.

    By memory, and half way between speed and memory, only where memory may bind: where a device
    could not hold its part of all values of the graph at once.
    """
    if cluster.has_equal_devices:
        return ()
    speeds = device_speeds(graph, rules, cluster)
    usual = _of_one(speeds or dict.fromkeys(range(len(cluster)), 1.0))
    memory = {d: spec.memory_bytes for d, spec in enumerate(cluster.devices)}
    held = sum(tensor.nbytes for tensor in graph.types.values())
    if all(held * share <= memory[device] for device, share in usual.items()):
        return () if speeds is None else (speeds,)
    by_memory = _of_one(memory)
    between = {device: (share + by_memory[device]) / 2 for device, share in usual.items()}
    return (usual, between, by_memory)


def _of_one(figures: Mapping[int, float]) -> Mapping[int, float]:
    total = math.fsum(figures.values())
    return {device: figure / total for device, figure in figures.items()}


def device_speeds(graph: Graph, rules: Rules, cluster: Cluster) -> Mapping[int, float] | None:
    """Speed of each device in whole graphs a second, each device alone.

    None if all devices are equal, or if one takes no time at all: no finite shares are in
    proportion to that.
    """
    if cluster.has_equal_devices:
        return None
    speeds = {}
    for spec, device in cluster.first_of_spec.items():
        mesh = DeviceMesh.single(device)
        placed_nodes = (place(graph, node, mesh, {}, rules.rule(node)) for node in graph.nodes)
        seconds = math.fsum(node_seconds(graph, placed, cluster)[device] for placed in placed_nodes)
        if seconds <= 0:
            return None
        speeds[spec] = 1 / seconds
    return {device: speeds[spec] for device, spec in enumerate(cluster.devices)}
