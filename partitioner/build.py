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

from partitioner.cost_model.held import held_bytes
from partitioner.cost_model.memory import with_headroom
from partitioner.cost_model.overlap import beside_compute
from partitioner.cost_model.prices import Prices
from partitioner.cost_model.reshard import Hop
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import NodePlan, PlacedNode
from partitioner.ir.rule import Cut
from partitioner.solver.problem import Choice, Edge, Hold, Item, Pair, Problem

Candidates = Mapping[str, Sequence[PlacedNode]]  #: Strategies of each node, over all groups.


#: Where an edge's end has the value; whether its node is left out (True), or reads another operand.
End = Placement | bool
Move = tuple[Pair, Placement, tuple[Hop, ...]]  #: Classes of an edge, home, reshard.
Key = tuple[str, *tuple[Placement, ...]]  #: What an item is of: a value, and its placements.


@dataclass(frozen=True)
class Built:
    """A problem with what its choices stand for.

    Attributes:
        problem: For the solver.
        groups: Device groups by the choices' group index.
        candidates: Strategy of each choice, by node.
        values: Of which value of the graph each item is.
    """

    problem: Problem
    groups: tuple[DeviceMesh, ...]
    candidates: Candidates
    values: tuple[str, ...]

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
    prices: Prices,
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
    prices: Prices
    items: list[Item] = field(default_factory=list)
    kept: list[Key] = field(default_factory=list)
    known: dict[Key, int | None] = field(default_factory=dict)
    moves: dict[object, tuple[frozenset[Pair], tuple[Move, ...]]] = field(default_factory=dict)
    #: By identity; the hop is kept so that its identity lasts.
    hops: dict[tuple[int, bool], tuple[Hop, list[float], list[float], bool]] = field(
        default_factory=dict
    )

    def run(self, interchangeable: tuple[tuple[int, ...], ...]) -> Built:
        graph = self.graph
        self.devices = self.prices.devices
        self.ends = _last_uses(graph)
        self.beside = beside_compute(graph)
        index = {mesh: i for i, mesh in enumerate(self.groups)}
        nodes = tuple(
            tuple(self._choice(placed, index[placed.mesh]) for placed in self.candidates[node.name])
            for node in graph.nodes
        )
        holds = tuple(self._hold(position, node) for position, node in enumerate(graph.nodes))
        edges = tuple(edge for node in graph.nodes for edge in self._edges(node))
        problem = Problem(
            devices=len(self.devices),
            limit_bytes=tuple(float(self.prices.memory_bytes(d)) for d in self.devices),
            nodes=nodes,
            names=tuple(node.name for node in graph.nodes),
            edges=edges,
            holds=holds,
            items=tuple(self.items),
            interchangeable=interchangeable,
        )
        values = tuple(value for value, *_ in self.kept)
        return Built(problem, self.groups, self.candidates, values)

    def _choice(self, placed: PlacedNode, group: int) -> Choice:
        seconds = self.prices.node_seconds(placed)
        load = [seconds.get(device, 0.0) for device in self.devices]
        for value, at in self._pending_outputs(placed):
            if not self.graph.consumers[value]:
                for hop in self._resolve(value, at):
                    more = self._hop_load(hop, beside=False)
                    load = [a + b for a, b in zip(load, more, strict=True)]
        cuts = " ".join(f"{name}:{layout}" for name, layout in placed.layouts.items())
        label = "left out" if placed.absent else f"{placed.mesh} {cuts}".strip()
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
        return self.prices.resharder.hops(self.graph.types[value].dtype, at, done)

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
                yield self._item((value, at), self._bytes(value, at, resident=True), 0, last)
            elif value not in self.graph.producers:
                yield from self._fed(value, at)
        for value, at in self._pending_outputs(placed):
            if self.graph.consumers[value]:
                yield from (self._hop_item(value, at, hop) for hop in self._resolve(value, at))
            else:
                done = self._resolve(value, at)[-1].after
                yield self._item((value, at, done), self._bytes(value, done), first, last)
        row = row_of(node)
        if row is not None and row.view and not row.either:
            return
        if row is not None and row.stored:
            for value, at in placed.results():
                yield self._item((value, at), self._stored(node, value, at), 0, last)
            return
        for value, at in placed.results():
            end = max(first, self.ends[value])
            yield self._item((value, at), self._bytes(value, at), first, end)

    def _fed(self, value: str, at: Placement) -> Iterable[int | None]:
        """A graph input where a node wants it; a pending sum is the input and blocks of zeros."""
        plain = Placement(at.mesh, at.sharding.without_partial())
        first = min(self.graph.order[node.name] for node in self.graph.consumers[value])
        yield self._item((value, plain), self._bytes(value, plain), first, self.ends[value])
        for hop in self.prices.resharder.hops(self.graph.types[value].dtype, plain, at):
            held = self._bytes(value, at)
            zeros = [
                size if device in hop.zeros else 0.0
                for device, size in zip(self.devices, held, strict=True)
            ]
            yield self._item((value, plain, at), zeros, 0, len(self.graph.nodes) - 1)

    def _stored(self, node: Node, value: str, at: Placement) -> list[float]:
        """Bytes of a stored value, and of what is kept beside it."""
        kind = self.graph.types[value].dtype
        held = self._bytes(value, at, resident=True)
        return [held_bytes(node, kind, nbytes) for nbytes in held]

    def _edges(self, node: Node) -> Iterable[Edge]:
        """One edge an operand slot: a node may want one value in two placements."""
        for slot, value in enumerate((*node.inputs, *node.captures)):
            producer = self.graph.producers.get(value)
            if producer is not None:
                yield self._edge(value, producer, node, slot)

    def _stays(self, node: Node, slot: int) -> bool:
        row = row_of(node)
        return row is not None and row.in_place == slot

    def _edge(self, value: str, producer: Node, consumer: Node, slot: int) -> Edge:
        homes, out_class = _classes(
            [dict(placed.results()).get(value, True) for placed in self.candidates[producer.name]]
        )
        wants, in_class = _classes(
            [placed.ins[slot] or placed.absent for placed in self.candidates[consumer.name]]
        )
        forbidden, moves = self._moves(self.graph.types[value].dtype, homes, wants)
        if self.graph.optional:
            offered = producer.name in self.graph.optional
            forbidden |= frozenset(_contradictions(homes, wants, offered=offered))
        if self._stays(consumer, slot):
            pairs = ((i, j) for i in range(len(homes)) for j in range(len(wants)))
            forbidden, moves = frozenset(p for p in pairs if homes[p[0]] != wants[p[1]]), ()
        items = {
            pair: found
            for pair, home, hops in moves
            if (
                found := tuple(i for h in hops if (i := self._hop_item(value, home, h)) is not None)
            )
        }
        row = row_of(consumer)
        if row is not None and row.either:
            reshards = {pair: hops for pair, _, hops in moves}
            for i, j in itertools.product(range(len(homes)), range(len(wants))):
                home = homes[i]
                if (
                    not isinstance(home, bool)
                    and not isinstance(wants[j], bool)
                    and (i, j) not in forbidden
                ):
                    held = self._kept(value, consumer, home, reshards.get((i, j), ()))
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

    def _kept(self, value: str, taker: Node, home: Placement, hops: Sequence[Hop]) -> Iterator[int]:
        """What is held of a value from its last other use on for the node that takes it."""
        order = self.graph.order
        made = order[self.graph.producers[value].name]
        first, last = max(made, self.ends[value]) + 1, order[taker.name] - 1
        if first > last:
            return
        dtype, beside = self.graph.types[value].dtype, value in self.beside
        copies = [(home, self._bytes(value, home))]
        copies += [(hop.after, self._hop_price(dtype, hop, beside=beside)[0]) for hop in hops]
        for at, held in copies:
            item = self._item((taker.outputs[0], home, at, at), held, first, last)
            if item is not None:
                yield item

    def _moves(
        self, dtype: str, homes: tuple[End, ...], wants: tuple[End, ...]
    ) -> tuple[frozenset[Pair], tuple[Move, ...]]:
        """Pairs of placements that no reshard joins, and the reshards of the others.

        Blocks of a model repeat, so the same lists of placements come again and again.
        """
        key = (dtype, homes, wants)
        if key not in self.moves:
            resharder = self.prices.resharder
            pairs = {
                (i, j): (a, b)
                for i, a in enumerate(homes)
                for j, b in enumerate(wants)
                if not isinstance(a, bool) and not isinstance(b, bool)
            }
            bad = frozenset(pair for pair, ends in pairs.items() if not resharder.allows(*ends))
            self.moves[key] = (
                bad,
                tuple(
                    (pair, home, hops)
                    for pair, (home, want) in pairs.items()
                    if pair not in bad and (hops := resharder.hops(dtype, home, want))
                ),
            )
        return self.moves[key]

    def _hop_item(self, value: str, home: Placement, hop: Hop) -> int | None:
        key = (value, home, hop.after)
        if key in self.known:
            return self.known[key]
        dtype, beside = self.graph.types[value].dtype, value in self.beside
        held, load, lasting = self._hop_price(dtype, hop, beside=beside)
        first = self.graph.order[self.graph.producers[value].name]
        last = max(first, self.ends[value])
        if lasting:
            first, last = 0, len(self.graph.nodes) - 1
        return self._item(key, held, first, last, load)

    def _hop_price(
        self, dtype: str, hop: Hop, *, beside: bool
    ) -> tuple[list[float], list[float], bool]:
        """Bytes and seconds of a hop on each column; whether what it makes is a constant."""
        key = id(hop), beside
        if key not in self.hops:
            sizes = self._bytes_of(dtype, hop.after, resident=bool(hop.zeros))
            devices = self.devices
            held = [
                0.0 if device in hop.aliases else size
                for device, size in zip(devices, sizes, strict=True)
            ]
            zeros = (size for d, size in zip(devices, held, strict=True) if d in hop.zeros)
            # blocks of zeros are constants
            load = self._hop_load(hop, beside=beside)
            self.hops[key] = hop, held, load, any(zeros)
        return self.hops[key][1:]

    def _hop_load(self, hop: Hop, *, beside: bool) -> list[float]:
        seconds = [priced.busy_seconds(beside=beside) for priced in hop.comms]
        return [sum(one.get(device, 0.0) for one in seconds) for device in self.devices]

    def _item(
        self, key: Key, held: Sequence[float], first: int, last: int, load: Sequence[float] = ()
    ) -> int | None:
        """Index of the item of this key; None if it costs and holds nothing."""
        if key not in self.known:
            if any(held) or any(load):
                load_s = tuple(load) or (0.0,) * len(self.devices)
                self.items.append(Item(load_s=load_s, bytes=tuple(held), first=first, last=last))
                self.kept.append(key)
                self.known[key] = len(self.items) - 1
            else:
                self.known[key] = None
        return self.known[key]

    def _bytes(self, value: str, at: Placement, *, resident: bool = False) -> list[float]:
        return self._bytes_of(self.graph.types[value].dtype, at, resident=resident)

    def _bytes_of(self, dtype: str, at: Placement, *, resident: bool) -> list[float]:
        sizes = self.prices.local_bytes(at, dtype)
        held = (sizes.get(device, 0) for device in self.devices)
        return [float(size if resident else with_headroom(size)) for size in held]


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
