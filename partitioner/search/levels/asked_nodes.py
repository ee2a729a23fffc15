"""What a request decides of single nodes, in plans by levels: a kept plan, pins, places.

Levels are searched as if these nodes were free. Then each has its devices and, where these are
several, the strategy that costs least beside its producers; the referee prices the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from partitioner.cost_model.prices.compute import node_seconds
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place
from partitioner.ir.rule import Cut
from partitioner.problem.build import kept_decision, planned_on
from partitioner.search.levels.axis_sharder import weight_side
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.derive import Rules, strategies


def on_axes(asked: Constraints) -> Constraints:
    """The constraints as far as levels honour them: without those that decide single nodes.

    What a kept plan cuts over a mesh axis is cut along the same factors where the axis is searched.
    """
    pins, kept = tuple(pin for pin in asked.pins if not pin.devices), asked.plan
    cut: dict[str, dict[str, set[str]]] = {}
    for name, decision in kept.nodes.items() if kept is not None else ():
        for factor, of_factor in decision.cuts.items():
            for axis in of_factor.axes:
                cut.setdefault(axis, {}).setdefault(name, set()).add(factor)
    busy = {
        axis: {name: frozenset(factors) for name, factors in nodes.items()}
        for axis, nodes in cut.items()
    }
    return replace(asked, pins=pins, plan=None, places={}, busy={**asked.busy, **busy})


Follows = Literal["none", "between", "all"]


@dataclass
class AskedNodes:
    """The decisions of a request on the nodes of one plan."""

    graph: Graph  #: That of the plan.
    plan: Plan
    constraints: Constraints
    resharder: Resharder
    #: Which free nodes go where their first producer or reader is: none, those between decided
    #: nodes alone, or all.
    follows: Follows = "none"
    _placed: dict[str, PlacedNode] = field(default_factory=dict)  #: Those that are decided.
    _planned: dict[str, PlacedNode] = field(default_factory=dict)  #: Others, as of the plan.

    def decided(self) -> Plan:
        """The plan with the decisions in it; the same if there are none.

        Raises:
            ConstraintError: A pin leaves a node without a strategy.
        """
        if not self._meshes:
            return self.plan
        for node in self.graph.nodes:
            if node.name in self._meshes:
                self._placed[node.name] = self._kept(node) or self._cheapest(node)
        groups = dict.fromkeys((*self.plan.groups, *(p.mesh for p in self._placed.values())))
        index = {mesh: position for position, mesh in enumerate(groups)}
        nodes = dict(self.plan.nodes)
        for name, placed in self._placed.items():
            cuts = {f: Cut.of(layout, placed.mesh) for f, layout in placed.layouts.items()}
            nodes[name] = NodePlan(index[placed.mesh], cuts)
        _, plan = planned_on(self.graph, self.resharder.cluster, tuple(groups), nodes)
        return plan

    @cached_property
    def _rules(self) -> Rules:
        return Rules.of(self.graph)

    @cached_property
    def _meshes(self) -> Mapping[str, DeviceMesh]:
        """The devices of each node that is decided, and of those that follow it."""
        asked = ((node.name, self._mesh(node)) for node in self.graph.nodes)
        meshes = self._tied({name: mesh for name, mesh in asked if mesh is not None})
        if not meshes or self.follows == "none":
            return meshes
        return self._with_all(meshes) if self.follows == "all" else self._with_between(meshes)

    def _with_between(self, meshes: Mapping[str, DeviceMesh]) -> Mapping[str, DeviceMesh]:
        more = dict(meshes)
        for node in self.graph.nodes:
            producers, readers = self._producers(node), self._readers(node)
            if producers and readers and meshes.keys() >= {*producers, *readers}:
                more.setdefault(node.name, meshes[producers[0]])
        return more

    def _with_all(self, meshes: Mapping[str, DeviceMesh]) -> Mapping[str, DeviceMesh]:
        """The devices of all nodes: buffers go with what reads them."""
        buffers = frozenset(itertools.chain(*self._ties))
        for is_back in (False, True):
            more = dict(meshes)
            for node in self.graph.nodes[::-1] if is_back else self.graph.nodes:
                near = self._readers(node) if is_back else self._producers(node)
                mesh = next((more[name] for name in near if name in more), None)
                if mesh is not None and (is_back or node.name not in buffers):
                    more.setdefault(node.name, mesh)
            meshes = self._tied(more)
        return meshes

    def _tied(self, meshes: Mapping[str, DeviceMesh]) -> dict[str, DeviceMesh]:
        """The devices of some nodes, and of those that share a buffer with one."""
        tied = dict(meshes)
        for pairs in (self._ties[::-1], self._ties):  # to what is stored, and from there to all
            for producer, reader in pairs:
                mesh = tied.get(reader) or tied.get(producer)
                if mesh is not None:
                    tied.setdefault(producer, mesh)
                    tied.setdefault(reader, mesh)
        return tied

    def _producers(self, node: Node) -> list[str]:
        made = (self.graph.producers.get(value) for value in node.reads)
        return [producer.name for producer in made if producer is not None]

    def _readers(self, node: Node) -> list[str]:
        return [reader.name for value in node.writes for reader in self.graph.consumers[value]]

    def _mesh(self, node: Node) -> DeviceMesh | None:
        kept, own = self._kept(node), self.constraints.group_of(node)
        if kept is not None:
            return kept.mesh
        if own:
            return DeviceMesh.grid((len(own),), own)
        axis, at = self.constraints.places.get(node.name, ("", 0))
        meshes = (mesh.part(axis, at) for mesh in self.plan.groups if axis in mesh.names)
        return next(meshes, None)

    def _kept(self, node: Node) -> PlacedNode | None:
        return kept_decision(self.graph, self.constraints.plan, self._rules, node)

    @cached_property
    def _ties(self) -> tuple[tuple[str, str], ...]:
        """Pairs of nodes that share a buffer: stored values, their views, writes in place."""
        weights, pairs = frozenset(weight_side(self.graph)), []
        for node in self.graph.nodes:
            slot = row_of(node).in_place
            slot = 0 if slot is None and node.name in weights and node.inputs else slot
            producer = self.graph.producers.get(node.inputs[slot]) if slot is not None else None
            if producer is not None:
                pairs.append((producer.name, node.name))
        return tuple(pairs)

    def _at(self, node: Node) -> PlacedNode:
        """A node as it is placed so far."""
        if node.name in self._placed:
            return self._placed[node.name]
        if node.name not in self._planned:
            placed = kept_decision(self.graph, self.plan, self._rules, node)
            assert placed is not None
            self._planned[node.name] = placed
        return self._planned[node.name]

    def _cheapest(self, node: Node) -> PlacedNode:
        """The strategy on the node's devices of fewest seconds, with the moves of its operands."""
        mesh = self._meshes[node.name]
        options = strategies(self.graph, self._rules, mesh)[node.name]
        options = options or (
            place(self.graph, node, DeviceMesh.single(mesh.devices[0]), {}, None),
        )
        kept = self.constraints.keep(node, options, f"on {mesh}")
        alike = tuple(placed for placed in kept if self._shares_buffers(node, placed))
        if not alike:
            raise ConstraintError(
                f"constraints leave no strategy for {node.name!r} ({node.op}) on {mesh} beside the "
                "nodes of the same buffer"
            )
        return min(alike, key=self._seconds)

    def _shares_buffers(self, node: Node, placed: PlacedNode) -> bool:
        """Test whether what is written in place lies as its producer has it."""
        slot = row_of(node).in_place
        if slot is not None and node.inputs[slot] in self.graph.producers:
            producer = self.graph.producers[node.inputs[slot]]
            if dict(self._at(producer).results())[node.inputs[slot]] != placed.ins[slot]:
                return False
        return all(
            kept.ins[slot] == home
            for value, home in placed.results()
            for slot, kept in self._kept_writers(value)
        )

    def _kept_writers(self, value: str) -> Iterator[tuple[int, PlacedNode]]:
        """Yield the nodes of a kept plan that write a value in place, each with its operand."""
        for reader in self.graph.consumers[value]:
            slot, kept = row_of(reader).in_place, self._kept(reader)
            if kept is not None and slot is not None and reader.inputs[slot] == value:
                yield slot, kept

    def _seconds(self, placed: PlacedNode) -> float:
        seconds = max(node_seconds(self.graph, placed, self.resharder.cluster).values())
        for value, want in placed.operands():
            producer = self.graph.producers.get(value)
            if producer is None:
                continue
            home = dict(self._at(producer).results())[value]
            hops = self.resharder.hops(self.graph.types[value].dtype, home, want)
            comms = (priced for hop in hops for priced in hop.comms)
            seconds += sum(max(priced.seconds.values(), default=0.0) for priced in comms)
        return seconds
