"""The plans that differ from a plan in one node's strategy: their costs, and a descent over them.

A search ends with its best plan by the solvers' bounds, at a gap: a change of one node may still
make it cheaper. So the last step of each search takes such changes (`improved`), and the report of
the plan prices the same ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.prices.reshard import Resharder, remembering
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh, copies_on
from partitioner.ir.pieces.folding import Block, blocks
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place, resolve
from partitioner.ir.rule import Cut
from partitioner.problem.build import Built, build
from partitioner.search.outcome import Outcome, OutOfTime, in_order_of_use
from partitioner.search.request import Request
from partitioner.solver.joint.incumbents import NODE_STEPS
from partitioner.solver.joint.local_search import MOVE_STEPS, Goal, State, descend, peaks, tables
from partitioner.solver.progress import ROUNDING
from partitioner.solver.referee import Objective, latency_s
from partitioner.solver.work import Work
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.derive import Rules, device_shares, strategies

MAX_GROUPS = 8  #: Of more device groups than these only the nearest ones of a node are tried.
#: Nodes times devices above which changes of nodes are not priced.
MAX_PRICED = 320_000
#: Pairs of strategies of one node, of all nodes, above which they are not priced: 65,000 take a
#: second on a few devices.
MAX_PAIRS = 400_000
#: Devices above which a pair takes longer, for a reshard has all of them.
PAIR_DEVICES = 8
#: Plans times nodes above which they are not priced where each is timed: 200,000 take a second.
MAX_TIMED = 1_000_000
#: Tasks of a step times nodes, above which the other strategies of nodes in stages are not priced:
#: the step is simulated once for each node.
MAX_SIMULATED = 2_000_000
#: Nodes of the graph times plans with a changed block: of more, the first are priced, for each
#: makes a schedule.
MAX_MOVES = 40_000
#: A block belongs to a group that runs so large a share of its nodes.
BELONGS = 0.9


@dataclass(frozen=True)
class Alternative:
    """A strategy of one node, all other nodes keeping theirs; seconds are those of a whole step."""

    placed: PlacedNode
    #: Seconds of a step, as the search counts it; in stages an estimate.
    step_s: float
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
    constraints: Constraints = field(default_factory=Constraints)  #: What all strategies honour.
    check: Callable[[], None] = lambda: None  #: Called at each node, and may raise.

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
            step_s, work_s = self.step_s(state), times * math.fsum(state.load)
            over_bytes = state.excess_bytes()
            alternatives.append(Alternative(placed, step_s, work_s, over_bytes, pick == chosen))
        state.move(position, chosen)
        return sorted(alternatives, key=lambda a: (not a.chosen, a.step_s, a.work_s))

    def step_s(self, state: State) -> float:
        """Seconds of a step: as of `Evaluation.step_s`, or of a pipeline about as many.

        Of a pipeline those are one micro-batch through all stages, and then each of the others
        through the slowest one.
        """
        if self.plan.micro_batches:
            loads = (max(state.load[device] for device in own) for own in self._stages)
            first_s = math.fsum(loads)
            return first_s + (self.plan.micro_batches - 1) * max(state.load)
        if self._waits and self._has_several_groups(state):
            return latency_s(self._built.problem, state.chosen)
        return max(state.load) / len(self._copies)

    @cached_property
    def _stages(self) -> frozenset[frozenset[int]]:
        """The devices of each stage, once where several stages have the same."""
        return frozenset(map(frozenset, self.plan.stage_devices.values()))

    @cached_property
    def _waits(self) -> bool:
        """Tell whether a step takes longer than its busiest device on several groups of devices."""
        devices = {p.mesh.devices for options in self._candidates.values() for p in options}
        return bool(self.graph.backward) and len(devices) > 1

    def _has_several_groups(self, state: State) -> bool:
        nodes = zip(self._built.problem.nodes, state.chosen, strict=True)
        used = {choices[pick].group for choices, pick in nodes}
        return len({self._built.groups[group].devices for group in used}) > 1

    @cached_property
    def is_priced_soon(self) -> bool:
        """Tell whether there are so few plans that all of them are priced in seconds."""
        nodes, devices = len(self.graph.nodes), len(self.cluster)
        if nodes * devices > MAX_PRICED:
            return False
        if self.pairs * max(1.0, devices / PAIR_DEVICES) > MAX_PAIRS:
            return False
        plans = sum(map(len, self._candidates.values()))
        return not self._waits or plans * nodes <= MAX_TIMED

    @cached_property
    def is_simulated_soon(self) -> bool:
        """Tell whether a change of each node is simulated in seconds: tasks times nodes."""
        placed = tuple(self.placed.values())
        tasks = schedule(self.graph, placed, self.cluster, pipeline=self.plan.pipeline)
        return sum(map(tasks.times, tasks.tasks)) * len(self.graph.nodes) <= MAX_SIMULATED

    def descend(self, referee: _Referee, work: Work) -> None:
        """Change single nodes, and runs of them, as long as the referee prices the plan lower."""
        problem, objective = self._built.problem, referee.objective
        held = zip(problem.limit_bytes, self._state.peaks(), strict=True)
        within = replace(problem, limit_bytes=tuple(max(pair) for pair in held))
        state = State(tables(within), self._state.chosen, bytes_matter=True)
        is_latency = objective == "latency"
        goals: Mapping[bool, Goal] = {
            False: lambda state: (self.step_s(state),),
            True: lambda state: (latency_s(problem, state.chosen),),
        }
        goal = peaks if objective == "memory" else goals[is_latency]
        steps = NODE_STEPS * len(problem.nodes) if is_latency else MOVE_STEPS

        def accepts(state: State) -> bool:
            self.check()
            return referee.takes(self.plan_of(state))

        descend(state, goal, accepts, work, 2 * steps)

    def fits(self, alternative: Alternative) -> bool:
        """Test whether the changed plan, which has no stages, fits, by safe or exact memory."""
        return alternative.over_bytes <= 0 or self.evaluated(alternative).fits_exactly

    def evaluated(self, alternative: Alternative) -> Evaluation:
        """The referee's figures of the changed plan; a PhaseError if its stages cannot run."""
        return evaluate(self.graph, self.changed(alternative.placed), self.cluster)

    def changed(self, *changes: PlacedNode) -> Plan:
        """The plan with these strategies for their nodes, without a certificate."""
        plan = replace(self.plan, certificate=None)
        numbers = {stage: dict(groups) for stage, groups in self._groups.items()}
        for placed in changes:
            name, mesh = placed.node.name, placed.mesh
            groups, stage = plan.groups, self.placed[name].stage
            number = numbers[stage].setdefault(mesh, len(groups))
            if number == len(groups):
                plan = replace(plan, groups=(*groups, mesh), stages=(*plan.stages, stage))
            cuts = {factor: Cut.of(layout, mesh) for factor, layout in placed.layouts.items()}
            plan = replace(plan, nodes={**plan.nodes, name: NodePlan(number, cuts)})
        return plan

    def plan_of(self, state: State) -> Plan:
        """The plan of a state of the descent."""
        changes = zip(self.graph.nodes, state.chosen, strict=True)
        return self.changed(
            *(self._built.candidates[node.name][pick] for node, pick in changes if pick)
        )

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
        offered = {
            mesh: strategies(self.graph, self.rules, mesh, shares, check=self.check)
            for mesh in meshes
        }
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
            for option in self._kept(node, options):
                distinct.setdefault((option.mesh, option.ins, option.outs), option)
            candidates[node.name] = tuple(distinct.values())
        return candidates

    @cached_property
    def _built(self) -> Built:
        of_candidates = (p.mesh for options in self._candidates.values() for p in options)
        meshes = dict.fromkeys((*self.plan.groups, *of_candidates))
        prices = DeviceColumns(self.graph, remembering(self.cluster, self.graph))
        return build(self.graph, tuple(meshes), self._candidates, prices, check=self.check)

    def _kept(self, node: Node, options: Sequence[PlacedNode]) -> Sequence[PlacedNode]:
        """Leave out strategies that constraints forbid, but for the first, which is the plan's."""
        asked = self.constraints
        self.check()
        if node.name in asked.places or (asked.plan and node.name in asked.plan.nodes):
            return options[:1]
        kept = asked.keep(node, options, "in the plan")
        return [options[0], *(option for option in options[1:] if option in kept)]

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


