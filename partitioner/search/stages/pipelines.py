"""The search of pipelines: cuts of a model into stages, for schedules and meshes of stages.

A stage is a stretch of the traced order of the forward pass, with the backward nodes that belong to
it. For each size of a stage's mesh, the graph of a micro-batch is sharded over one mesh as a whole,
and that plan is cut. Cuts are first made for the least largest load of a stage within memory, by
the loads of the nodes; then ends of stages are moved as long as the estimated step gets shorter;
the best of them are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, pairwise
from typing import TypeGuard

import numpy as np

from partitioner import units
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.prices.compute import stored_bytes
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh, numbers
from partitioner.ir.ops import row_of
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
from partitioner.no_gc import no_collection
from partitioner.problem.memory_kinds import Holdings
from partitioner.rewrites.staging import changing_nodes, stages_of_all
from partitioner.search.find_plan import find_plan, goes_by_levels
from partitioner.search.limits import EXPLICIT
from partitioner.search.outcome import (
    Candidate,
    NoCheaper,
    Outcome,
    OutOfTime,
    SpaceResult,
    winner,
)
from partitioner.search.request import Budget, Request
from partitioner.search.stages.computed_again import ComputedAgain, Offering
from partitioner.search.stages.figures import (
    Sharding,
    StageFigures,
    StepEstimate,
    least_of_nodes,
)
from partitioner.search.stages.uneven import UnevenCut, uneven_cuts
from partitioner.solver import Infeasible, Objective, Solution
from partitioner.solver.joint.shortage import shortage_message
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.spaces import Family

#: A schedule by name, or the rows of its table.
Table = str | tuple[str, ...]
#: Nodes by which an end of a stage is moved, the farthest first.
MOVES = (64, 16, 4, 1)
#: The same for plans that are simulated.
LAST_MOVES = (16, 8, 4, 2, 1)
#: Cuts of least estimated seconds that are simulated, of each schedule.
RIVALS = 3
#: A schedule is not simulated if its estimated step is so many times the best simulated one.
FAR = 1.1
#: Schedules with two stages on each lane.
TWICE = frozenset({"interleaved", "zbv", "dualpipev"})
#: Steps of an evaluation, for each node, and of an estimate, for each action.
EVALUATION_STEPS, ESTIMATE_STEPS = 300, 2
#: Shardings that are searched where no cut of one fits; each is to hold fewer bytes than the last,
#: by so many times those that its cut is short of (by levels: so many times their share of all that
#: the cut holds, but no more than the share `MOST_LESS`).
ATTEMPTS, SHORT, MOST_LESS = 3, 1.2, 0.75
#: Share of a device's memory that a sharding by levels may take at first: stages are not equally
#: large, and each has what its phases make beside.
ROOM = 0.85
#: Choices of what stages of a cut compute again, each by the memory of the last one's plan.
CHOICES = 3
#: Choices behind these for a plan that is nearly within memory, in which only lanes that are short
#: choose anew; and the share of a device's memory that such a plan is short of at most.
MENDS, NEARLY = 4, 0.03
#: Drafts of the best cut, each by the memory that the last one's plan was found to take.
DRAFTS = 4
#: Share of a device's memory that is left for what the count of a choice may miss.
MARGIN = 0.005
#: The schedule that is drafted first, for where the time limit leaves no time for others: it holds
#: few micro-batches, and serves any number of lanes.
LEAN = "1f1b"
#: Why a space was left out that the time limit did not reach.
NOT_SEARCHED = "not searched within the time limit"
#: The solver's name in certificates.
SOLVER = "decomposition into stages, steps simulated"


@no_collection()
def find_pipeline(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    budget: Budget,
    micro_batches: int,
    sizes: tuple[int, ...] | None = None,
) -> Outcome:
    """The best plan of stages for a graph of one micro-batch.

    Args:
        graph: The graph; it may offer to compute values again.
        cluster: The devices.
        request: The request; called before `Request.over`.
        budget: The budget of the search; what cannot cost less than its known plan is left early.
        micro_batches: Micro-batches of a step.
        sizes: Numbers of devices of a stage to try; None for those of the request.

    Raises:
        Infeasible: No plan of stages was found that fits.
        NoCheaper: None was found that costs less than the known plan of the budget.
        PipelineScheduleError: No schedule asked for serves any of the lanes.
    """
    results: list[SpaceResult] = []
    errors: list[PartitionerError] = []
    request.constraints.check(graph, len(cluster))
    groups, stages = _pinned_groups(graph, request.constraints)
    if len({*map(len, groups)}) > 1:
        names = _schedules(request, len({*groups}), graph)
        ways = Pipelines.of(request, micro_batches, names, groups, stages)
        result = _of_pinned_sizes(graph, cluster, request, budget, ways)
        outcome = winner([result], request, cluster, stopped=budget.work.stopped)
        return replace(outcome, of=graph)
    sizes = sizes or request.stage_sizes(len(cluster))
    sizes = (len(groups[0]),) if groups else _even(sizes, cluster)
    for index, size in enumerate(sizes):
        mesh = DeviceMesh.line(size)
        text = f"pipeline of {micro_batches} micro-batches in stages"
        family = Family(text, (mesh,), (mesh,), symmetric=False)
        if index and budget.work.late:
            results.append(SpaceResult(failed=((family, OutOfTime(NOT_SEARCHED)),)))
            continue
        share = _beating(results, budget.share(len(sizes) - index), request)
        names = _schedules(request, len(cluster) // size, graph)
        ways = Pipelines.of(request, micro_batches, names, groups, stages)
        budget.say(f"cutting stages of {size} device{'s' if size > 1 else ''}")
        try:
            results.append(_of_size(graph, cluster, request, share, size, ways))
        except (PipelineScheduleError, Infeasible) as error:
            errors.append(error)
            results.append(SpaceResult(failed=((family, error),)))
    if len(sizes) > 1 and _takes_several_sizes(graph, cluster, request) and not budget.work.over:
        budget.say("cutting stages of several sizes")
        with suppress(PipelineScheduleError, Infeasible, ConstraintError):
            share = _beating(results, budget, request)
            results.append(_of_several_sizes(graph, cluster, request, share, micro_batches))
    searched = [result for result in results if result.searched]
    if errors and not searched:
        short = [error for error in errors if isinstance(error, Infeasible)]
        raise min(short, key=lambda error: error.bytes_short) if short else errors[0]
    if not any(result.plans for result in results):
        bound = min(result.bound for result in results)
        raise NoCheaper(f"no plan of {micro_batches} micro-batches was found to be faster", bound)
    return replace(winner(results, request, cluster, stopped=budget.work.stopped), of=graph)


def _even(sizes: tuple[int, ...], cluster: Cluster) -> tuple[int, ...]:
    """The sizes that divide the nodes of a cluster or consist of some; all if none does."""
    levels = [level.size for level in cluster.levels]
    even = (s for s in sizes if all(s % level == 0 or level % s == 0 for level in levels))
    return tuple(even) or sizes


def _beating(results: Sequence[SpaceResult], budget: Budget, request: Request) -> Budget:
    """The budget with the cost that is to be beaten, if that is less than its own."""
    goal, plans = request.objective, (plan for result in results for plan in result.plans)
    costs = (step_cost(plan.evaluation, goal) for plan in plans)
    return replace(budget, best_s=min(budget.best_s, to_beat(costs, request.tune or 1)))


def step_cost(evaluation: Evaluation, objective: Objective) -> float:
    """Cost of a step in micro-batches: bytes for the objective memory, else seconds."""
    return evaluation.cost("memory") if objective == "memory" else evaluation.step_s


def to_beat(costs: Iterable[float], wanted: int) -> float:
    """Cost that a plan must beat to be among the best `wanted`; infinite if any is.

    Args:
        costs: Those of the plans so far.
        wanted: A number of plans.
    """
    ranked = sorted(costs)
    return ranked[wanted - 1] if len(ranked) >= wanted else math.inf


def _of_size(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, size: int, ways: Pipelines
) -> SpaceResult:
    """The best plan of stages of so many devices.

    Where values may be computed again and no cut of a sharding fits, one is searched that holds
    fewer bytes, as the search of shardings counts the bytes of one micro-batch on one mesh.

    Raises:
        Infeasible: No plan was found that fits.
        PipelineScheduleError: No schedule serves the lanes.
    """
    by_levels = goes_by_levels(graph, size, request.inside_stages(size, 1))
    if by_levels:
        limit = int(ROOM * min(device.memory_bytes for device in cluster.devices))
    else:
        limit = _limit_bytes(graph, cluster, size)
    sharded = partial(_sharded, graph, cluster, request, budget, size, ways.micro_batches)
    sharding = _first_sharding(sharded, limit, is_guess=size < len(cluster))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _search_of(graph, sharding, cluster, budget, ways).search()
        except Infeasible as error:
            last = attempt == ATTEMPTS or budget.work.late
            if last or not graph.optional or not error.bytes_short:
                raise
            refusal = error
        if by_levels:
            held = refusal.bytes_short + min(device.memory_bytes for device in cluster.devices)
            limit -= int(limit * min(MOST_LESS, SHORT * refusal.bytes_short / held))
        else:
            held_bytes = evaluate(sharding.graph, sharding.plan, cluster.first(size)).held_bytes
            limit = max(held_bytes.values()) - int(SHORT * refusal.bytes_short)
        try:
            sharding = sharded(limit)
        except Infeasible:  # it is short of bytes of one mesh; the last cut, of those of a stage
            raise refusal from None
    raise AssertionError("every attempt returns or raises")


def _search_of(
    graph: Graph, sharding: Sharding, cluster: Cluster, budget: Budget, ways: Pipelines
) -> PipelineSearch:
    """The search of cuts of a sharding; stages choose what they compute again, if they may."""
    offering = Offering.of(graph, sharding)
    if offering is None or ways.groups:
        return PipelineSearch(StageFigures(sharding, cluster, ways.micro_batches), ways, budget)
    budget.say("pricing what stages may compute again")
    again = ComputedAgain.of(offering, cluster, ways.micro_batches, budget)
    return PipelineSearch(again.figures, ways, budget, again=again)


def _of_pinned_sizes(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, ways: Pipelines
) -> SpaceResult:
    """The plan of stages that are pinned to groups of several sizes: each sharded for its own.

    The smallest group says which values are computed again, since it holds most.

    Raises:
        ConstraintError: A mesh is asked for, which cannot be that of all groups.
        Infeasible: It does not fit.
        PipelineScheduleError: No schedule serves the lanes.
    """
    sizes = sorted({*map(len, ways.groups)})
    if request.mesh is not None:
        shown = " and ".join(map(str, sizes))
        raise ConstraintError(f"stages are pinned to groups of {shown} devices: leave out the mesh")
    shardings = _sharded_for(sizes, graph, cluster, request, budget, ways.micro_batches)
    figures = StageFigures(shardings[sizes[0]], cluster, ways.micro_batches)
    return PipelineSearch(figures, ways, budget, shardings).search()


def _sharded_for(
    sizes: Sequence[int],
    graph: Graph,
    cluster: Cluster,
    request: Request,
    budget: Budget,
    micro_batches: int,
) -> dict[int, Sharding]:
    """A sharding of one graph for each of these numbers of devices of a stage, ascending.

    Raises:
        Infeasible: One was not found.
    """
    shardings: dict[int, Sharding] = {}
    for index, size in enumerate(sizes):
        share, limit = budget.share(len(sizes) - index), _limit_bytes(graph, cluster, size)
        sharded = partial(_sharded, graph, cluster, request, share, size, micro_batches)
        shardings[size] = _first_sharding(sharded, limit, is_guess=True)
        graph = shardings[size].graph
    return shardings


def _takes_several_sizes(graph: Graph, cluster: Cluster, request: Request) -> bool:
    """Whether stages of several sizes are searched: on few devices, of graphs that are not large.

    A table of the user's has its lanes, and schedules with two stages on each want equal ones.
    """
    by_levels = goes_by_levels(graph, len(cluster), request.inside_stages(len(cluster), 1))
    named = not isinstance(request.schedule, tuple) and request.schedule not in TWICE
    return 2 < len(cluster) <= EXPLICIT and not by_levels and named


def _of_several_sizes(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, micro_batches: int
) -> SpaceResult:
    """The best plan of stages of several sizes, powers of two, on all devices.

    Raises:
        Infeasible: No plan was found that fits.
        PipelineScheduleError: No schedule serves the lanes.
    """
    sizes = [2**power for power in range(len(cluster).bit_length()) if 2**power < len(cluster)]
    shardings = _sharded_for(sizes, graph, cluster, request, budget.share(2), micro_batches)
    graph = shardings[sizes[0]].graph
    figures = {n: StageFigures(each, cluster, micro_batches) for n, each in shardings.items()}

    def estimate(cut: UnevenCut) -> float:
        return cut.load_s * (micro_batches + len(cut.sizes) - 1)

    results: list[SpaceResult] = []
    errors: list[PartitionerError] = []
    for cut in sorted(uneven_cuts(figures, len(cluster)), key=estimate)[:RIVALS]:
        names = _schedules(request, len(cut.sizes), graph)
        once = tuple(name for name in names if name not in TWICE)
        ways = Pipelines.of(request, micro_batches, once, cut.groups)
        try:
            results.append(PipelineSearch(figures[sizes[0]], ways, budget, shardings).search())
        except (PipelineScheduleError, Infeasible) as error:
            errors.append(error)
    if not results:
        raise errors[0] if errors else Infeasible("no stages of several sizes were found")
    return SpaceResult(
        tuple(plan for result in results for plan in result.plans),
        searched=results[0].searched,
        bound=min(result.bound for result in results),
        failed=tuple(failure for result in results for failure in result.failed),
    )


def _first_sharding(sharded: Callable[[int], Sharding], limit: int, *, is_guess: bool) -> Sharding:
    """The best plan within a limit or, if that is a guess, the one that is short of fewest bytes.

    The limit of several lanes is a guess: stages of that plan may fit, or show which does not.

    Args:
        sharded: Gives the best plan of a mesh whose devices have so many bytes.
        limit: Bytes of each device.
        is_guess: Whether stages of a plan above the limit may fit.

    Raises:
        Infeasible: Nothing fits the limit, and it is no guess, or no such plan was found.
    """
    try:
        return sharded(limit)
    except Infeasible as error:
        if not is_guess or not error.bytes_short:
            raise
        limit += math.ceil(error.bytes_short)
    return sharded(limit)


def _pinned_groups(
    graph: Graph, constraints: Constraints
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Devices and stage of each node that is cut, in order, if any is pinned or kept.

    Others go with the one before; pins name no stages.

    Raises:
        ConstraintError: Groups overlap.
    """
    units, kept = changing_nodes(graph), constraints.plan
    if kept is not None:
        stages = _filled([constraints.stage_of(node) for node in units])
        devices = kept.stage_devices
        return tuple(devices[stage] for (stage,) in stages), tuple(stage for (stage,) in stages)
    filled = _filled([constraints.group_of(node) for node in units])
    distinct = sorted(set(filled))
    for one, other in combinations(distinct, 2):
        if set(one) & set(other):
            raise ConstraintError(
                f"stages are pinned to devices {numbers(one)} and {numbers(other)}: groups of "
                "stages are the same or apart"
            )
    return filled, ()


