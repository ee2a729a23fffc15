"""From a graph, a cluster and device groups to the solver's problem, and back to a plan.

Nodes of the problem are nodes of the graph, in the same order. A choice is a strategy on a
group, reads one of the operands of a node that takes either, or leaves an optional node out. What
is paid or held once however many consumers share it (a step of a reshard, its copy, a weight's
part, a value's storage) is an item.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.memory.lifetimes import with_headroom
from partitioner.cost_model.prices.compute import stored_bytes
from partitioner.cost_model.prices.reshard import Hop, beside_compute
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place
from partitioner.ir.rule import Cut
from partitioner.rewrites.graph_writer import chosen
from partitioner.solver.outcome import Solution
from partitioner.solver.problem import Choice, Edge, Hold, Item, Pair, Problem
from partitioner.strategies.derive import Rules

Candidates = Mapping[str, Sequence[PlacedNode]]  #: Strategies of each node, over all groups.
#: The placement of a value at an edge's end; True if the node there is left out, False if it reads
#: another operand.
End = Placement | bool
Key = tuple[str, *tuple[int, ...]]  #: The value of an item, and its placements by number.
Vector = tuple[float, ...]  #: Seconds or bytes on each column.


class _Copy(NamedTuple):
    """The copy of a tensor that one reshard step produces, the same for all values of a type."""

    home: int  #: Number of the placement that the value is made in.
    after: int  #: Number of the placement of the copy.
    load_s: Vector
    bytes: Vector
    zeros: bool  #: Whether blocks of zeros are in it: they are constants, so it stays.


@dataclass(frozen=True)
class _Moves:
    forbidden: frozenset[Pair]  #: Pairs of placements that no reshard joins.
    copies: tuple[_Copy, ...]  #: Copies that the reshards of the other pairs produce, each once.
    #: Indices of the copies that each of these produces, in order.
    paths: Mapping[Pair, tuple[int, ...]]

    @classmethod
    def of(cls, steps: Mapping[Pair, tuple[_Copy, ...] | None]) -> _Moves:
        """The moves with these steps of each pair; None where there is no way."""
        index: dict[tuple[int, int], int] = {}
        copies: list[_Copy] = []
        paths = {}
        for pair, path in steps.items():
            if not path:
                continue
            for copy in path:
                if copy[:2] not in index:
                    index[copy[:2]] = len(copies)
                    copies.append(copy)
            paths[pair] = tuple([index[copy[:2]] for copy in path])
        forbidden = frozenset(pair for pair, path in steps.items() if path is None)
        return cls(forbidden, tuple(copies), paths)


@dataclass(frozen=True)
class Built:
    """A problem with the strategies, groups and values that its indices stand for."""

    problem: Problem
    groups: tuple[DeviceMesh, ...]  #: Device groups by the choices' group index.
    candidates: Candidates  #: Strategy of each choice, by node.
    values: tuple[str, ...]  #: Value of the graph that each item holds or moves.
    zeros: frozenset[int] = frozenset()  #: Items that are blocks of zeros.
    #: Items that stay throughout: weights, stored values and blocks of zeros.
    resident: frozenset[int] = frozenset()

    def node_plans(self, graph: Graph, chosen: Sequence[int]) -> Mapping[str, NodePlan]:
        """Decisions by node name, in graph order; none for nodes that are left out."""
        index = {mesh: i for i, mesh in enumerate(self.groups)}
        plans = {}
        for node, pick in zip(graph.nodes, chosen, strict=True):
            placed = self.candidates[node.name][pick]
            if not placed.absent:
                layouts = placed.layouts.items()
                cuts = {name: Cut.of(layout, placed.mesh) for name, layout in layouts}
                plans[node.name] = NodePlan(index[placed.mesh], cuts)
        return plans


def build(
    graph: Graph,
    groups: Sequence[DeviceMesh],
    candidates: Candidates,
    prices: DeviceColumns,
    interchangeable: tuple[tuple[int, ...], ...] = (),
    check: Callable[[], None] = lambda: None,
    layers: tuple[tuple[int, ...], ...] = (),
) -> Built:
    """The problem of choosing one candidate for every node.

    Args:
        groups: Device groups that the candidates use.
        candidates: Strategies of each node; at least one each.
        interchangeable: Sets of group indices that are symmetric.
        check: Called before each choice and the edges of each node; it may raise.
        layers: As of `Problem`.
    """
    builder = _Builder(graph, candidates, prices, check)
    specs = prices.resharder.cluster.devices
    index = {mesh: i for i, mesh in enumerate(groups)}
    problem = Problem(
        devices=len(prices.devices),
        limit_bytes=tuple(float(specs[d].memory_bytes) for d in prices.devices),
        nodes=tuple(
            tuple(builder.choice(placed, index[placed.mesh]) for placed in candidates[node.name])
            for node in graph.nodes
        ),
        names=tuple(node.name for node in graph.nodes),
        holds=tuple(builder.hold(node) for node in graph.nodes),
        edges=tuple(edge for node in graph.nodes for edge in builder.edges(node)),
        items=tuple(builder.items),
        interchangeable=interchangeable,
        layers=layers,
    )
    values = tuple(value for value, *_ in builder.keys)
    zeros, resident = frozenset(builder.zeros), frozenset(builder.stays) | builder.zeros
    return Built(problem, tuple(groups), candidates, values, zeros, resident)


@dataclass
class _Builder:
    """Numbers items in the order in which choices, holds and edges first need them."""

    graph: Graph
    candidates: Candidates
    prices: DeviceColumns
    check: Callable[[], None]  #: Called before each choice and the edges of each node.
    items: list[Item] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    zeros: set[int] = field(default_factory=set)
    stays: set[int] = field(default_factory=set)  #: Items of weights and stored values.
    #: Index of each item; None for what costs and holds nothing.
    _index: dict[Key, int | None] = field(default_factory=dict)
    _placements: list[Placement] = field(default_factory=list)
    _numbers: dict[Placement, int] = field(default_factory=dict)
    _sizes: dict[tuple[str, int, bool], Vector] = field(default_factory=dict)
    #: By element type, placements and whether it passes beside compute; None if there is no way.
    _steps: dict[tuple[str, int, int, bool], tuple[_Copy, ...] | None] = field(default_factory=dict)
    _moves: dict[object, _Moves] = field(default_factory=dict)
    _homes: dict[str, tuple[tuple[End, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: By identity; the communications are kept so that their identity lasts.
    _loads: dict[tuple[int, bool], tuple[object, Vector]] = field(default_factory=dict)

    @cached_property
    def _last_uses(self) -> Mapping[str, int]:
        return last_uses(self.graph, self.prices.takers)

    @cached_property
    def _beside(self) -> frozenset[str]:
        return beside_compute(self.graph)

    @cached_property
    def _spans(self) -> Mapping[str, tuple[int, int]]:
        """Positions from which and to which copies of each produced value are held."""
        firsts = {v: self.graph.order[node.name] for v, node in self.graph.producers.items()}
        return {v: (first, max(first, self._last_uses[v])) for v, first in firsts.items()}

    def choice(self, placed: PlacedNode, group: int) -> Choice:
        """A strategy with its load: the node's own, and of reducing outputs that nobody reads."""
        self.check()
        seconds = self.prices.node_seconds(placed)
        load = [seconds.get(device, 0.0) for device in self.prices.devices]
        for value, at in self._pending_outputs(placed):
            if not self.graph.consumers[value]:
                for hop in self._reduction(value, at):
                    more = self._hop_load(hop, beside=False)
                    load = [a + b for a, b in zip(load, more, strict=True)]
        return Choice(load_s=tuple(load), group=group)

    def _pending_outputs(self, placed: PlacedNode) -> Iterator[tuple[str, Placement]]:
        """Graph outputs that the strategy leaves partial: they are reduced where they are."""
        for value, at in placed.results():
            if value in self.graph.outputs and at.sharding.partial:
                yield value, at

    def _reduction(self, value: str, at: Placement) -> tuple[Hop, ...]:
        dtype = self.graph.types[value].dtype
        return self.prices.resharder.hops(dtype, at, at.without_partial())

    def hold(self, node: Node) -> Hold:
        """Items that each strategy of a node holds, whatever the others choose."""
        items = (self._held(node, placed) for placed in self.candidates[node.name])
        once = tuple(tuple(dict.fromkeys(i for i in each if i is not None)) for each in items)
        return Hold(node=self.graph.order[node.name], items=once)

    def _held(self, node: Node, placed: PlacedNode) -> Iterator[int | None]:
        first = self.graph.order[node.name]
        for value, at in placed.operands():
            if value in self.graph.constants:
                nbytes = self._bytes(value, at, resident=True)
                yield self._staying(self._key(value, at), nbytes, self.stays)
            elif value not in self.graph.producers:
                yield from self._fed(value, at)
        for value, at in self._pending_outputs(placed):
            if self.graph.consumers[value]:
                dtype, beside = self.graph.types[value].dtype, value in self._beside
                for hop in self._reduction(value, at):
                    yield self._copy_item(value, self._copy(dtype, at, hop, beside=beside))
            else:
                done = self._reduction(value, at)[-1].after
                last = len(self.graph.nodes) - 1
                yield self._item(self._key(value, at, done), self._bytes(value, done), first, last)
        row = row_of(node)
        if row.view and not row.either and node.name not in self.prices.takers:
            return
        for value, at in placed.results():
            if row.stored:
                dtype = self.graph.types[value].dtype
                parts = self._bytes(value, at, resident=True)
                stored = tuple(stored_bytes(node, dtype, nbytes, at.sharding) for nbytes in parts)
                yield self._staying(self._key(value, at), stored, self.stays)
            else:
                end = max(first, self._last_uses[value])
                yield self._item(self._key(value, at), self._bytes(value, at), first, end)

    def _fed(self, value: str, at: Placement) -> Iterator[int | None]:
        """A graph input where a node wants it; a pending sum is the input and blocks of zeros."""
        plain = at.without_partial()
        nbytes = self._bytes(value, at)
        first = min(self.graph.order[node.name] for node in self.graph.consumers[value])
        last = self._last_uses[value]
        yield self._item(self._key(value, plain), self._bytes(value, plain), first, last)
        for hop in self.prices.resharder.hops(self.graph.types[value].dtype, plain, at):
            zeros = self._on(nbytes, hop.zeros)
            yield self._staying(self._key(value, plain, at), zeros, self.zeros)

    def edges(self, node: Node) -> Iterator[Edge]:
        """Yield an edge for each operand slot: a node may want one value in two placements."""
        self.check()
        for slot, value in enumerate((*node.inputs, *node.captures)):
            producer = self.graph.producers.get(value)
            if producer is not None:
                yield self._edge(value, producer, node, slot)

    def _edge(self, value: str, producer: Node, consumer: Node, slot: int) -> Edge:
        if value not in self._homes:
            strategies = self.candidates[producer.name]
            ends = [dict(placed.results()).get(value, True) for placed in strategies]
            self._homes[value] = _classes(ends)
        homes, out_class = self._homes[value]
        strategies = self.candidates[consumer.name]
        wants, in_class = _classes([placed.ins[slot] or placed.absent for placed in strategies])
        moves = self._moves_between(self.graph.types[value].dtype, homes, wants, value)
        forbidden = moves.forbidden
        if self.graph.optional:
            offered = producer.name in self.graph.optional
            forbidden |= frozenset(_contradictions(homes, wants, offered=offered))
        if consumer.name in self._names_of_stored and slot == 0:
            forbidden |= _moves_apart(homes, wants)
        row, items = row_of(consumer), dict[Pair, tuple[int, ...]]()
        if row.in_place == slot:
            pairs = itertools.product(range(len(homes)), range(len(wants)))
            forbidden = frozenset((i, j) for i, j in pairs if homes[i] != wants[j])
        else:
            copied = [self._copy_item(value, copy) for copy in moves.copies]
            paid = (
                (pair, tuple([item for k in path if (item := copied[k]) is not None]))
                for pair, path in moves.paths.items()
            )
            items = {pair: some for pair, some in paid if some}
        if row.either:
            for i, j in itertools.product(range(len(homes)), range(len(wants))):
                home = homes[i]
                if isinstance(home, bool) or isinstance(wants[j], bool) or (i, j) in forbidden:
                    continue
                copies = [moves.copies[k] for k in moves.paths.get((i, j), ())]
                kept = self._kept(value, consumer, home, copies)
                items[i, j] = (*items.get((i, j), ()), *kept)
        u, v = (self.graph.order[node.name] for node in (producer, consumer))
        return Edge(u, v, out_class, in_class, items, forbidden)

    @cached_property
    def _names_of_stored(self) -> frozenset[str]:
        """The nodes whose results are views or other names of stored values, such as a transpose.

        They lie where the value does: they cost nothing there, and what reads them takes as much.
        """
        stored: set[str] = set()
        names: set[str] = set()
        for node in self.graph.nodes:
            row = row_of(node)
            if (row.view or row.again) and not row.either and node.inputs[0] in stored:
                names.add(node.name)
            if row.stored or node.name in names:
                stored.update(node.writes)
        return frozenset(names)

    def _kept(
        self, value: str, taker: Node, home: Placement, copies: Sequence[_Copy]
    ) -> Iterator[int]:
        """Bytes of a value from its last other use on, held for the node that takes it."""
        first, last = self._spans[value][1] + 1, self.graph.order[taker.name] - 1
        if first > last:
            return
        number = self._number(home)
        sizes = [(number, self._bytes(value, home)), *((copy.after, copy.bytes) for copy in copies)]
        for at, nbytes in sizes:
            item = self._item((taker.outputs[0], number, at, at), nbytes, first, last)
            if item is not None:
                yield item

    def _moves_between(
        self, dtype: str, homes: Sequence[End], wants: Sequence[End], value: str
    ) -> _Moves:
        """The reshards of an edge.

        Blocks of a model repeat, so the same lists of placements come again and again.
        """
        beside = value in self._beside
        ends = tuple(
            tuple(-1 if isinstance(at, bool) else self._number(at) for at in side)
            for side in (homes, wants)
        )
        key = (dtype, ends, beside)
        if key not in self._moves:
            self._moves[key] = _Moves.of(
                {
                    (i, j): self._path(dtype, home, want, beside=beside)
                    for i, home in enumerate(ends[0])
                    for j, want in enumerate(ends[1])
                    if home >= 0 and want >= 0
                }
            )
        return self._moves[key]

    def _path(self, dtype: str, home: int, want: int, *, beside: bool) -> tuple[_Copy, ...] | None:
        """Copies that a reshard produces on its way; None if there is no way."""
        if home == want:
            return ()
        key = (dtype, home, want, beside)
        if key not in self._steps:
            source, target = self._placements[home], self._placements[want]
            resharder = self.prices.resharder
            self._steps[key] = (
                tuple(
                    self._copy(dtype, source, hop, beside=beside)
                    for hop in resharder.hops(dtype, source, target)
                )
                if resharder.allows(source, target)
                else None
            )
        return self._steps[key]

    def _copy_item(self, value: str, copy: _Copy) -> int | None:
        key = (value, copy.home, copy.after)
        if key in self._index:
            return self._index[key]
        first, last = (0, len(self.graph.nodes) - 1) if copy.zeros else self._spans[value]
        home, after = self._placements[copy.home], self._placements[copy.after]
        share = self.prices.move_share(value, home, after)
        load = copy.load_s if share == 1.0 else tuple(share * s for s in copy.load_s)
        item = self._item(key, copy.bytes, first, last, load)
        if copy.zeros and item is not None:
            self.zeros.add(item)
        return item

    def _copy(self, dtype: str, home: Placement, hop: Hop, *, beside: bool) -> _Copy:
        nbytes = self._bytes_of(dtype, hop.after, resident=bool(hop.zeros))
        if hop.aliases:
            nbytes = self._on(nbytes, frozenset(self.prices.devices) - hop.aliases)
        zeros = any(self._on(nbytes, hop.zeros))
        load = self._hop_load(hop, beside=beside)
        return _Copy(self._number(home), self._number(hop.after), load, nbytes, zeros)

    def _hop_load(self, hop: Hop, *, beside: bool) -> Vector:
        key = id(hop.comms), beside
        if key not in self._loads:
            seconds = [priced.busy_seconds(beside=beside) for priced in hop.comms]
            load = tuple(sum(busy.get(d, 0.0) for busy in seconds) for d in self.prices.devices)
            self._loads[key] = hop.comms, load
        return self._loads[key][1]

    def _key(self, value: str, *at: Placement) -> Key:
        return (value, *map(self._number, at))

    def _number(self, at: Placement) -> int:
        number = self._numbers.get(at)
        if number is None:
            number = self._numbers[at] = len(self._placements)
            self._placements.append(at)
        return number

    def _staying(self, key: Key, nbytes: Vector, alike: set[int]) -> int | None:
        """The item of what stays throughout, noted among those alike."""
        item = self._item(key, nbytes, 0, len(self.graph.nodes) - 1)
        if item is not None:
            alike.add(item)
        return item

    def _item(
        self, key: Key, nbytes: Vector, first: int, last: int, load: Vector = ()
    ) -> int | None:
        """Index of the item of this key; None if it costs and holds nothing."""
        if key not in self._index:
            if (share := self.prices.held_share(key[0])) < 1.0:
                nbytes = tuple(share * size for size in nbytes)
            if any(nbytes) or any(load):
                self._index[key] = len(self.items)
                self.items.append(Item(load or (0.0,) * len(nbytes), nbytes, first, last))
                self.keys.append(key)
            else:
                self._index[key] = None
        return self._index[key]

    def _bytes(self, value: str, at: Placement, *, resident: bool = False) -> Vector:
        return self._bytes_of(self.graph.types[value].dtype, at, resident=resident)

    def _bytes_of(self, dtype: str, at: Placement, *, resident: bool) -> Vector:
        key = (dtype, self._number(at), resident)
        if key not in self._sizes:
            sizes = self.prices.local_bytes(at, dtype)
            parts = (sizes.get(device, 0) for device in self.prices.devices)
            self._sizes[key] = tuple(float(n if resident else with_headroom(n)) for n in parts)
        return self._sizes[key]

    def _on(self, nbytes: Vector, devices: Collection[int]) -> Vector:
        pairs = zip(self.prices.devices, nbytes, strict=True)
        return tuple(size if device in devices else 0.0 for device, size in pairs)


