"""The search of pipelines: cuts of a model into stages, for schedules and meshes of stages.

A stage is a stretch of the traced order of the forward pass, with the backward nodes that belong to
it. For each size of a stage's mesh, the graph of a micro-batch is sharded over one mesh as a whole,
and that plan is cut. Cuts are first made for the least largest load of a stage within memory, by
the loads of the nodes; then ends of stages are moved as long as the simulated step gets shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.memory import with_headroom
from partitioner.cost_model.schedule import Schedule, schedule
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.pipeline import (
    SCHEDULES,
    PipelineScheduleError,
    from_csv,
    textbook_lanes,
)
from partitioner.ir.plan import NodePlan, Pipeline, Plan, resolve
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import Candidate, Outcome, SpaceResult, winner
from partitioner.search.request import Budget, Request
from partitioner.solver import Infeasible, Solution
from partitioner.strategies.spaces import Family
from partitioner.strategies.staging import changing_nodes, stages_of_all

Floats = npt.NDArray[np.float64]

#: Positions between which stages are cut at most, before their ends are moved.
MAX_POSITIONS = 160
#: Nodes by which an end of a stage is moved, at most, the farthest first.
MOVES = (16, 8, 4, 2, 1)
#: Schedules with two stages on each lane.
TWICE = frozenset({"interleaved", "zbv", "dualpipev"})
#: The solver's name in certificates.
SOLVER = "stage cutter, simulated steps"


@dataclass(frozen=True)
class Sharding:
    """A plan of the whole graph on one mesh, and its seconds by node.

    Attributes:
        graph: The graph of a micro-batch, without offers.
        plan: A plan on the first devices of the cluster.
    """

    graph: Graph
    plan: Plan

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return max(mesh.size() for mesh in self.plan.groups)

    def tasks(self, cluster: Cluster) -> Schedule:
        """The plan's tasks."""
        return schedule(self.graph, resolve(self.graph, self.plan), cluster)