def best_other(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The best strategy but the plan's, the first; if it fits, those that fit go first."""
    chosen, *others = alternatives

    def rank(other: Alternative) -> tuple[bool, float, float]:
        return chosen.over_bytes <= 0 < other.over_bytes, other.step_s, other.work_s

    return min(others, key=rank, default=None)


@dataclass(frozen=True)
class BlockChange:
    """A change of a whole block, all other nodes keeping their decisions."""

    block: Block
    group: int  #: The group that has the nodes.
    to: int | str  #: The group that they move to, or the axis that they are not cut over.
    nodes: Mapping[str, NodePlan]  #: The decisions that change.

    def of(self, plan: Plan) -> Plan:
        """The plan with the change, without a certificate."""
        return replace(plan, nodes={**plan.nodes, **self.nodes}, certificate=None)


def block_changes(graph: Graph, plan: Plan, outer: Sequence[Block]) -> Iterator[BlockChange]:
    """The changes of blocks that are priced: as many as make no more than `MAX_MOVES`.

    A block moves to the groups, or stages, that it exchanges values with, or is not cut over an
    axis. Of equal blocks of a group one stands for all where an axis is left out.
    """
    return islice(_block_changes(graph, plan, outer), MAX_MOVES // max(1, len(graph.nodes)))


def _block_changes(graph: Graph, plan: Plan, outer: Sequence[Block]) -> Iterator[BlockChange]:
    names = [node.name for node in graph.nodes]
    seen: set[tuple[int, int, str]] = set()
    for block in outer:
        members = names[block.first : block.last + 1]
        group, count = Counter(plan.nodes[name].group for name in members).most_common(1)[0]
        if count < BELONGS * len(members):
            continue
        own = [name for name in members if plan.nodes[name].group == group]
        for other in _exchanging(graph, plan, members, group):
            keeps = plan.groups[other].axes == plan.groups[group].axes
            moved = {n: NodePlan(other, plan.nodes[n].cuts if keeps else {}) for n in own}
            yield BlockChange(block, group, other, moved)
        for axis, _ in plan.groups[group].axes:
            kind = (block.kind, group, axis)
            if block.kind >= 0 and kind in seen:
                continue
            seen.add(kind)
            whole = {}
            for name in own:
                cuts = plan.nodes[name].cuts.items()
                left = {factor: cut for factor, cut in cuts if axis not in cut.axes}
                whole[name] = replace(plan.nodes[name], cuts=left)
            if any(plan.nodes[name] != node for name, node in whole.items()):
                yield BlockChange(block, group, axis, whole)


def _exchanging(graph: Graph, plan: Plan, members: Sequence[str], group: int) -> list[int]:
    """Other groups that make what the block reads, or read what it makes."""
    near: dict[int, None] = {}
    for name in members:
        node = graph.by_name[name]
        sources = (graph.producers.get(value) for value in node.reads)
        readers = (reader for value in node.writes for reader in graph.consumers[value])
        for other in (*sources, *readers):
            if other is not None and plan.nodes[other.name].group != group:
                near[plan.nodes[other.name].group] = None
    return list(near)


@dataclass
class _Referee:
    """The best of the plans that a descent comes to, by the referee."""

    graph: Graph
    cluster: Cluster
    objective: Objective
    plan: Plan
    figures: Evaluation
    _resharder: Resharder = field(init=False)

    def __post_init__(self) -> None:
        self._resharder = Resharder(self.cluster)

    def takes(self, plan: Plan, least_gain: float = ROUNDING) -> bool:
        """Take a plan if it fits and costs less than the best so far, by so large a share of it."""
        try:
            figures = evaluate(self.graph, plan, self.cluster, resharder=self._resharder)
        except IRError:  # the order of stages, an operator without a rule, a part of no elements
            return False
        most = self.figures.cost(self.objective) * (1 - least_gain)
        if not figures.fits_exactly or figures.cost(self.objective) >= most:
            return False
        self.plan, self.figures = plan, figures
        return True


def improved(outcome: Outcome, cluster: Cluster, request: Request, work: Work) -> Outcome:
    """The outcome with a plan that no change of a node or block makes cheaper, as far as they go.

    Nothing is tried of plans that are proven to cost the least, and of those in blocks, whose
    rounds have one decision. Where the clock ends the descent, the certificate says so.
    """
    if outcome.certificate.gap <= ROUNDING or outcome.plan.blocks:
        return outcome
    asked = _constraints(outcome, request)
    referee = _Referee(outcome.graph, cluster, request.objective, outcome.plan, outcome.evaluation)
    with suppress(OutOfTime):
        _descend(referee, asked, work)
    if referee.figures is not outcome.evaluation:
        referee.takes(in_order_of_use(referee.plan, cluster, asked), least_gain=-ROUNDING)
        outcome = _with_plan(outcome, referee.plan, referee.figures, request)
    is_open = outcome.certificate.gap > request.gap
    return outcome.stopped() if work.stopped and is_open else outcome


def _constraints(outcome: Outcome, request: Request) -> Constraints:
    """The constraints on the nodes of a plan, in stages with those of kinds of parallelism."""
    count, sizes = outcome.plan.micro_batches, {mesh.size() for mesh in outcome.plan.groups}
    if not count or request.parallel is None or max(sizes) == 1:
        return request.constraints
    inside = request.inside_stages(max(sizes), count).over(max(sizes)).on(outcome.graph)
    return request.constraints.joined(replace(inside.constraints, pins=()))


def _descend(referee: _Referee, asked: Constraints, work: Work) -> None:
    """Give a referee better plans: of changed nodes, then of changed blocks, as long as there are.

    Raises:
        OutOfTime: The clock has ended it.
    """

    def check() -> None:
        if work.late:
            raise OutOfTime("")

    graph = referee.graph
    bound = {position for some in asked.bound_nodes(graph).values() for position in some}
    free = {node.name for position, node in enumerate(graph.nodes) if position not in bound}
    again = True
    while again:
        check()
        again = _descend_by_nodes(referee, asked, work, check)
        groups = [referee.plan.nodes[node.name].group for node in graph.nodes]
        for change in block_changes(graph, referee.plan, blocks(graph, groups)):
            check()
            if free.issuperset(change.nodes) and referee.takes(change.of(referee.plan)):
                again = True
                break


def _descend_by_nodes(
    referee: _Referee, asked: Constraints, work: Work, check: Callable[[], None]
) -> bool:
    """Give a referee better plans of changed nodes, and tell whether there may be more.

    In stages the search estimates a step, so the best change of each node is simulated: with one
    that is taken, others have other prices.
    """
    before, graph = referee.plan, referee.graph
    near = Neighbourhood(graph, before, referee.cluster, asked, check)
    if not near.is_priced_soon:
        return False
    near.descend(referee, work)
    if before.pipeline is None or not near.is_simulated_soon:
        return False
    if referee.plan is not before:
        return True
    for node in graph.nodes:
        check()
        best = best_other(near.alternatives(node))
        if best is not None and referee.takes(near.changed(best.placed)):
            return True
    return False


def _with_plan(outcome: Outcome, plan: Plan, figures: Evaluation, request: Request) -> Outcome:
    """The outcome with another plan in place of its own, also among its candidates."""
    before, cost = outcome.certificate, figures.cost(request.objective)
    bound, status = min(cost, before.bound), before.status
    if status == "feasible" and cost - bound <= request.gap * cost:
        status = "optimal"
    if cost < before.bound and status == "optimal":  # the spaces that are proven lack this plan
        status = "feasible"
    own = replace(outcome.plan, certificate=None)
    candidates = tuple(
        replace(one, plan=plan, evaluation=figures) if one.plan == own else one
        for one in outcome.candidates
    )
    plan = replace(plan, certificate=before)
    outcome = replace(outcome, plan=plan, evaluation=figures, candidates=candidates)
    return outcome.certified(cost=cost, bound=bound, status=status, strategy=plan.kind)