def _moves_apart(homes: Sequence[End], wants: Sequence[End]) -> frozenset[Pair]:
    """Pairs of placements on different devices; none if no pair is on the same ones."""
    pairs = [
        (i, j, set(home.mesh.devices) == set(want.mesh.devices))
        for i, home in enumerate(homes)
        for j, want in enumerate(wants)
        if not isinstance(home, bool) and not isinstance(want, bool)
    ]
    if not any(together for *_, together in pairs):
        return frozenset()
    return frozenset((i, j) for i, j, together in pairs if not together)


def _contradictions(homes: Sequence[End], wants: Sequence[End], *, offered: bool) -> Iterator[Pair]:
    """Pairs in which a value is read that is not there, or an offered one is and is not taken."""
    for i, home in enumerate(homes):
        for j, want in enumerate(wants):
            there, read = not isinstance(home, bool), not isinstance(want, bool)
            if (read and not there) or (offered and there and want is False):
                yield i, j


def _classes(ends: Sequence[End]) -> tuple[tuple[End, ...], tuple[int, ...]]:
    """Distinct ends, and each one's index among them."""
    classes: dict[End, int] = {}
    index = tuple(classes.setdefault(at, len(classes)) for at in ends)
    return tuple(classes), index


def last_uses(graph: Graph, takers: Collection[str] = ()) -> Mapping[str, int]:
    """Position of the last use of every value or of a view of it; outputs live to the end.

    Nodes that take either operand do not count: the operand is kept for them by items of its own.
    Nor do views that take over what they are views of: that is held up to them.
    """
    end = len(graph.nodes) - 1
    last: dict[str, int] = dict.fromkeys(graph.outputs, end)
    for position in range(end, -1, -1):
        node = graph.nodes[position]
        row = row_of(node)
        if row.either:
            continue
        lasting = max((last.get(v, position) for v in node.writes), default=position)
        for slot, value in enumerate((*node.inputs, *node.captures)):
            viewed = row.view and slot == 0
            if value and viewed and node.name in takers:
                last[value] = position - 1
            elif value:
                last[value] = max(last.get(value, -1), lasting if viewed else position, position)
    return {value: last.get(value, 0) for value in graph.types}


