"""A finished plan as a point of the problem: what another choice at one node would have cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.columns import DeviceColumns
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.reshard import Resharder
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place, resolve
from partitioner.ir.rule import Cut
from partitioner.problem.build import Built, build
from partitioner.solver.joint.state import State, tables
from partitioner.strategies.derive import Rules, strategies
from partitioner.strategies.speeds import device_speeds

#: On more groups than these a node's strategies are looked at on the nearest ones only.
MAX_GROUPS = 8


@dataclass(frozen=True)
class Alternative:
    """A strategy of one node, all other nodes keeping theirs.

    Attributes:
        placed: The strategy.
        step_s: Load of the busiest device, as the search counts it.
        work_s: Busy seconds of all devices together.
        over_bytes: Bytes that the worst device is over its limit by the safe formula.
        chosen: Whether it is the plan's own.
    """

    placed: PlacedNode
    step_s: float
    work_s: float
    over_bytes: float
    chosen: bool


class Context:
    """All strategies of all nodes around a plan, on the plan's device groups.

    Args:
        graph: The model.
        plan: The plan.
        cluster: What it is for.
    """

    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster) -> None:
        self.graph, self.plan, self.cluster = graph, plan, cluster
        self.rules = Rules.of(graph)
        self.placed = {placed.node.name: placed for placed in resolve(graph, plan)}
        self.built = self._build()
        own = [0] * len(graph.nodes)  # the plan's own strategy is the first candidate
        self._state = State(tables(self.built.problem), own, bytes_matter=True)

    def alternatives(self, node: Node) -> list[Alternative]:
        """Every strategy of a node: the plan's own first, then by step time and total work."""
        position = self.graph.order[node.name]
        own = self._state.chosen[position]
        found = []
        for pick, placed in enumerate(self.built.candidates[node.name]):
            if pick != own and not self._state.allowed(position, pick):
                continue
            self._state.move(position, pick)
            found.append(
                Alternative(
                    placed,
                    max(self._state.load),
                    math.fsum(self._state.load),
                    self._state.excess_bytes(),
                    pick == own,
                )
            )
        self._state.move(position, own)
        return sorted(found, key=lambda a: (not a.chosen, a.step_s, a.work_s))

    def best_of(self, own: Alternative, others: Sequence[Alternative]) -> Alternative | None:
        """The first of the others: what fits, if the plan itself does by the safe formula."""

        def rank(entry: Alternative) -> tuple[bool, float, float]:
            return own.over_bytes <= 0 < entry.over_bytes, entry.step_s, entry.work_s

        return min(others, key=rank, default=None)

    def fits(self, entry: Alternative) -> bool:
        """Whether the changed plan fits, by the safe formula or exactly."""
        return entry.over_bytes <= 0 or self.evaluated(entry).fits_exactly

    def evaluated(self, alternative: Alternative) -> Evaluation:
        """The referee's figures of the plan with this strategy in it."""
        return evaluate(self.graph, self.changed(alternative.placed), self.cluster)

    def changed(self, placed: PlacedNode) -> Plan:
        """The plan with another strategy for one node; without a certificate."""
        groups = dict.fromkeys((*self.plan.groups, placed.mesh))
        cuts = {name: Cut.of(layout, placed.mesh) for name, layout in placed.layouts.items()}
        decision = NodePlan(list(groups).index(placed.mesh), cuts)
        nodes = {**self.plan.nodes, placed.node.name: decision}
        return replace(self.plan, groups=tuple(groups), nodes=nodes, certificate=None)

    def _build(self) -> Built:
        meshes = dict.fromkeys(self.plan.groups)
        speeds = device_speeds(self.graph, self.rules, self.cluster)
        offered = {mesh: strategies(self.graph, self.rules, mesh, speeds) for mesh in meshes}
        candidates: dict[str, tuple[PlacedNode, ...]] = {}
        for node in self.graph.nodes:
            own = self.placed[node.name]
            near = self._near(node)
            options = [own, *(p for mesh in near for p in offered[mesh][node.name])]
            if own.rule is None:
                options += self._homes(node)
            candidates[node.name] = tuple(_distinct(options))
            meshes.update(dict.fromkeys(p.mesh for p in candidates[node.name]))
        resharder = Resharder(self.cluster)
        prices = DeviceColumns(self.graph, resharder)
        return build(self.graph, tuple(meshes), candidates, prices)

    def _near(self, node: Node) -> tuple[DeviceMesh, ...]:
        """Groups that a node might move to: all; of many its own, its neighbours', the idlest."""
        if len(self.plan.groups) <= MAX_GROUPS:
            return self.plan.groups
        graph = self.graph
        made = [graph.producers[value] for value in node.reads if value in graph.producers]
        read = [reader for value in node.writes for reader in graph.consumers[value]]
        near = dict.fromkeys(self.placed[other.name].mesh for other in (node, *made, *read))
        return tuple({**near, self._idlest: None})

    @cached_property
    def _idlest(self) -> DeviceMesh:
        load = evaluate(self.graph, self.plan, self.cluster).load_s
        return min(self.plan.groups, key=lambda mesh: max(load[d] for d in mesh.devices))

    def _homes(self, node: Node) -> Iterator[PlacedNode]:
        """A node without a rule may run on any device of the plan."""
        devices = sorted({d for mesh in self.plan.groups for d in mesh.devices})
        for device in devices if len(devices) <= MAX_GROUPS else ():
            yield place(self.graph, node, DeviceMesh.single(device), {}, None)


def _distinct(options: list[PlacedNode]) -> Iterator[PlacedNode]:
    seen: set[object] = set()
    for placed in options:
        key = (placed.mesh, placed.ins, placed.outs)
        if key not in seen:
            seen.add(key)
            yield placed