def _filled(groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """What each has or, if that is empty, what the one before has; empty if none has any."""
    last = next((group for group in groups if group), ())
    return tuple(last := group or last for group in groups) if last else ()


def over_counts(
    outcomes: Mapping[int, Outcome], count: int, gap: float, bounds: Sequence[float] = ()
) -> Outcome:
    """The outcome of one number of micro-batches, with a certificate over all that were tried.

    Args:
        outcomes: By number.
        count: The number.
        gap: At most which the plan is optimal.
        bounds: Those of numbers that have no faster plan.
    """
    best = outcomes[count]
    certificates = [one.plan.certificate for one in outcomes.values()]
    bound = min(*(cert.bound for cert in certificates if cert is not None), *bounds, math.inf)
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
        return ("1f1b",)
    return tuple(name for name in SCHEDULES if name != "forward")


def _sharded(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    budget: Budget,
    size: int,
    micro_batches: int,
    limit: int,
) -> Sharding:
    """The best plan of the graph on one mesh of so many devices, of `limit` bytes each.

    It takes half of what is left of the budget, of the clock as well: its cuts take the rest.
    """
    first = cluster.first(size).with_memory(max(1, limit))
    spaces = request.inside_stages(size, micro_batches, len(cluster) // size).over(size).on(graph)
    work = budget.work.share(2)
    work.deadline -= work.left_s / 2
    try:
        outcome = find_plan(graph, first, spaces, replace(budget, work=work, best_s=math.inf))
    finally:
        if work.stopped:
            budget.work.cut_off()
    return Sharding(outcome.graph, outcome.plan)


def _limit_bytes(graph: Graph, cluster: Cluster, size: int) -> int:
    """Bytes that the whole model may take on each device of one mesh.

    A device holds what is stored of one stage alone. But the first of several stages holds the
    activations of as many micro-batches as there are stages, which are as many bytes as those of
    one micro-batch of the whole model.
    """
    lanes = len(cluster) // size
    most = min(device.memory_bytes for device in cluster.devices)
    stored = sum(
        stored_bytes(node, graph.types[value].dtype, graph.types[value].nbytes)
        for node in graph.nodes
        if (row := row_of(node)) is not None and row.stored
        for value in node.writes
    )
    return most + stored // size * (lanes - 1) // lanes


@dataclass(frozen=True)
class Pipelines:
    """The pipelines to choose from.

    Attributes:
        micro_batches: Micro-batches of a step.
        schedules: Names of schedules, or the rows of one.
        groups: Devices of each node that is cut, in order, if they are pinned or kept.
        stages: Stage of each node that is cut, if a plan in stages is kept.
        wanted: Number of plans to look for: the best ones.
        objective: What is to be least of a step.
    """

    micro_batches: int
    schedules: tuple[Table, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    stages: tuple[int, ...] = ()
    wanted: int = 1
    objective: Objective = "throughput"

    @classmethod
    def of(
        cls,
        request: Request,
        micro_batches: int,
        schedules: tuple[Table, ...],
        groups: tuple[tuple[int, ...], ...] = (),
        stages: tuple[int, ...] = (),
    ) -> Pipelines:
        """Those of a request."""
        wanted = request.tune or 1
        return cls(micro_batches, schedules, groups, stages, wanted, request.objective)

    def figure(self, candidate: Candidate) -> tuple[int, float]:
        """Bytes of a plan above the limits, then what is to be least."""
        evaluation = candidate.evaluation
        return sum(evaluation.short_bytes.values()), step_cost(evaluation, self.objective)


@dataclass(frozen=True)
class _Draft:
    """Cuts for a schedule that are worth simulating.

    Attributes:
        name: The schedule.
        lane_of: The lane of each stage.
        cuts: Ends of stages, exclusive, the best first.
        rank: Of the first cut, the bytes above the limits and the seconds of a step, as estimated.
        estimate: Gives the rank.
    """

    name: Table
    lane_of: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    rank: tuple[float, float]
    estimate: StepEstimate


@dataclass
class PipelineSearch:
    """Cuts one sharding of a graph into stages.

    Attributes:
        figures: The sharding and its figures.
        ways: The pipelines to choose from.
        budget: Its work is spent by evaluations.
        shardings: By the size of a stage's group, where pinned groups are of several sizes.
        again: Chooses what stages compute again; None if the sharding says so for all of them.
    """

    figures: StageFigures
    ways: Pipelines
    budget: Budget
    shardings: Mapping[int, Sharding] = field(default_factory=dict)
    again: ComputedAgain | None = None
    _tables: dict[Table, PipelineSchedule] = field(default_factory=dict)

    def search(self) -> SpaceResult:
        """The best plan of each schedule.

        No plan where none can beat the known one of the budget, by the bound or the estimates.

        Raises:
            Infeasible: No plan was found that fits.
            PipelineScheduleError: No schedule serves the lanes.
        """
        failed: list[tuple[Family, PartitionerError]] = []
        if self.budget.best_s < math.inf and self._bound_s >= self.budget.best_s:
            bound = f"no step takes less than {units.seconds(self._bound_s)}"
            return self._without_plans([(self._family(""), PartitionerError(bound))])
        plans, drafts = self._begun(failed)
        for index, draft in enumerate(drafts):
            left = self._left_out(draft, plans, is_first=index == 0)
            if left is not None:
                failed.append((self._family(draft.name), left))
                continue
            try:
                plans.append(self._improved(draft, self.budget.share(len(drafts) - index)))
            except (Infeasible, PhaseError) as error:
                failed.append((self._family(draft.name), error))
        if plans:
            return SpaceResult(tuple(plans), searched=str(self._family("")), failed=tuple(failed))
        refusals = [error for _, error in failed if isinstance(error, Infeasible)]
        if not refusals and all(isinstance(error, PhaseError) for _, error in failed):
            raise Infeasible(f"no stages were found that can run: {failed[0][1]}", proven=False)
        if drafts and not refusals:
            return self._without_plans(failed)
        raise min(refusals, key=lambda error: error.bytes_short, default=failed[0][1])

    def _begun(
        self, failed: list[tuple[Family, PartitionerError]]
    ) -> tuple[list[Candidate], list[_Draft]]:
        """The plans of pinned stages, or drafts, the best first; `failed` gets the reasons else."""
        plans: list[Candidate] = []
        drafts: list[_Draft] = []
        for name in sorted(self.ways.schedules, key=lambda name: name != LEAN):
            fits = plans or any(draft.rank[0] == 0 for draft in drafts)
            if fits and self.budget.work.late:
                failed.append((self._family(name), OutOfTime(NOT_SEARCHED)))
                continue
            try:
                if self.ways.groups:
                    plans.append(self._as_pinned(name))
                else:
                    drafts.append(self._draft(name))
            except (PipelineScheduleError, PhaseError, Infeasible) as error:
                failed.append((self._family(name), error))
        drafts.sort(key=lambda draft: (draft.rank, self.ways.schedules.index(draft.name)))
        return plans, drafts

    def _left_out(
        self, draft: _Draft, plans: Sequence[Candidate], *, is_first: bool
    ) -> PartitionerError | None:
        """Why a draft is not simulated, beside the best plans so far; None if it is."""
        costs = (step_cost(plan.evaluation, self.ways.objective) for plan in plans)
        best = min(self.budget.best_s, to_beat(costs, self.ways.wanted))
        estimate = f"not simulated: a step of {units.seconds(draft.rank[1])} is estimated"
        if self.ways.objective != "memory" and draft.rank[1] > FAR * best:
            return PartitionerError(estimate)
        needed = is_first and best == math.inf
        return OutOfTime(estimate) if not needed and self.budget.work.over else None

    def _without_plans(self, failed: Sequence[tuple[Family, PartitionerError]]) -> SpaceResult:
        """The result where no plan is as good as the known one of the budget."""
        searched = str(self._family(""))
        return SpaceResult((), searched, bound=self._bound_s, failed=tuple(failed))

    def _draft(self, name: Table) -> _Draft:
        """Cuts for a schedule, by their estimates.

        Raises:
            PipelineScheduleError: The schedule does not serve the lanes.
        """
        lane_of = self._lane_of(name)
        most = len(self.figures.positions) - 1
        if len(lane_of) > most:
            raise PipelineScheduleError(
                f"{len(lane_of)} stages were asked for, and the model has {most} at most: nodes "
                "that read and write one buffer stay together"
            )
        estimate = StepEstimate(self.figures, self._table(name, lane_of))
        lost_s = None if self.again is None else self.again.lost_s
        starts = {
            cut
            for held in ((0,) * len(lane_of), estimate.held)
            if (cut := self.figures.balanced(held, lane_of, lost_s)) is not None
        }
        cuts = {self._moved(estimate, cut, self._limits) for cut in starts} | starts
        ranked = sorted(cuts, key=lambda ends: self._rank(estimate, ends, self._limits))
        rank = self._rank(estimate, ranked[0], self._limits)
        return _Draft(name, lane_of, tuple(ranked[:RIVALS]), rank, estimate)

    def _improved(self, draft: _Draft, budget: Budget) -> Candidate:
        """The best cut of a draft, after moving ends of stages as long as that gains.

        Raises:
            Infeasible: No cut was found that fits.
            PhaseError: None of the draft's cuts can run.
        """
        limits = list(self._limits)

        def simulated(ends: tuple[int, ...]) -> Candidate | None:
            with suppress(PhaseError):
                return self._run(draft, ends, limits, budget)
            return None

        rivals = iter(draft.cuts)
        ends, best = _first_that_runs(rivals, lambda cut: self._run(draft, cut, limits, budget))
        if self.again is not None:
            ends, best = self._drafted_again(draft, ends, best, limits, simulated, budget)
        for rival in rivals:
            if not budget.work.over and self._is_better(candidate := simulated(rival), best):
                ends, best = rival, candidate
        for distance in LAST_MOVES:
            for moved in self._neighbours(ends, distance):
                if not budget.work.over and self._is_better(candidate := simulated(moved), best):
                    ends, best = moved, candidate
        if not best.evaluation.fits_exactly:
            raise self._too_large(draft.name, best)
        return best

    def _drafted_again(
        self,
        draft: _Draft,
        ends: tuple[int, ...],
        best: Candidate,
        limits: Sequence[float],
        simulated: Callable[[tuple[int, ...]], Candidate | None],
        budget: Budget,
    ) -> tuple[tuple[int, ...], Candidate]:
        """The best cut of several drafts, each by the memory that lanes of the last one took.

        Args:
            draft: The draft.
            ends: Ends of its best cut.
            best: The plan of that cut.
            limits: Bytes that the devices of each lane count as having, which plans of cuts change.
            simulated: Gives the plan of a cut; None if it cannot run.
            budget: Its work ends the drafts of a plan that fits, its clock all.
        """
        seen = {ends}
        for _ in range(DRAFTS):
            stops = budget.work.over if best.evaluation.fits_exactly else budget.work.late
            cut = ends if stops else self._moved(draft.estimate, ends, limits)
            if cut in seen:
                break
            seen.add(cut)
            if self._is_better(candidate := simulated(cut), best):
                ends, best = cut, candidate
        return ends, best

    def _run(
        self, draft: _Draft, ends: tuple[int, ...], limits: list[float], budget: Budget
    ) -> Candidate:
        """The plan of a cut.

        Raises:
            PhaseError: Its stages cannot run.
        """
        if self.again is None:
            return self._simulated(draft, ends, self.figures.sharding, budget)
        return self._within_memory(draft, ends, self.again, limits, budget)

    def _simulated(
        self, draft: _Draft, ends: tuple[int, ...], sharding: Sharding, budget: Budget
    ) -> Candidate:
        """The plan of a cut of a sharding of all stages' devices."""
        plan = self._plan(draft.name, draft.lane_of, ends, sharding=sharding)
        budget.work.spend(EVALUATION_STEPS * len(plan.nodes))
        return self._candidate(draft.name, plan, sharding.graph)

    def _within_memory(
        self,
        draft: _Draft,
        ends: tuple[int, ...],
        again: ComputedAgain,
        limits: list[float],
        budget: Budget,
    ) -> Candidate:
        """The plan of a cut whose stages compute again what they must.

        Memory is counted by the referee: where it is another than that by which the offers were
        chosen, they are chosen anew for as much less or more, which the next cut begins with. If
        the best of these plans is nearly within memory, its lanes that are short alone choose anew.

        Args:
            draft: The draft.
            ends: Ends of its stages.
            again: Chooses the offers.
            limits: Bytes that the devices of each lane count as having; changed.
            budget: Pays for the evaluations.

        Raises:
            PhaseError: The stages cannot run with what is computed again first.
        """
        seen: set[frozenset[str]] = set()
        best: _Packed | None = None
        for _ in range(CHOICES):
            if best is not None and best.candidate.evaluation.fits_exactly and budget.work.over:
                break
            try:
                one = self._packed(draft, ends, again, limits, seen, budget)
            except PhaseError:
                if best is None:
                    raise
                break
            if one is None:
                break
            limits[:] = one.corrected
            best = one if best is None else min(best, one, key=self._packed_figure)
        assert best is not None
        last = best
        for _ in range(MENDS):
            if not last.is_nearly_within(self._limits) or budget.work.late:
                break
            try:
                one = self._packed(draft, ends, again, last.tighter(self._limits), seen, budget)
            except PhaseError:
                break
            if one is None:
                break
            limits[:] = one.corrected
            last, best = one, min(best, one, key=self._packed_figure)
        return best.candidate

    def _packed(
        self,
        draft: _Draft,
        ends: tuple[int, ...],
        again: ComputedAgain,
        limits: Sequence[float],
        seen: set[frozenset[str]],
        budget: Budget,
    ) -> _Packed | None:
        """The plan of a cut by what its lanes compute again within limits; None if it was seen."""
        estimate, size = draft.estimate, self.figures.sharding.size
        taken = again.packed(ends, estimate.moments, limits, splits=estimate.splits)
        if taken.again in seen:
            return None
        seen.add(taken.again)
        candidate = self._simulated(draft, ends, again.offering.taking(taken.again), budget)
        exact_bytes = candidate.evaluation.exact_bytes
        peaks = [
            max(exact_bytes[device] for device in range(first, first + size))
            for first in range(0, size * len(limits), size)
        ]
        corrected = tuple(
            (1 - MARGIN) * most + counted - peak
            for most, counted, peak in zip(self._limits, taken.bytes, peaks, strict=True)
        )
        over = tuple(peak - most for most, peak in zip(self._limits, peaks, strict=True))
        return _Packed(candidate, tuple(limits), corrected, over)

    def _is_better(self, candidate: Candidate | None, best: Candidate) -> TypeGuard[Candidate]:
        """Tell whether a plan can run, and has a lower figure than the best one."""
        return candidate is not None and self.ways.figure(candidate) < self.ways.figure(best)

    def _packed_figure(self, packed: _Packed) -> tuple[int, float]:
        return self.ways.figure(packed.candidate)

    @cached_property
    def _limits(self) -> tuple[float, ...]:
        """Bytes of a device of each lane that plans may take; next to none if least is wanted."""
        if self.ways.objective == "memory":
            return (1.0,) * self.figures.lanes
        size, devices = self.figures.sharding.size, self.figures.cluster.devices
        return tuple(
            float(min(device.memory_bytes for device in devices[first : first + size]))
            for first in range(0, self.figures.lanes * size, size)
        )

    def _as_pinned(self, name: Table) -> Candidate:
        """The plan whose stages are the stretches of nodes that are pinned to one group.

        Raises:
            Infeasible: It does not fit.
            PipelineScheduleError: The schedule does not serve the lanes.
        """
        groups = self.ways.groups
        keys = self.ways.stages or groups
        ends = tuple(i for i, (a, b) in enumerate(pairwise(keys), 1) if a != b)
        stages = [groups[start] for start in (0, *ends)]
        lanes = tuple(dict.fromkeys(stages))
        lane_of = tuple(map(lanes.index, stages))
        plan = self._plan(name, lane_of, (*ends, len(groups)), lanes)
        candidate = self._candidate(name, plan, self.figures.sharding.graph)
        if not candidate.evaluation.fits_exactly:
            raise self._too_large(name, candidate)
        return candidate

    def _too_large(self, name: Table, best: Candidate) -> Infeasible:
        """The refusal of the best cut that was found, which does not fit."""
        evaluation, plan = best.evaluation, best.plan
        over = max(evaluation.short_bytes, key=evaluation.short_bytes.__getitem__)
        peak, short = evaluation.needed_peak(over), evaluation.short_bytes[over]
        in_kernels = evaluation.needed_bytes[over] > evaluation.held_bytes[over]
        where = f"on device {over} at {peak.at!r}"
        if (stages := _stages_on(plan, over, peak.at)) and plan.kind == "pipeline":
            where += f" of stage{'s' if len(stages) > 1 else ''} {numbers(stages)}"
        if in_kernels:
            where += f" in {executor_of(best.graph).holder}"
        text = shortage_message(
            proven=False,
            least=False,
            where=where,
            short=short,
            held=evaluation.needed_bytes[over],
            limit=evaluation.limit_bytes[over],
        )
        holdings = Holdings.of(best.graph, plan, self.figures.cluster)
        parts = holdings.text(over, exact=True, headroom=not in_kernels)
        held = f"without them it holds {parts}" if in_kernels else f"there it holds {parts}"
        return Infeasible(
            f"{text}; {held}; this is {self._family(name)}",
            device=over,
            name=peak.at,
            bytes_short=float(short),
            proven=False,
        )

    def _candidate(self, name: Table, plan: Plan, graph: Graph) -> Candidate:
        evaluation = evaluate(graph, plan, self.figures.cluster, resharder=self._resharder)
        cost = step_cost(evaluation, self.ways.objective)
        solution = Solution((), cost, min(cost, self._bound_s), "feasible", None, SOLVER)
        return Candidate(self._family(name), graph, plan, evaluation, solution)

    @cached_property
    def _resharder(self) -> Resharder:
        """Remembers the reshards of all plans, which differ in few."""
        return Resharder(self.figures.cluster)

    @cached_property
    def _bound_s(self) -> float:
        """No cut of the sharding costs less, in the order of any of the schedules."""
        if self.ways.objective == "memory":
            return 0.0
        if self.shardings:
            return least_of_nodes(
                [replace(self.figures, sharding=each) for each in self.shardings.values()]
            )
        if self.ways.groups:
            return self.figures.least_s()
        tables = []
        for name in self.ways.schedules:
            with suppress(PipelineScheduleError):
                tables.append(self._table(name, self._lane_of(name)))
        return min(map(self.figures.least_s, tables), default=0.0)

    def _family(self, name: Table) -> Family:
        named = name if isinstance(name, str) else "table"
        kind = f"pipeline {named}".strip()
        count = self.ways.micro_batches
        text = f"{kind} of {count} micro-batch{'es' if count > 1 else ''}"
        meshes = tuple(self._meshes())
        if self.shardings:
            sizes = sorted({*map(len, self.ways.groups)})
            text += f" in stages of {' and '.join(map(str, sizes))} devices"
            meshes = tuple(DeviceMesh.line(size) for size in sizes[:1])
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
        if name not in self._tables:
            self._tables[name] = (
                pipeline_schedule(name, lane_of, self.ways.micro_batches)
                if isinstance(name, str)
                else from_csv("\n".join(name) + "\n")
            )
        return self._tables[name]

    # Cuts ------------------------------------------------------------------------------------

    def _rank(
        self,
        estimate: StepEstimate,
        ends: tuple[int, ...],
        limits: Sequence[float],
        best: tuple[float, float] = (math.inf, math.inf),
    ) -> tuple[float, float]:
        """Bytes above the limits, then seconds: infinite ones where `best` is clearly less."""
        again = None
        if self.again is None:
            within = limits[0] if self.ways.objective == "memory" else None
            splits = estimate.splits
            over = self.figures.over_bytes(ends, estimate.moments, splits=splits, within=within)
        else:
            load = self.again.load(ends, estimate.moments, limits, splits=estimate.splits)
            over, again = load.over_bytes, load.seconds
        if over >= best[0] and (over > best[0] or estimate.least_s(ends, again) >= best[1]):
            return over, math.inf
        return over, float(f"{estimate.seconds(ends, again):.9g}")

    def _moved(
        self, estimate: StepEstimate, ends: tuple[int, ...], limits: Sequence[float]
    ) -> tuple[int, ...]:
        """The cut after moving ends of stages one after the other, as long as that gains."""
        rank = self._rank(estimate, ends, limits)
        work = self.budget.share(2 * len(self.ways.schedules)).work
        steps = ESTIMATE_STEPS * sum(map(len, estimate.table.lanes))
        for distance in MOVES:
            improved = True
            while improved and not work.over:
                improved = False
                for moved in self._neighbours(ends, distance):
                    work.spend(steps)
                    other = self._rank(estimate, moved, limits, rank)
                    if other < rank:
                        ends, rank, improved = moved, other, True
                        break
        return ends

    def _neighbours(self, ends: tuple[int, ...], distance: int) -> Iterator[tuple[int, ...]]:
        for index in range(len(ends) - 1):
            low, high = ends[index - 1] if index else 0, ends[index + 1]
            for end in (ends[index] - distance, ends[index] + distance):
                if low < end < high and self.figures.open[end]:
                    yield *ends[:index], end, *ends[index + 1 :]

    def _plan(
        self,
        name: Table,
        lane_of: tuple[int, ...],
        ends: tuple[int, ...],
        lanes: Sequence[tuple[int, ...]] = (),
        sharding: Sharding | None = None,
    ) -> Plan:
        sharding = sharding or self.figures.sharding
        units = self.figures.units
        stage_of = np.searchsorted(np.array(ends), np.arange(len(units)), side="right")
        forward = {unit: int(stage) for unit, stage in zip(units, stage_of, strict=True)}
        stages = stages_of_all(sharding.graph, forward)
        groups = [(lanes or [mesh.devices for mesh in self._meshes()])[lane] for lane in lane_of]
        shardings = [self.shardings.get(len(own), sharding) for own in groups]
        cluster, count = self.figures.cluster, self.ways.micro_batches
        return staged_plan(shardings, cluster, stages, groups, name, count)


def _stages_on(plan: Plan, device: int, task: str) -> tuple[int, ...]:
    """The stage of a node or, where the task is none, the stages on a device, ascending."""
    assert plan.pipeline is not None
    if task in plan.nodes:
        return (plan.pipeline.stages[plan.nodes[task].group],)
    groups = zip(plan.groups, plan.pipeline.stages, strict=True)
    return tuple(sorted({stage for mesh, stage in groups if device in mesh.devices}))


@dataclass(frozen=True)
class _Packed:
    """The plan of a cut by what its lanes compute again.

    Attributes:
        candidate: The plan.
        limits: Bytes that the devices of each lane counted as having when this was chosen.
        corrected: The same by what the referee counts: less where it counts more than the choice.
        over: Bytes that the referee counts above the memory of each lane's devices.
    """

    candidate: Candidate
    limits: tuple[float, ...]
    corrected: tuple[float, ...]
    over: tuple[float, ...]

    def is_nearly_within(self, memory: Sequence[float]) -> bool:
        """Whether some lanes are short of their devices' memory, and none by much."""
        shares = [over / most for over, most in zip(self.over, memory, strict=True)]
        return 0 < max(shares) <= NEARLY

    def tighter(self, memory: Sequence[float]) -> tuple[float, ...]:
        """Its limits, less what its lanes are short of."""
        return tuple(
            limit - (over + MARGIN * most) if over > 0 else limit
            for limit, over, most in zip(self.limits, self.over, memory, strict=True)
        )


def _first_that_runs(
    cuts: Iterator[tuple[int, ...]], run: Callable[[tuple[int, ...]], Candidate]
) -> tuple[tuple[int, ...], Candidate]:
    """The first of some cuts whose stages can run, and its plan.

    Raises:
        PhaseError: None can; of the first one.
    """
    cut = next(cuts)
    try:
        return cut, run(cut)
    except PhaseError:
        for cut in cuts:
            with suppress(PhaseError):
                return cut, run(cut)
        raise


def staged_plan(
    shardings: Sequence[Sharding],
    cluster: Cluster,
    stages: Mapping[str, int],
    devices: Sequence[tuple[int, ...]],
    name: Table,
    micro_batches: int,
) -> Plan:
    """The plan of a graph whose nodes are in stages, each with a sharding and devices of its own.

    The order of the nodes is that of the first stage's sharding.
    """
    groups: dict[tuple[int, int], int] = {}
    nodes: dict[str, NodePlan] = {}
    meshes: list[DeviceMesh] = []
    of_group: list[int] = []
    for node in shardings[0].plan.nodes:
        stage = stages[node]
        sharding = shardings[stage]
        decision = sharding.plan.nodes[node]
        key = stage, decision.group
        if key not in groups:
            groups[key] = len(meshes)
            mesh = sharding.plan.groups[decision.group]
            own = tuple(devices[stage][device] for device in mesh.devices)
            meshes.append(DeviceMesh(mesh.axes, own))
            of_group.append(stage)
        nodes[node] = NodePlan(groups[key], decision.cuts)
    pipeline = Pipeline(name, micro_batches, tuple(of_group))
    digest = shardings[0].graph.digest
    return Plan(digest, cluster.to_data(), tuple(meshes), nodes, pipeline=pipeline)