def kept_decision(graph: Graph, plan: Plan | None, rules: Rules, node: Node) -> PlacedNode | None:
    """The strategy of a node in a plan that is kept; None if the plan has none for it."""
    decision = plan.nodes.get(node.name) if plan is not None else None
    if plan is None or decision is None:
        return None
    mesh, rule = plan.groups[decision.group], rules.rule(node)
    sizes = {name: factor.size for name, factor in rule.factors.items()} if rule else {}
    layouts = {name: cut.layout(sizes[name], mesh) for name, cut in decision.cuts.items()}
    return place(graph, node, mesh, layouts, rule)


def decided(graph: Graph, cluster: Cluster, built: Built, solution: Solution) -> tuple[Graph, Plan]:
    """The plan of a solution, and the graph that it is for."""
    plans = built.node_plans(graph, solution.chosen)
    order = solution.order or range(len(graph.nodes))
    ordered = {name: plans[name] for i in order if (name := graph.nodes[i].name) in plans}
    return planned_on(graph, cluster, built.groups, ordered)


def planned_on(
    graph: Graph, cluster: Cluster, groups: Sequence[DeviceMesh], decided: Mapping[str, NodePlan]
) -> tuple[Graph, Plan]:
    """The plan of some decisions, in their order, and the graph that it is for."""
    left = chosen(graph, decided) if graph.optional else graph
    names = [name for name in decided if name in left.by_name]
    used = sorted({decided[name].group for name in names})
    index = {group: position for position, group in enumerate(used)}
    nodes = {n: NodePlan(index[decided[n].group], decided[n].cuts) for n in names}
    return left, Plan(left.digest, cluster.to_data(), tuple(groups[g] for g in used), nodes)
