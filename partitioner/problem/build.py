"""From a graph, a cluster and device groups to the solver's problem, and back to a plan.

Nodes of the problem are nodes of the graph, in the same order. A choice is a strategy on a
group, reads one of the operands of a node that takes either, or leaves an optional node out. What
is paid or held once however many consumers share it (a hop of a reshard, its copy, a weight's
part, a value's storage) is an item.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from partitioner.cost_model.columns import DeviceColumns
from partitioner.cost_model.compute import stored_bytes
from partitioner.cost_model.memory import with_headroom
from partitioner.cost_model.overlap import beside_compute
from partitioner.cost_model.reshard import Hop
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import NodePlan, PlacedNode
from partitioner.ir.rule import Cut
from partitioner.solver.problem import Choice, Edge, Hold, Item, Pair, Problem

Candidates = Mapping[str, Sequence[PlacedNode]]  #: Strategies of each node, over all groups.


#: Where an edge's end has the value; whether its node is left out (True), or reads another operand.
End = Placement | bool
Key = tuple[str, *tuple[int, ...]]  #: What an item is of: a value, and its placements by number.
Vector = tuple[float, ...]  #: Seconds or bytes on each column.


class _Copy(NamedTuple):
    """What a step of a reshard leaves, wherever it is made.

    Attributes:
        home: Number of the placement that the value has at first.
        after: Number of the placement of the copy.
        load_s: Seconds of the step.
        bytes: Bytes of the copy.
        lasting: Whether it is a block of zeros, a constant.
    """

    home: int
    after: int
    load_s: Vector
    bytes: Vector
    lasting: bool


@dataclass(frozen=True)
class _Moves:
    """The reshards between two lists of placements.

    Attributes:
        bad: Pairs of placements that no reshard joins.
        copies: All that the reshards of the others leave.
        paths: Which copies each of them leaves, in order.
    """

    bad: frozenset[Pair]
    copies: tuple[_Copy, ...]
    paths: Mapping[Pair, tuple[int, ...]]


@dataclass(frozen=True)
class Built:
    """A problem with what its choices stand for.

    Attributes:
        problem: For the solver.
        groups: Device groups by the choices' group index.
        candidates: Strategy of each choice, by node.
        values: Of which value of the graph each item is.
        zeros: Items that are blocks of zeros, which stay.
    """

    problem: Problem
    groups: tuple[DeviceMesh, ...]
    candidates: Candidates
    values: tuple[str, ...]
    zeros: frozenset[int] = frozenset()

    def node_plans(self, graph: Graph, chosen: Sequence[int]) -> Mapping[str, NodePlan]:
        """Decisions by node name, in graph order; none for nodes that are left out."""
        index = {mesh: i for i, mesh in enumerate(self.groups)}
        plans = {}
        for node, pick in zip(graph.nodes, chosen, strict=True):
            placed = self.candidates[node.name][pick]
            if placed.absent:
                continue
            cuts = {name: Cut.of(layout, placed.mesh) for name, layout in placed.layouts.items()}
            plans[node.name] = NodePlan(index[placed.mesh], cuts)
        return plans


def build(
    graph: Graph,
    groups: Sequence[DeviceMesh],
    candidates: Candidates,
    prices: DeviceColumns,
    interchangeable: tuple[tuple[int, ...], ...] = (),
) -> Built:
    """The problem of choosing one candidate for every node.

    Args:
        graph: The model.
        groups: Device groups that the candidates use.
        candidates: Strategies of each node; at least one each.
        prices: What choices cost on each column of the problem.
        interchangeable: Sets of group indices that are symmetric.
    """
    return _Builder(graph, tuple(groups), candidates, prices).run(interchangeable)


@dataclass
class _Builder:
    graph: Graph
    groups: tuple[DeviceMesh, ...]
    candidates: Candidates
    prices: DeviceColumns
    items: list[Item] = field(default_factory=list)
    kept: list[Key] = field(default_factory=list)
    zeros: set[int] = field(default_factory=set)
    known: dict[Key, int | None] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    numbers: dict[Placement, int] = field(default_factory=dict)
    sizes: dict[tuple[str, int, bool], Vector] = field(default_factory=dict)
    #: By element type, placements and whether it passes beside compute; None if there is no way.
    steps: dict[tuple[str, int, int, bool], tuple[_Copy, ...] | None] = field(default_factory=dict)
    moves: dict[object, _Moves] = field(default_factory=dict)
    homes: dict[str, tuple[tuple[End, ...], tuple[int, ...]]] = field(default_factory=dict)
    #: By identity; the communications are kept so that their identity lasts.
    loads: dict[tuple[int, bool], tuple[object, Vector]] = field(default_factory=dict)

    def run(self, interchangeable: tuple[tuple[int, ...], ...]) -> Built:
        graph = self.graph
        self.devices = self.prices.devices
        self.ends = _last_uses(graph)
        self.beside = beside_compute(graph)
        self.spans = {value: self._span(value) for value in graph.producers}
        index = {mesh: i for i, mesh in enumerate(self.groups)}
        nodes = tuple(
            tuple(self._choice(placed, index[placed.mesh]) for placed in self.candidates[node.name])
            for node in graph.nodes
        )
        holds = tuple(self._hold(position, node) for position, node in enumerate(graph.nodes))
        edges = tuple(edge for node in graph.nodes for edge in self._edges(node))
        specs = self.prices.resharder.cluster.devices
        problem = Problem(
            devices=len(self.devices),
            limit_bytes=tuple(float(specs[device].memory_bytes) for device in self.devices),
            nodes=nodes,
            names=tuple(node.name for node in graph.nodes),
            edges=edges,
            holds=holds,
            items=tuple(self.items),
            interchangeable=interchangeable,
        )
        values = tuple(value for value, *_ in self.kept)
        return Built(problem, self.groups, self.candidates, values, frozenset(self.zeros))

    def _choice(self, placed: PlacedNode, group: int) -> Choice:
        seconds = self.prices.node_seconds(placed)
        load: Iterable[float] = [seconds.get(device, 0.0) for device in self.devices]
        for value, at in self._pending_outputs(placed):
            if not self.graph.consumers[value]:
                for hop in self._resolve(value, at):
                    more = self._hop_load(hop, beside=False)
                    load = [a + b for a, b in zip(load, more, strict=True)]
        label = "left out" if placed.absent else _label(placed.mesh, tuple(placed.layouts.items()))
        return Choice(load_s=tuple(load), group=group, label=label)

    def _pending_outputs(self, placed: PlacedNode) -> Iterable[tuple[str, Placement]]:
        """Graph outputs that the strategy leaves partial: they are reduced where they are."""
        return (
            (value, at)
            for value, at in placed.results()
            if value in self.graph.outputs and at.sharding.partial
        )

    def _resolve(self, value: str, at: Placement) -> tuple[Hop, ...]:
        done = Placement(at.mesh, at.sharding.without_partial())
        return self.prices.resharder.priced(self.graph.types[value].dtype, at, done)

    def _hold(self, position: int, node: Node) -> Hold:
        return Hold(
            node=position,
            items=tuple(
                tuple(dict.fromkeys(i for i in self._held(node, placed) if i is not None))
                for placed in self.candidates[node.name]
            ),
        )

    def _held(self, node: Node, placed: PlacedNode) -> Iterable[int | None]:
        first, last = self.graph.order[node.name], len(self.graph.nodes) - 1
        for value, at in placed.operands():
            if value in self.graph.constants:
                yield self._item(
                    self._key(value, at), self._bytes(value, at, resident=True), 0, last
                )
            elif value not in self.graph.producers:
                yield from self._fed(value, at)
        for value, at in self._pending_outputs(placed):
            if self.graph.consumers[value]:
                yield from (self._hop_item(value, at, hop) for hop in self._resolve(value, at))
            else:
                done = self._resolve(value, at)[-1].after
                yield self._item(self._key(value, at, done), self._bytes(value, done), first, last)
        row = row_of(node)
        if row is not None and row.view and not row.either:
            return
        if row is not None and row.stored:
            for value, at in placed.results():
                yield self._item(self._key(value, at), self._stored(node, value, at), 0, last)
            return
        for value, at in placed.results():
            end = max(first, self.ends[value])
            yield self._item(self._key(value, at), self._bytes(value, at), first, end)

    def _fed(self, value: str, at: Placement) -> Iterable[int | None]:
        """A graph input where a node wants it; a pending sum is the input and blocks of zeros."""
        plain = Placement(at.mesh, at.sharding.without_partial())
        first = min(self.graph.order[node.name] for node in self.graph.consumers[value])
        yield self._item(
            self._key(value, plain), self._bytes(value, plain), first, self.ends[value]
        )
        for hop in self.prices.resharder.priced(self.graph.types[value].dtype, plain, at):
            held = self._bytes(value, at)
            zeros = [
                size if device in hop.zeros else 0.0
                for device, size in zip(self.devices, held, strict=True)
            ]
            yield self._item(
                self._key(value, plain, at), tuple(zeros), 0, len(self.graph.nodes) - 1
            )

    def _stored(self, node: Node, value: str, at: Placement) -> Vector:
        """Bytes of a stored value, and of what is kept beside it."""
        kind = self.graph.types[value].dtype
        held = self._bytes(value, at, resident=True)
        return tuple(stored_bytes(node, kind, nbytes) for nbytes in held)

    def _edges(self, node: Node) -> Iterable[Edge]:
        """One edge an operand slot: a node may want one value in two placements."""
        for slot, value in enumerate((*node.inputs, *node.captures)):
            producer = self.graph.producers.get(value)
            if producer is not None:
                yield self._edge(value, producer, node, slot)

    def _span(self, value: str) -> tuple[int, int]:
        """Positions from which and to which copies of a value are held."""
        first = self.graph.order[self.graph.producers[value].name]
        return first, max(first, self.ends[value])

    def _homes(self, value: str, producer: Node) -> tuple[tuple[End, ...], tuple[int, ...]]:
        """Where a value may be made, and which of these each strategy of its producer gives."""
        if value not in self.homes:
            ends = [
                dict(placed.results()).get(value, True) for placed in self.candidates[producer.name]
            ]
            self.homes[value] = _classes(ends)
        return self.homes[value]

    def _stays(self, node: Node, slot: int) -> bool:
        row = row_of(node)
        return row is not None and row.in_place == slot

    def _edge(self, value: str, producer: Node, consumer: Node, slot: int) -> Edge:
        homes, out_class = self._homes(value, producer)
        wants, in_class = _classes(
            [placed.ins[slot] or placed.absent for placed in self.candidates[consumer.name]]
        )
        dtype, beside = self.graph.types[value].dtype, value in self.beside
        moves = self._moves(dtype, homes, wants, beside=beside)
        forbidden = moves.bad
        if self.graph.optional:
            offered = producer.name in self.graph.optional
            forbidden |= frozenset(_contradictions(homes, wants, offered=offered))
        items: dict[Pair, tuple[int, ...]] = {}
        if self._stays(consumer, slot):
            pairs = ((i, j) for i in range(len(homes)) for j in range(len(wants)))
            forbidden = frozenset(p for p in pairs if homes[p[0]] != wants[p[1]])
        else:
            items = self._paid(value, moves)
        row = row_of(consumer)
        if row is not None and row.either:
            for i, j in itertools.product(range(len(homes)), range(len(wants))):
                home, want = homes[i], wants[j]
                if isinstance(home, bool) or isinstance(want, bool) or (i, j) in forbidden:
                    continue
                copies = [moves.copies[k] for k in moves.paths.get((i, j), ())]
                held = self._kept(value, consumer, home, copies)
                items[i, j] = (*items.get((i, j), ()), *held)
        order = self.graph.order
        return Edge(
            u=order[producer.name],
            v=order[consumer.name],
            out_class=out_class,
            in_class=in_class,
            items=items,
            forbidden=forbidden,
        )

    def _kept(
        self, value: str, taker: Node, home: Placement, copies: Sequence[_Copy]
    ) -> Iterator[int]:
        """What is held of a value from its last other use on for the node that takes it."""
        order = self.graph.order
        made = order[self.graph.producers[value].name]
        first, last = max(made, self.ends[value]) + 1, order[taker.name] - 1
        if first > last:
            return
        number = self._number(home)
        held = [(number, self._bytes(value, home)), *((copy.after, copy.bytes) for copy in copies)]
        for at, size in held:
            item = self._item((taker.outputs[0], number, at, at), size, first, last)
            if item is not None:
                yield item

    def _moves(
        self, dtype: str, homes: Sequence[End], wants: Sequence[End], *, beside: bool
    ) -> _Moves:
        """The reshards of an edge.

        Blocks of a model repeat, so the same lists of placements come again and again.
        """
        ends = tuple(
            tuple(-1 if isinstance(at, bool) else self._number(at) for at in side)
            for side in (homes, wants)
        )
        key = (dtype, ends, beside)
        if key not in self.moves:
            pairs = {
                (i, j): self._steps(dtype, home, want, beside=beside)
                for i, home in enumerate(ends[0])
                for j, want in enumerate(ends[1])
                if home >= 0 and want >= 0
            }
            self.moves[key] = _moves(pairs)
        return self.moves[key]

    def _steps(self, dtype: str, home: int, want: int, *, beside: bool) -> tuple[_Copy, ...] | None:
        """What a reshard leaves on its way; None if there is no way."""
        if home == want:
            return ()
        key = (dtype, home, want, beside)
        if key not in self.steps:
            source, target = self.placements[home], self.placements[want]
            if self.prices.resharder.allows(source, target):
                hops = self.prices.resharder.priced(dtype, source, target)
                self.steps[key] = tuple(
                    self._copy(dtype, source, hop, beside=beside) for hop in hops
                )
            else:
                self.steps[key] = None
        return self.steps[key]

    def _paid(self, value: str, moves: _Moves) -> dict[Pair, tuple[int, ...]]:
        """Items of each pair of an edge's classes."""
        found = [self._copy_item(value, copy) for copy in moves.copies]
        paid = {
            pair: tuple([item for k in path if (item := found[k]) is not None])
            for pair, path in moves.paths.items()
        }
        return paid if None not in found else {pair: own for pair, own in paid.items() if own}

    def _copy_item(self, value: str, copy: _Copy) -> int | None:
        key = (value, copy.home, copy.after)
        if key in self.known:
            return self.known[key]
        first, last = self.spans[value]
        if copy.lasting:
            first, last = 0, len(self.graph.nodes) - 1
        found = self._item(key, copy.bytes, first, last, copy.load_s)
        if copy.lasting and found is not None:
            self.zeros.add(found)
        return found

    def _hop_item(self, value: str, home: Placement, hop: Hop) -> int | None:
        dtype, beside = self.graph.types[value].dtype, value in self.beside
        return self._copy_item(value, self._copy(dtype, home, hop, beside=beside))

    def _copy(self, dtype: str, home: Placement, hop: Hop, *, beside: bool) -> _Copy:
        held = self._bytes_of(dtype, hop.after, resident=bool(hop.zeros))
        if hop.aliases:
            held = tuple(
                0.0 if device in hop.aliases else size
                for device, size in zip(self.devices, held, strict=True)
            )
        # blocks of zeros are constants
        zeros = any(size for d, size in zip(self.devices, held, strict=True) if d in hop.zeros)
        load = self._hop_load(hop, beside=beside)
        return _Copy(self._number(home), self._number(hop.after), load, held, zeros)

    def _hop_load(self, hop: Hop, *, beside: bool) -> Vector:
        key = id(hop.comms), beside
        if key not in self.loads:
            seconds = [priced.busy_seconds(beside=beside) for priced in hop.comms]
            load = tuple(sum(one.get(d, 0.0) for one in seconds) for d in self.devices)
            self.loads[key] = hop.comms, load
        return self.loads[key][1]

    def _key(self, value: str, *at: Placement) -> Key:
        return (value, *map(self._number, at))

    def _number(self, at: Placement) -> int:
        found = self.numbers.get(at)
        if found is None:
            found = self.numbers[at] = len(self.placements)
            self.placements.append(at)
        return found

    def _item(self, key: Key, held: Vector, first: int, last: int, load: Vector = ()) -> int | None:
        """Index of the item of this key; None if it costs and holds nothing."""
        if key not in self.known:
            if any(held) or any(load):
                load_s = load or (0.0,) * len(self.devices)
                self.known[key] = len(self.items)
                self.items.append(Item(load_s, held, first, last))
                self.kept.append(key)
            else:
                self.known[key] = None
        return self.known[key]

    def _bytes(self, value: str, at: Placement, *, resident: bool = False) -> Vector:
        return self._bytes_of(self.graph.types[value].dtype, at, resident=resident)

    def _bytes_of(self, dtype: str, at: Placement, *, resident: bool) -> Vector:
        key = (dtype, self._number(at), resident)
        if key not in self.sizes:
            found = self.prices.local_bytes(at, dtype)
            held = (found.get(device, 0) for device in self.devices)
            self.sizes[key] = tuple(float(n if resident else with_headroom(n)) for n in held)
        return self.sizes[key]


