"""The search of pipelines: cuts of a model into stages, for schedules and meshes of stages.

A stage is a stretch of the traced order of the forward pass, with the backward nodes that belong to
it. For each size of a stage's mesh, the graph of a micro-batch is sharded over one mesh as a whole,
and that plan is cut. Cuts are first made for the least largest load of a stage within memory, by
the loads of the nodes; then ends of stages are moved as long as the estimated step gets shorter;
the best of them are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import PhaseError
from partitioner.ir.pipeline import (
    SCHEDULES,
    PipelineSchedule,
    PipelineScheduleError,
    from_csv,
    pipeline_schedule,
    textbook_lanes,
)
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import Candidate, Outcome, SpaceResult, winner
from partitioner.search.request import Budget, Request
from partitioner.search.stage_figures import Sharding, StageFigures, StepEstimate
from partitioner.solver import Infeasible, Solution
from partitioner.strategies.spaces import Family
from partitioner.strategies.staging import stages_of_all

#: A schedule by name, or the rows of its table.
Table = str | tuple[str, ...]
#: Nodes by which an end of a stage is moved, the farthest first.
MOVES = (64, 16, 4, 1)
#: The same for plans that are simulated.
LAST_MOVES = (16, 8, 4, 2, 1)
#: Cuts of least estimated seconds that are simulated, of each schedule.
RIVALS = 3
#: Schedules with two stages on each lane.
TWICE = frozenset({"interleaved", "zbv", "dualpipev"})
#: Steps of an evaluation, for each node, and of an estimate, for each action.
EVALUATION_STEPS, ESTIMATE_STEPS = 300, 2
#: The solver's name in certificates.
SOLVER = "stage cutter, simulated steps"


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
            figures = StageFigures(_sharded(graph, cluster, request, share.share(2), size), cluster)
            results.append(PipelineSearch(figures, ways, share).search())
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


def _schedules(request: Request, lanes: int, graph: Graph) -> tuple[Table, ...]:
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
    schedules: tuple[Table, ...]


@dataclass
class PipelineSearch:
    """Cuts one sharding of a graph into stages.

    Attributes:
        figures: The sharding and its figures.
        ways: The pipelines to choose from.
        budget: Its work is spent by evaluations.
    """

    figures: StageFigures
    ways: Ways
    budget: Budget

    def search(self) -> SpaceResult:
        """The best plan of each schedule.

        Raises:
            Infeasible: No plan was found that fits.
            PipelineScheduleError: No schedule serves the lanes.
        """
        plans: list[Candidate] = []
        failed: list[tuple[Family, PartitionerError]] = []
        for name in self.ways.schedules:
            try:
                plans.append(self._of_schedule(name))
            except (PipelineScheduleError, PhaseError, Infeasible) as error:
                failed.append((self._family(name), error))
        if not plans:
            refusals = [error for _, error in failed if isinstance(error, Infeasible)]
            raise refusals[0] if refusals else failed[0][1]
        return SpaceResult(tuple(plans), searched=str(self._family("")), failed=tuple(failed))

    def _of_schedule(self, name: Table) -> Candidate:
        """The best cut for a schedule.

        Raises:
            Infeasible: No cut was found that fits.
            PipelineScheduleError: The schedule does not serve the lanes.
        """
        lane_of = self._lane_of(name)
        if len(lane_of) > len(self.figures.units):
            raise PipelineScheduleError(
                f"{len(lane_of)} stages of {len(self.figures.units)} operators that differ from "
                "micro-batch to micro-batch: give fewer"
            )
        estimate = StepEstimate(self.figures, self._table(name, lane_of))
        starts = {
            cut
            for held in ((0,) * len(lane_of), estimate.held)
            if (cut := self.figures.balanced(held)) is not None
        }
        cuts = {self._moved(estimate, cut) for cut in starts} | starts
        first, *rivals = sorted(cuts, key=lambda ends: self._rank(estimate, ends))
        best = self._simulated_best(name, lane_of, first, rivals)
        if not best.evaluation.fits:
            raise self._too_large(name, best.evaluation)
        return best

    def _simulated_best(
        self,
        name: Table,
        lane_of: tuple[int, ...],
        first: tuple[int, ...],
        rivals: Sequence[tuple[int, ...]],
    ) -> Candidate:
        """The best of some cuts by their simulated steps, after moving its ends by little."""
        work = self.budget.share(len(self.ways.schedules)).work

        def simulated(ends: tuple[int, ...]) -> Candidate:
            plan = self._plan(name, lane_of, ends)
            work.spend(EVALUATION_STEPS * len(plan.nodes))
            return self._candidate(name, plan)

        def better(ends: tuple[int, ...], best: Candidate) -> Candidate | None:
            """The candidate of other ends, if it is better; none where buffers join its stages."""
            try:
                candidate = None if work.over else simulated(ends)
            except PhaseError:
                return None
            return candidate if candidate and _figure(candidate) < _figure(best) else None

        ends, best = first, simulated(first)
        for rival in rivals[: RIVALS - 1]:
            if candidate := better(rival, best):
                ends, best = rival, candidate
        for distance in LAST_MOVES:
            for moved in self._neighbours(ends, distance):
                if candidate := better(moved, best):
                    ends, best = moved, candidate
        return best

    def _too_large(self, name: Table, evaluation: Evaluation) -> Infeasible:
        over = max(evaluation.over_bytes, key=evaluation.over_bytes.__getitem__)
        return Infeasible(
            f"{self._family(name)}: device {over} holds {evaluation.peak[over].bytes} bytes of "
            f"{evaluation.limit_bytes[over]} in the best cut found",
            device=over,
            bytes_short=float(evaluation.over_bytes[over]),
            proven=False,
        )

    def _candidate(self, name: Table, plan: Plan) -> Candidate:
        graph = self.figures.sharding.graph
        evaluation = evaluate(graph, plan, self.figures.cluster)
        bound = min(evaluation.step_s, self.figures.least_s(self.ways.micro_batches))
        solution = Solution((), evaluation.step_s, bound, "feasible", None, SOLVER)
        return Candidate(self._family(name), graph, plan, evaluation, solution)

    def _family(self, name: Table) -> Family:
        named = name if isinstance(name, str) else "table"
        kind = f"pipeline {named}".strip()
        text = f"{kind} of {self.ways.micro_batches} micro-batches"
        meshes = tuple(self._meshes())
        return Family(text, meshes, meshes[:1], symmetric=False)

    def _meshes(self) -> Iterator[DeviceMesh]:
        sharding = self.figures.sharding
        axes = max(sharding.plan.groups, key=DeviceMesh.size).axes
        for lane in range(self.figures.lanes):
            devices = range(lane * sharding.size, (lane + 1) * sharding.size)
            yield DeviceMesh(axes, tuple(devices))

    def _lane_of(self, name: Table) -> tuple[int, ...]:
        """The lane of each stage."""
        lanes, size = self.figures.lanes, self.figures.sharding.size
        if not isinstance(name, str):
            table = from_csv("\n".join(name) + "\n")
            if len(table.lanes) != lanes or table.micro_batches != self.ways.micro_batches:
                raise PipelineScheduleError(
                    f"the schedule has {len(table.lanes)} lanes and {table.micro_batches} "
                    f"micro-batches; there are {lanes} of {size} devices and "
                    f"{self.ways.micro_batches} micro-batches"
                )
            return table.lane_of
        if lanes == 1:
            return (0,)
        return textbook_lanes(name, lanes * (2 if name in TWICE else 1))

    def _table(self, name: Table, lane_of: tuple[int, ...]) -> PipelineSchedule:
        if isinstance(name, str):
            return pipeline_schedule(name, lane_of, self.ways.micro_batches)
        return from_csv("\n".join(name) + "\n")

    # Cuts ------------------------------------------------------------------------------------

    def _rank(self, estimate: StepEstimate, ends: tuple[int, ...]) -> tuple[float, float]:
        """Bytes above the limits, then seconds."""
        over = self.figures.over_bytes(ends, estimate.held, estimate.table.lane_of)
        return over, float(f"{estimate.seconds(ends):.9g}")

    def _moved(self, estimate: StepEstimate, ends: tuple[int, ...]) -> tuple[int, ...]:
        """The cut after moving ends of stages one after the other, as long as that gains."""
        rank = self._rank(estimate, ends)
        work = self.budget.share(2 * len(self.ways.schedules)).work
        steps = ESTIMATE_STEPS * sum(map(len, estimate.table.lanes))
        for distance in MOVES:
            improved = True
            while improved and not work.over:
                improved = False
                for moved in self._neighbours(ends, distance):
                    work.spend(steps)
                    other = self._rank(estimate, moved)
                    if other < rank:
                        ends, rank, improved = moved, other, True
                        break
        return ends

    @staticmethod
    def _neighbours(ends: tuple[int, ...], distance: int) -> Iterator[tuple[int, ...]]:
        for index in range(len(ends) - 1):
            low, high = ends[index - 1] if index else 0, ends[index + 1]
            for end in (ends[index] - distance, ends[index] + distance):
                if low < end < high:
                    yield *ends[:index], end, *ends[index + 1 :]

    def _plan(self, name: Table, lane_of: tuple[int, ...], ends: tuple[int, ...]) -> Plan:
        units = self.figures.units
        stage_of = np.searchsorted(np.array(ends), np.arange(len(units)), side="right")
        forward = {unit: int(stage) for unit, stage in zip(units, stage_of, strict=True)}
        stages = stages_of_all(self.figures.sharding.graph, forward)
        sharding, cluster = self.figures.sharding, self.figures.cluster
        return staged_plan(sharding, cluster, stages, lane_of, name, self.ways.micro_batches)


def _figure(candidate: Candidate) -> tuple[int, float]:
    """Bytes above the limits, then seconds."""
    evaluation = candidate.evaluation
    return sum(evaluation.over_bytes.values()), evaluation.step_s


def staged_plan(
    sharding: Sharding,
    cluster: Cluster,
    stages: Mapping[str, int],
    lane_of: Sequence[int],
    name: Table,
    micro_batches: int,
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
    pipeline = Pipeline(name, micro_batches, tuple(of_group))
    return Plan(
        *(sharding.graph.digest, cluster.to_data(), tuple(meshes), nodes), pipeline=pipeline
    )