def find_pipeline(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, micro_batches: int
) -> Outcome:
    """The best plan of stages for a graph of one micro-batch.

    Args:
        graph: The graph, without offers.
        cluster: The devices.
        request: The request; called before `Request.over`.
        budget: The budget of the search.
        micro_batches: Micro-batches of a step.

    Raises:
        Infeasible: No plan of stages was found that fits.
        PipelineScheduleError: No schedule asked for serves any of the lanes.
    """
    results, errors = [], []
    sizes = request.stage_sizes(len(cluster))
    for index, size in enumerate(sizes):
        share = budget.share(len(sizes) - index)
        ways = Ways(micro_batches, _schedules(request, len(cluster) // size, graph))
        budget.say(f"cutting stages of {size} device{'s' if size > 1 else ''}")
        try:
            sharding = _sharded(graph, cluster, request, share.share(2), size)
            results.append(PipelineSearch(sharding, cluster, ways, share).search())
        except (PipelineScheduleError, Infeasible) as error:
            errors.append(error)
    if not results:
        raise errors[0]
    return winner(results, request, len(cluster), stopped=budget.work.stopped)


def over_counts(outcomes: Mapping[int, Outcome], count: int, gap: float) -> Outcome:
    """The outcome of one number of micro-batches, with a certificate over all that were tried."""
    best = outcomes[count]
    certificates = [one.plan.certificate for one in outcomes.values()]
    bound = min(cert.bound for cert in certificates if cert is not None)
    certificate = best.plan.certificate
    assert certificate is not None
    cost, status = certificate.cost, certificate.status
    if status == "optimal" and cost - bound > gap * cost:
        status = "feasible"
    spaces = dict.fromkeys(cert.space for cert in certificates if cert is not None)
    joined = replace(certificate, bound=min(cost, bound), status=status, space=", ".join(spaces))
    candidates = tuple(plan for one in outcomes.values() for plan in one.candidates)
    return replace(best, plan=replace(best.plan, certificate=joined), candidates=candidates)


def _schedules(request: Request, lanes: int, graph: Graph) -> tuple[str | tuple[str, ...], ...]:
    """The schedules to try: that asked for, or all that fit the graph."""
    if request.schedule is not None:
        return (request.schedule,)
    if not graph.backward:
        return ("forward",)
    if lanes == 1:
        return ("gpipe",)
    return tuple(name for name in SCHEDULES if name != "forward")


def _sharded(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, size: int
) -> Sharding:
    """The best plan of the graph on one mesh of so many devices.

    Each holds one stage only, so together they have the memory of all lanes.
    """
    lanes = len(cluster) // size
    most = min(device.memory_bytes for device in cluster.devices)
    first = cluster.first(size).with_memory(most * lanes)
    inner = request.inside_stages(size)
    spaces = inner.over(size).on(graph)
    outcome = find_plan(graph, first, spaces, budget)
    assert outcome.plan.certificate is not None
    return Sharding(outcome.graph, outcome.plan)


@dataclass(frozen=True)
class Ways:
    """The pipelines to choose from.

    Attributes:
        micro_batches: Micro-batches of a step.
        schedules: Names of schedules, or the rows of one.
    """

    micro_batches: int
    schedules: tuple[str | tuple[str, ...], ...]


@dataclass
class PipelineSearch:
    """Cuts one sharding of a graph into stages.

    Attributes:
        sharding: The graph and its plan on one mesh.
        cluster: All devices.
        ways: The pipelines to choose from.
        budget: Its work is spent by evaluations.
    """

    sharding: Sharding
    cluster: Cluster
    ways: Ways
    budget: Budget
    known: dict[tuple[object, ...], tuple[Plan, Evaluation]] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """Number of groups of devices."""
        return len(self.cluster) // self.sharding.size

    def search(self) -> SpaceResult:
        """The best plan of each schedule.

        Raises:
            Infeasible: No plan fits.
        """
        best: list[tuple[Plan, Evaluation]] = []
        failed: list[tuple[Family, PartitionerError]] = []
        for name in self.ways.schedules:
            try:
                best.append(self._of_schedule(name))
            except (PipelineScheduleError, Infeasible) as error:
                failed.append((self._family(name), error))
        if not best:
            refusals = [error for _, error in failed if isinstance(error, Infeasible)]
            raise refusals[0] if refusals else failed[0][1]
        plans = [self._candidate(plan, evaluation) for plan, evaluation in best]
        return SpaceResult(tuple(plans), searched=str(self._family("")), failed=tuple(failed))

    def _candidate(self, plan: Plan, evaluation: Evaluation) -> Candidate:
        assert plan.pipeline is not None
        named = plan.pipeline.schedule if isinstance(plan.pipeline.schedule, str) else "table"
        cost = evaluation.step_s
        bound = min(cost, self._least_s)
        solution = Solution((), cost, bound, "feasible", None, SOLVER)
        family = self._family(named)
        return Candidate(family, self.sharding.graph, plan, evaluation, solution)

    def _family(self, name: object) -> Family:
        named = name if isinstance(name, str) else "table"
        kind = f"pipeline {named}".strip()
        text = f"{kind} of {self.ways.micro_batches} micro-batches"
        meshes = tuple(self._meshes(self.lanes))
        return Family(text, meshes, meshes[:1], symmetric=False)

    @property
    def _least_s(self) -> float:
        """No cut of this sharding takes fewer seconds a step.

        All the work of all micro-batches is on the lanes, and one micro-batch passes all stages.
        """
        device_s = float(self._loads.sum()) * self.ways.micro_batches / self.lanes
        done: dict[str, float] = {}
        for node in self.sharding.graph.nodes:
            begin = max((done.get(value, 0.0) for value in node.reads), default=0.0)
            end = begin + self._node_s.get(node.name, 0.0)
            done.update(dict.fromkeys(node.writes, end))
        return max(device_s, max(done.values(), default=0.0))

    # Cuts ------------------------------------------------------------------------------------

    def _of_schedule(self, name: str | tuple[str, ...]) -> tuple[Plan, Evaluation]:
        """The best cut for a schedule.

        Raises:
            Infeasible: No cut fits.
            PipelineScheduleError: The schedule does not serve the lanes.
        """
        lane_of = self._lane_of(name)
        stages = len(lane_of)
        if stages > len(self._units):
            raise PipelineScheduleError(
                f"{stages} stages of {len(self._units)} operators that differ from micro-batch to "
                "micro-batch: give fewer"
            )
        best: tuple[tuple[int, ...], Plan, Evaluation] | None = None
        for held in self._in_flight(name, lane_of):
            ends = self._balanced(stages, held)
            if ends is not None:
                plan, evaluation = self._evaluated(name, lane_of, ends)
                if best is None or self._rank(evaluation) < self._rank(best[2]):
                    best = ends, plan, evaluation
        assert best is not None
        plan, evaluation = self._moved(name, lane_of, best)
        if not evaluation.fits:
            over = max(evaluation.over_bytes, key=evaluation.over_bytes.__getitem__)
            raise Infeasible(
                f"stages of {self.sharding.size} devices with schedule {self._family(name).name}: "
                f"device {over} holds {evaluation.peak[over].bytes} bytes of "
                f"{evaluation.limit_bytes[over]} in the best cut found",
                device=over,
                bytes_short=float(evaluation.over_bytes[over]),
                proven=False,
            )
        return plan, evaluation

    @staticmethod
    def _rank(evaluation: Evaluation) -> tuple[int, float]:
        """Bytes above the limits, then seconds."""
        return sum(evaluation.over_bytes.values()), float(f"{evaluation.step_s:.9g}")

    def _lane_of(self, name: str | tuple[str, ...]) -> tuple[int, ...]:
        if not isinstance(name, str):
            table = from_csv("\n".join(name) + "\n")
            if len(table.lanes) != self.lanes:
                raise PipelineScheduleError(
                    f"the schedule has {len(table.lanes)} lanes; {len(self.cluster)} devices in "
                    f"stages of {self.sharding.size} are {self.lanes}"
                )
            return table.lane_of
        if self.lanes == 1:
            return (0,)
        return textbook_lanes(name, self.lanes * (2 if name in TWICE else 1))

    def _in_flight(
        self, name: str | tuple[str, ...], lane_of: Sequence[int]
    ) -> Iterator[Sequence[int]]:
        """Micro-batches that each stage holds, as loads are balanced: none counted, then all."""
        count, stages = self.ways.micro_batches, len(lane_of)
        yield [0] * stages
        early = name in ("1f1b", "zb1", "interleaved")
        yield [min(count, stages - stage) if early else count for stage in range(stages)]

    def _balanced(self, stages: int, held: Sequence[int]) -> tuple[int, ...] | None:
        """Ends of stages, exclusive, of the least largest load; None if none is within memory."""
        ends, loads, resident, flying, sent = self._prefixes
        count = len(ends) - 1
        limit = min(device.memory_bytes for device in self.cluster.devices)
        most = np.full((stages + 1, count + 1), math.inf)
        choice = np.zeros((stages + 1, count + 1), np.int64)
        most[0, 0] = 0.0
        for stage in range(stages):
            for stop in range(stage + 1, count + 1):
                starts = np.arange(stage, stop)
                load = loads[stop] - loads[starts] + sent[starts] + sent[stop]
                nbytes = resident[stop] - resident[starts]
                if held[stage]:
                    flight = with_headroom((flying[stop] - flying[starts]).astype(np.int64))
                    nbytes = nbytes + held[stage] * flight
                    load = np.where(nbytes <= limit, load, math.inf)
                worst = np.maximum(most[stage, starts], load)
                first = int(np.argmin(worst))
                most[stage + 1, stop], choice[stage + 1, stop] = worst[first], starts[first]
        if math.isinf(most[stages, count]):
            return None
        cut, stop = [], count
        for stage in range(stages, 0, -1):
            cut.append(int(ends[stop]))
            stop = int(choice[stage, stop])
        return tuple(reversed(cut))

    def _moved(
        self,
        name: str | tuple[str, ...],
        lane_of: tuple[int, ...],
        best: tuple[tuple[int, ...], Plan, Evaluation],
    ) -> tuple[Plan, Evaluation]:
        """The best cut after moving ends of stages one after the other."""
        ends, plan, evaluation = best
        steps = self.budget.share(len(self.ways.schedules)).work
        for distance in MOVES:
            improved = True
            while improved and not steps.over:
                improved = False
                for index in range(len(ends) - 1):
                    for by in (-distance, distance):
                        moved = (*ends[:index], ends[index] + by, *ends[index + 1 :])
                        low = ends[index - 1] if index else 0
                        if not low < moved[index] < ends[index + 1] or steps.over:
                            continue
                        steps.spend(len(self.sharding.graph.nodes) * EVALUATION_STEPS)
                        other = self._evaluated(name, lane_of, moved)
                        if self._rank(other[1]) < self._rank(evaluation):
                            ends, (plan, evaluation) = moved, other
                            improved = True
        return plan, evaluation

    def _evaluated(
        self, name: str | tuple[str, ...], lane_of: tuple[int, ...], ends: tuple[int, ...]
    ) -> tuple[Plan, Evaluation]:
        key = name, lane_of, ends
        if key not in self.known:
            plan = self._plan(name, lane_of, ends)
            self.known[key] = plan, evaluate(self.sharding.graph, plan, self.cluster)
        return self.known[key]

    def _plan(
        self, name: str | tuple[str, ...], lane_of: tuple[int, ...], ends: tuple[int, ...]
    ) -> Plan:
        stage_of = np.searchsorted(np.array(ends), np.arange(len(self._units)), side="right")
        forward = {unit: int(stage) for unit, stage in zip(self._units, stage_of, strict=True)}
        stages = stages_of_all(self.sharding.graph, forward)
        return staged_plan(self.sharding, self.cluster, stages, lane_of, name, self.ways)

    # Figures of the order --------------------------------------------------------------------

    @cached_property
    def _units(self) -> tuple[str, ...]:
        """Names of the nodes that are cut, in order."""
        return tuple(node.name for node in changing_nodes(self.sharding.graph))

    @cached_property
    def _unit_of(self) -> Mapping[str, int]:
        """The unit that each node goes with."""
        return stages_of_all(
            self.sharding.graph, {name: unit for unit, name in enumerate(self._units)}
        )

    @cached_property
    def _tasks(self) -> Schedule:
        return self.sharding.tasks(self.cluster.first(self.sharding.size))

    @cached_property
    def _loads(self) -> Floats:
        """Seconds of each unit on the busiest device, of one micro-batch."""
        loads = np.zeros(len(self._units))
        for task in self._tasks.tasks:
            name = task.placed.node.name if task.placed is not None else ""
            if task.comm is not None:
                name = task.comm.why
            if name in self._unit_of and not self._is_once(name):
                loads[self._unit_of[name]] += task.longest_s
        return loads

    @cached_property
    def _node_s(self) -> Mapping[str, float]:
        """Seconds of each node without communications, of those that every micro-batch runs."""
        placed = (task for task in self._tasks.tasks if task.placed is not None)
        seconds = ((task.placed.node.name, task.longest_s) for task in placed if task.placed)
        return {name: s for name, s in seconds if not self._is_once(name)}

    def _is_once(self, name: str) -> bool:
        """Whether a node runs once a step, as the optimizer's updates do."""
        return self.sharding.graph.by_name[name].attrs.get("role") == "gradient"

    @cached_property
    def _prefixes(self) -> tuple[npt.NDArray[np.int64], Floats, Floats, Floats, Floats]:
        """Positions, and up to each: loads, resident and saved bytes; and the seconds of a cut."""
        graph, count = self.sharding.graph, len(self._units)
        resident, saved = np.zeros(count), np.zeros(count)
        for (device, (value, _)), held in self._tasks.residents.items():
            if device == 0 and value in graph.producers:
                resident[self._unit_of[graph.producers[value].name]] += held
        crossing = np.zeros(count + 1)
        for value, node in graph.producers.items():
            row = row_of(node)
            if node.name in graph.backward or (row is not None and row.stored):
                continue
            made = self._unit_of[node.name]
            readers = graph.consumers[value]
            nbytes = graph.types[value].nbytes / self.sharding.size
            if any(reader.name in graph.backward for reader in readers) and not _is_view(row):
                saved[made] += nbytes
            forward = [r.name for r in readers if r.name not in graph.backward]
            last = max((self._unit_of[name] for name in forward), default=made)
            crossing[made + 1 : last + 1] += nbytes
        seconds = self._link_s(crossing) * (2 if graph.backward else 1)
        seconds[0] = seconds[count] = 0.0
        ends = self._positions(crossing)
        load, at_rest, kept = (
            np.concatenate(([0.0], np.cumsum(of_units)))[ends]
            for of_units in (self._loads, resident, saved)
        )
        return ends, load, at_rest, kept, seconds[ends]

    def _positions(self, crossing: Floats) -> npt.NDArray[np.int64]:
        """Positions where stages may end: of each window, the one where the fewest bytes cross."""
        count = len(self._units)
        windows = min(count, MAX_POSITIONS)
        edges = [1 + round(index * (count - 1) / windows) for index in range(windows + 1)]
        inner = {
            first + int(np.argmin(crossing[first:last]))
            for first, last in pairwise(edges)
            if last > first
        }
        return np.array(sorted({0, *inner, count}), np.int64)

    def _link_s(self, nbytes: Floats) -> Floats:
        """Seconds for which a message keeps a device from computing."""
        if self.lanes == 1:
            return np.zeros_like(nbytes)
        level = self.cluster.level((0, len(self.cluster) - 1))
        busy = 1 - level.hidden_share(2)
        return np.array([busy * (level.message_s + level.transfer_s(float(n))) for n in nbytes])

    def _meshes(self, lanes: int) -> Iterator[DeviceMesh]:
        size = self.sharding.size
        axes = max(self.sharding.plan.groups, key=DeviceMesh.size).axes
        for lane in range(lanes):
            yield DeviceMesh(axes, tuple(range(lane * size, (lane + 1) * size)))


#: Steps of an evaluation, for each node.
EVALUATION_STEPS = 300


def staged_plan(
    sharding: Sharding,
    cluster: Cluster,
    stages: Mapping[str, int],
    lane_of: Sequence[int],
    name: str | tuple[str, ...],
    ways: Ways,
) -> Plan:
    """The plan of a sharding whose nodes are in stages, each on the devices of its lane."""
    groups: dict[tuple[int, int], int] = {}
    nodes: dict[str, NodePlan] = {}
    meshes: list[DeviceMesh] = []
    of_group: list[int] = []
    for node, decision in sharding.plan.nodes.items():
        stage = stages[node]
        key = stage, decision.group
        if key not in groups:
            groups[key] = len(meshes)
            mesh = sharding.plan.groups[decision.group]
            first = lane_of[stage] * sharding.size
            devices = tuple(first + device for device in mesh.devices)
            meshes.append(DeviceMesh(mesh.axes, devices))
            of_group.append(stage)
        nodes[node] = NodePlan(groups[key], decision.cuts)
    pipeline = Pipeline(name, ways.micro_batches, tuple(of_group))
    return Plan(
        *(sharding.graph.digest, cluster.to_data(), tuple(meshes), nodes), pipeline=pipeline
    )


def _is_view(row: object) -> bool:
    return bool(getattr(row, "view", False))