@lru_cache(maxsize=65536)
def _label(mesh: DeviceMesh, layouts: tuple[tuple[str, DimLayout], ...]) -> str:
    return f"{mesh} {' '.join(f'{name}:{layout}' for name, layout in layouts)}".strip()


def _moves(pairs: Mapping[Pair, tuple[_Copy, ...] | None]) -> _Moves:
    index: dict[tuple[int, int], int] = {}
    copies: list[_Copy] = []
    paths = {}
    for pair, steps in pairs.items():
        if not steps:
            continue
        for copy in steps:
            if copy[:2] not in index:
                index[copy[:2]] = len(copies)
                copies.append(copy)
        paths[pair] = tuple([index[copy[:2]] for copy in steps])
    bad = frozenset(pair for pair, steps in pairs.items() if steps is None)
    return _Moves(bad, tuple(copies), paths)


def _contradictions(homes: Sequence[End], wants: Sequence[End], *, offered: bool) -> Iterator[Pair]:
    """Pairs in which a value is read that is not there, or an offered one is and is not taken."""
    for i, home in enumerate(homes):
        for j, want in enumerate(wants):
            there, read = not isinstance(home, bool), not isinstance(want, bool)
            if (read and not there) or (offered and there and want is False):
                yield i, j


def _classes(ends: Sequence[End]) -> tuple[tuple[End, ...], tuple[int, ...]]:
    """Distinct ends, and each one's index among them."""
    found: dict[End, int] = {}
    index = tuple(found.setdefault(at, len(found)) for at in ends)
    return tuple(found), index


def _last_uses(graph: Graph) -> Mapping[str, int]:
    """Position of the last use of every value or of a view of it; outputs live to the end.

    Nodes that take either operand do not count: what they read is kept for them apart.
    """
    end = len(graph.nodes) - 1
    last: dict[str, int] = dict.fromkeys(graph.outputs, end)
    for position in range(end, -1, -1):
        node = graph.nodes[position]
        row = row_of(node)
        if row is not None and row.either:
            continue
        lasting = max((last.get(v, position) for v in node.writes), default=position)
        for slot, value in enumerate(node.inputs):
            held = lasting if row is not None and row.view and slot == 0 else position
            if value:
                last[value] = max(last.get(value, -1), held, position)
        for value in node.captures:
            last[value] = max(last.get(value, -1), position)
    return {value: last.get(value, 0) for value in graph.types}
