"""The plans that differ from a plan in one node's strategy, and their costs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.prices.reshard import Resharder, most_joined
from partitioner.foundations import units
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh, copies_on
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place, resolve
from partitioner.ir.rule import Cut
from partitioner.problem.build import Built, build
from partitioner.report.planned import Planned
from partitioner.report.schema import contains
from partitioner.solver.joint.local_search import State, tables
from partitioner.strategies.derive import Rules, strategies
from partitioner.strategies.shares import device_shares

MAX_GROUPS = 8  #: Of more device groups than these only the nearest ones of a node are tried.


@dataclass(frozen=True)
class Alternative:
    """A strategy of one node, all other nodes keeping theirs; seconds are those of a whole step."""

    placed: PlacedNode
    step_s: float  #: Load of the busiest device, as the search counts it.
    work_s: float  #: Busy seconds of all devices together.
    over_bytes: float  #: Excess of the worst device over its limit, by the safe formula.
    chosen: bool  #: It is the plan's strategy.


@dataclass(frozen=True)
class Neighbourhood:
    """A plan, and all plans that differ from it in the strategy of one node.

    The strategies are on the plan's device groups; in a plan with stages on those of the node's
    stage.
    """

    graph: Graph
    plan: Plan
    cluster: Cluster

    @cached_property
    def rules(self) -> Rules:
        """The rules of the graph's nodes."""
        return Rules.of(self.graph)

    @cached_property
    def placed(self) -> Mapping[str, PlacedNode]:
        """Each node by name, with the plan's strategy."""
        return {placed.node.name: placed for placed in resolve(self.graph, self.plan)}

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each whole copy, which have what is in one group in the others, too."""
        return copies_on(self.plan.groups) or ((),)

    @cached_property
    def _state(self) -> State:
        chosen = [0] * len(self.graph.nodes)  # the plan's strategy is the first candidate
        return State(tables(self._built.problem), chosen, bytes_matter=True)

    def alternatives(self, node: Node) -> list[Alternative]:
        """Every strategy of a node: the plan's first, then by step time and total work."""
        state, position = self._state, self.graph.order[node.name]
        chosen, times = state.chosen[position], (self.plan.micro_batches or 1) / len(self._copies)
        alternatives = []
        for pick, placed in enumerate(self._built.candidates[node.name]):
            if pick != chosen and not state.allowed(position, pick):
                continue
            state.move(position, pick)
            step_s, work_s = times * max(state.load), times * math.fsum(state.load)
            over_bytes = state.excess_bytes()
            alternatives.append(Alternative(placed, step_s, work_s, over_bytes, pick == chosen))
        state.move(position, chosen)
        return sorted(alternatives, key=lambda a: (not a.chosen, a.step_s, a.work_s))

    def fits(self, alternative: Alternative) -> bool:
        """Test whether the changed plan, which has no stages, fits, by safe or exact memory."""
        return alternative.over_bytes <= 0 or self.evaluated(alternative).fits_exactly

    def evaluated(self, alternative: Alternative) -> Evaluation:
        """The referee's figures of the changed plan; a PhaseError if its stages cannot run."""
        return evaluate(self.graph, self.changed(alternative.placed), self.cluster)

    def changed(self, placed: PlacedNode) -> Plan:
        """The plan with this strategy for its node, without a certificate."""
        plan, name = self.plan, placed.node.name
        groups, stages, stage = plan.groups, plan.stages, self.placed[name].stage
        group = self._groups[stage].get(placed.mesh, len(groups))
        if group == len(groups):
            groups, stages = (*groups, placed.mesh), (*stages, stage)
        cuts = {factor: Cut.of(layout, placed.mesh) for factor, layout in placed.layouts.items()}
        nodes = {**plan.nodes, name: NodePlan(group, cuts)}
        return replace(plan, certificate=None, groups=groups, stages=stages, nodes=nodes)

    @cached_property
    def _groups(self) -> Mapping[int, Mapping[DeviceMesh, int]]:
        """The groups of each stage, with the number of the first of equal ones."""
        groups: dict[int, dict[DeviceMesh, int]] = defaultdict(dict)
        for number, mesh in enumerate(self.plan.groups):
            groups[self.plan.stages[number]].setdefault(mesh, number)
        return groups

    @cached_property
    def pairs(self) -> int:
        """Number of pairs of strategies of one node, to which the work of pricing them grows."""
        return sum(len(options) ** 2 for options in self._candidates.values())

    @cached_property
    def _candidates(self) -> Mapping[str, tuple[PlacedNode, ...]]:
        """The strategies of each node, the plan's first."""
        meshes = dict.fromkeys(self.plan.groups)
        shares = device_shares(self.graph, self.rules, self.cluster)
        offered = {mesh: strategies(self.graph, self.rules, mesh, shares) for mesh in meshes}
        candidates: dict[str, tuple[PlacedNode, ...]] = {}
        for node in self.graph.nodes:
            placed = self.placed[node.name]
            options = [placed, *(p for mesh in self._near(node) for p in offered[mesh][node.name])]
            if placed.rule is None and len(self._copies) == 1:
                devices = sorted({d for mesh in self._groups[placed.stage] for d in mesh.devices})
                for device in devices if len(devices) <= MAX_GROUPS else ():
                    single = DeviceMesh.single(device)
                    options.append(place(self.graph, node, single, {}, None))
            distinct: dict[object, PlacedNode] = {}
            for option in options:
                distinct.setdefault((option.mesh, option.ins, option.outs), option)
            candidates[node.name] = tuple(distinct.values())
        return candidates

    @cached_property
    def _built(self) -> Built:
        of_candidates = (p.mesh for options in self._candidates.values() for p in options)
        meshes = dict.fromkeys((*self.plan.groups, *of_candidates))
        prices = DeviceColumns(self.graph, Resharder(self.cluster, most_joined(self.graph)))
        return build(self.graph, tuple(meshes), self._candidates, prices)

    def _near(self, node: Node) -> tuple[DeviceMesh, ...]:
        """Groups that a node may move to: of many its own, its neighbours' and the idlest."""
        stage = self.placed[node.name].stage
        own = self._groups[stage]
        if len(own) <= MAX_GROUPS:
            return tuple(own)
        graph = self.graph
        producers = [graph.producers[value] for value in node.reads if value in graph.producers]
        readers = [reader for value in node.writes for reader in graph.consumers[value]]
        near = [self.placed[n.name].mesh for n in (node, *producers, *readers)]
        return tuple(m for m in dict.fromkeys([*near, self._idlest[stage]]) if m in own)

    @cached_property
    def _idlest(self) -> Mapping[int, DeviceMesh]:
        """The group of each stage whose busiest device has the least load."""
        load = evaluate(self.graph, self.plan, self.cluster).load_s
        return {
            stage: min(meshes, key=lambda mesh: max(load[device] for device in mesh.devices))
            for stage, meshes in self._groups.items()
        }


def not_taken(result: Planned, nodes: Sequence[Node]) -> str:
    """Say why a plan has no other strategy of some nodes, with which its step would be shorter."""
    bound = list(dict.fromkeys(text for node in nodes for text in constraints_on(result, node)))
    cert = result.plan.certificate
    if result.objective != "throughput":
        return f"a shorter step was not asked for: the plan's objective is {result.objective}"
    if bound:
        return f"constrained by {'; '.join(bound)}"
    if cert is None:
        return "the plan was not searched for"
    ended = f"the search ended with a gap of {units.share(cert.gap)}"
    return f"{ended}: a smaller --gap or a longer --time-limit may find it"


def constraints_on(result: Planned, node: Node) -> list[str]:
    """List what the request asked for that leaves out strategies of a node."""
    position = result.graph.order[node.name]
    bound = result.summary.get("bound_by", {})
    return [text for text, nodes in bound.items() if contains(nodes, position)]


def best_other(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The best strategy but the plan's, the first; if it fits, those that fit go first."""
    chosen, *others = alternatives

    def rank(other: Alternative) -> tuple[bool, float, float]:
        return chosen.over_bytes <= 0 < other.over_bytes, other.step_s, other.work_s

    return min(others, key=rank, default=None)
