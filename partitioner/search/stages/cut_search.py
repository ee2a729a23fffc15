"""The search of cuts of a sharding into stages, for each schedule.

Cuts are first made for the least largest load of a stage within memory, by the loads of the nodes;
then ends of stages are moved as long as the estimated step gets shorter; the best of them are
simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeGuard

import numpy as np

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.foundations import units
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.phases import PhaseError
from partitioner.ir.pipeline.actions import PipelineSchedule, PipelineScheduleError
from partitioner.ir.pipeline.generate import pipeline_schedule, textbook_lanes
from partitioner.ir.pipeline.text import from_csv
from partitioner.ir.pipeline.timeline import lane_in_flight
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.rewrites.staging import stages_of_all
from partitioner.search.outcome import Candidate, OutOfTime, SpaceResult, too_large
from partitioner.search.request import Budget, Request
from partitioner.search.stages.computed_again import ComputedAgain, Offering
from partitioner.search.stages.figures import Sharding, StageFigures, least_of_nodes
from partitioner.search.stages.step_estimate import StepEstimate
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.referee import Objective
from partitioner.strategies.spaces import Family

#: A schedule by name, or the rows of its table.
Table = str | tuple[str, ...]


def staged_plan(
    shardings: Sequence[Sharding],
    cluster: Cluster,
    stages: Mapping[str, int],
    devices: Sequence[tuple[int, ...]],
    name: Table,
    micro_batches: int,
) -> Plan:
    """The plan of nodes in stages with shardings of their own, in the order of the first one."""
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
    pipeline, of = Pipeline(name, micro_batches), tuple(of_group)
    digest = shardings[0].graph.digest
    return Plan(digest, cluster.to_data(), tuple(meshes), nodes, pipeline=pipeline, stages=of)


def figure(candidate: Candidate, objective: Objective) -> tuple[int, float]:
    """Bytes above the limits, then the cost of a step."""
    evaluation = candidate.evaluation
    return sum(evaluation.short_bytes.values()), step_cost(evaluation, objective)


def step_cost(evaluation: Evaluation, objective: Objective) -> float:
    """Cost of a step in micro-batches: bytes for the objective memory, else seconds."""
    return evaluation.cost("memory") if objective == "memory" else evaluation.step_s


#: Nodes by which an end of a stage is moved, the farthest first.
MOVES = (64, 16, 4, 1)
#: The same for plans that are simulated.
LAST_MOVES = (16, 8, 4, 2, 1)
#: Cuts of least estimated seconds that are simulated, of each schedule.
RIVALS = 3
#: A schedule is not simulated if its estimated step is so many times the best simulated one, nor a
#: cut beside a simulated one of its schedule: of 260 such cuts those that were better had 1.016.
FAR, NEAR = 1.1, 1.02
#: Most choices of what stages of a cut compute again, each by the memory of the last one's plan.
#: What passes hold that compute some of it again is known of their plan alone.
CHOICES = 5
#: Schedules with two stages on each lane.
TWICE = frozenset({"interleaved", "zbv", "dualpipev"})
#: Steps of an evaluation, for each node, and of an estimate, for each action.
EVALUATION_STEPS, ESTIMATE_STEPS = 300, 2
#: The schedule that is drafted first, for where the time limit leaves no time for others: it holds
#: few micro-batches, and serves any number of lanes.
LEAN = "1f1b"
#: Why a space was left out that the time limit did not reach.
NOT_SEARCHED = "not searched within the time limit"
#: The figure of a cut that cannot run.
NEVER = (math.inf, math.inf)
#: The solver's name in certificates.
SOLVER = "decomposition into stages, steps simulated"


def to_beat(costs: Iterable[float], wanted: int) -> float:
    """Cost that a plan must beat to be among the best `wanted`; infinite if any is."""
    ranked = sorted(costs)
    return ranked[wanted - 1] if len(ranked) >= wanted else math.inf


def table_of(name: Table, lanes: int, size: int, micro_batches: int) -> PipelineSchedule:
    """The table of a schedule on so many lanes of `size` devices.

    Raises:
        PipelineScheduleError: It does not serve these lanes, or so many micro-batches.
    """
    if isinstance(name, str):
        stages = lanes * (2 if name in TWICE and lanes > 1 else 1)
        lane_of = (0,) if lanes == 1 else textbook_lanes(name, stages)
        return pipeline_schedule(name, lane_of, micro_batches)
    table = from_csv("\n".join(name) + "\n")
    if len(table.lanes) != lanes or table.micro_batches != micro_batches:
        raise PipelineScheduleError(
            f"the schedule has {len(table.lanes)} lanes and {table.micro_batches} micro-batches; "
            f"there are {lanes} of {size} devices and {micro_batches} micro-batches"
        )
    return table


def flying_shares(
    schedules: Iterable[Table], lanes: int, size: int, micro_batches: int
) -> Iterator[float]:
    """How often the fullest lane holds what the whole graph keeps of a micro-batch.

    It is that of each schedule that serves the lanes; the arguments are as of `table_of`.
    """
    for name in schedules:
        with suppress(PipelineScheduleError):
            table = table_of(name, lanes, size, micro_batches)
            yield max(lane_in_flight(table)) / table.stages


@dataclass(frozen=True)
class Pipelines:
    """The pipelines to choose from."""

    micro_batches: int  #: Micro-batches of a step.
    schedules: tuple[Table, ...]  #: Names of schedules, or the rows of one.
    #: Devices of each node that is cut, in order, if they are pinned or kept.
    groups: tuple[tuple[int, ...], ...] = ()
    stages: tuple[int, ...] = ()  #: Stage of each node that is cut, if a plan in stages is kept.
    #: Says how many plans to look for, the best ones, and what is to be least of a step.
    request: Request = field(default_factory=Request)


@dataclass(eq=False)
class _Draft:
    """Cuts for a schedule that are worth simulating, and what those that were have shown."""

    name: Table  #: The schedule.
    lane_of: tuple[int, ...]  #: The lane of each stage.
    cuts: tuple[tuple[int, ...], ...]  #: Ends of stages, exclusive, the best first.
    #: Of the first cut, the bytes above the limits and the seconds of a step, as estimated.
    rank: tuple[float, float]
    estimate: StepEstimate  #: Gives the rank.
    #: Bytes that the devices of each lane count as having where offers are chosen.
    limits: list[float]
    refusals: list[PhaseError] = field(default_factory=list)  #: Why stages cannot run.


@dataclass(eq=False)
class _Cut:
    """A cut of a draft with the plans that were simulated of it."""

    draft: _Draft
    ends: tuple[int, ...]  #: Ends of stages, exclusive.
    plans: list[Candidate] = field(default_factory=list)
    seen: set[frozenset[str]] = field(default_factory=set)  #: What its stages computed again.


@dataclass
class PipelineSearch:
    """Cuts one sharding of a graph into stages."""

    figures: StageFigures  #: The sharding and its figures.
    ways: Pipelines  #: The pipelines to choose from.
    budget: Budget  #: Its work is spent by evaluations.
    #: By the size of a stage's group, where pinned groups are of several sizes.
    shardings: Mapping[int, Sharding] = field(default_factory=dict)
    #: The offers of which stages choose what they compute again; None if the sharding says it for
    #: all of them. The figures are those of what is computed once.
    offering: Offering | None = None
    _tables: dict[Table, PipelineSchedule] = field(default_factory=dict)

    def search(self) -> SpaceResult:
        """The best plan of each schedule.

        No plan where none can beat the known one of the budget, by the bound or the estimates.

        Raises:
            Infeasible: No plan was found that fits.
            PipelineScheduleError: No schedule serves the lanes.
        """
        failed: list[tuple[Family, PartitionerError]] = []
        searched = str(self._family(""))
        if self.budget.best_s < math.inf and self._bound_s >= self.budget.best_s:
            bound = PartitionerError(f"no step takes less than {units.seconds(self._bound_s)}")
            failed = [(self._family(""), bound)]
            return SpaceResult((), searched, bound=self._bound_s, failed=tuple(failed))
        plans, drafts = self._begun(failed)
        for place, cut in enumerate(begun := self._first_cuts(drafts, failed)):
            left = self._left_out(cut.draft, plans) if place else None
            first = next(iter(cut.plans), None)
            if left is not None and first is not None and first.evaluation.fits_exactly:
                plans.append(first)
                continue
            if left is not None:
                why = left if first is None else too_large(first, self.figures.cluster)
                failed.append((self._family(cut.draft.name), why))
                continue
            try:
                plans.append(self._improved(cut, self.budget.share(len(begun) - place)))
            except (Infeasible, PhaseError) as error:
                failed.append((self._family(cut.draft.name), error))
        if plans:
            return SpaceResult(tuple(plans), searched, failed=tuple(failed))
        refusals = [error for _, error in failed if isinstance(error, Infeasible)]
        if not refusals and all(isinstance(error, PhaseError) for _, error in failed):
            raise Infeasible(f"no stages were found that can run: {failed[0][1]}", proven=False)
        is_cut_off = any(isinstance(error, OutOfTime) for _, error in failed)
        if (drafts or is_cut_off) and not refusals:
            return SpaceResult((), searched, bound=self._bound_s, failed=tuple(failed))
        raise min(refusals, key=lambda error: error.bytes_short, default=failed[0][1])

    @cached_property
    def again(self) -> ComputedAgain | None:
        """Chooses what stages compute again."""
        if self.offering is None:
            return None
        self.budget.say("pricing what stages may compute again")
        return ComputedAgain.of(self.offering, self.figures, self.budget)

    def _begun(
        self, failed: list[tuple[Family, PartitionerError]]
    ) -> tuple[list[Candidate], list[_Draft]]:
        """The plans of pinned stages, or drafts, the best first; `failed` gets the reasons else."""
        plans: list[Candidate] = []
        drafts: list[_Draft] = []
        for name in sorted(self.ways.schedules, key=lambda name: name != LEAN):
            is_known = plans or any(draft.rank[0] == 0 for draft in drafts)
            if (is_known or self.budget.best_s < math.inf) and self.budget.work.late:
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

    def _first_cuts(
        self, drafts: Sequence[_Draft], failed: list[tuple[Family, PartitionerError]]
    ) -> list[_Cut]:
        """The first cut of each draft, simulated once, the best first.

        Estimates of what is held may be too low: a schedule that does not fit is no reason to leave
        out others.
        """
        begun: list[_Cut] = []
        for draft in drafts:
            known = [plan for cut in begun for plan in cut.plans if plan.evaluation.fits_exactly]
            left = self._left_out(draft, known, is_first=not begun)
            if left is not None:
                failed.append((self._family(draft.name), left))
                continue
            cut = _Cut(draft, draft.cuts[0])
            self._run(cut, self.budget, most=1)
            begun.append(cut)

        def rank(cut: _Cut) -> tuple[float, float]:
            return min((figure(plan, self._objective) for plan in cut.plans), default=NEVER)

        return sorted(begun, key=rank)

    def _left_out(
        self, draft: _Draft, plans: Sequence[Candidate], *, is_first: bool = False
    ) -> PartitionerError | None:
        """Why a draft is not simulated, beside the best plans so far; None if it is."""
        costs = (step_cost(plan.evaluation, self._objective) for plan in plans)
        best = min(self.budget.best_s, to_beat(costs, self.ways.request.tune or 1))
        estimate = f"not simulated: a step of {units.seconds(draft.rank[1])} is estimated"
        if self._objective != "memory" and draft.rank[1] > FAR * best:
            return PartitionerError(estimate)
        needed = is_first and best == math.inf
        return OutOfTime(estimate) if not needed and self.budget.work.over else None

    def _draft(self, name: Table) -> _Draft:
        """Cuts for a schedule, by their estimates."""
        table = self._table(name)
        lane_of, most = table.lane_of, len(self.figures.positions) - 1
        if len(lane_of) > most:
            raise PipelineScheduleError(
                f"{len(lane_of)} stages were asked for, and the model has {most} at most: nodes "
                "that read and write one buffer stay together; strategy 'intra' cuts operators"
            )
        estimate = StepEstimate(self.figures, table)
        lost_s = None if self.again is None else self.again.lost_s
        starts = {
            cut
            for held in ((0,) * len(lane_of), estimate.held)
            if (cut := self.figures.balanced(held, lane_of, lost_s)) is not None
        }
        every = {self._moved(estimate, cut, self._limits) for cut in starts} | starts
        ranked = sorted(every, key=lambda ends: self._rank(estimate, ends, self._limits))
        rank = self._rank(estimate, ranked[0], self._limits)
        cuts = tuple(ranked[:RIVALS])
        return _Draft(name, lane_of, cuts, rank, estimate, list(self._limits))

    def _improved(self, first: _Cut, budget: Budget) -> Candidate:
        """The best cut of a draft, after moving ends of stages as long as that gains.

        Raises:
            Infeasible: No cut was found that fits.
            PhaseError: None of the draft's cuts can run.
        """
        draft = first.draft
        ends, best = first.ends, self._run(first, budget)
        for rival in draft.cuts[1:]:
            if best is None or not budget.work.over:
                candidate = self._run(_Cut(draft, rival), budget)
                if self._is_better(candidate, best):
                    ends, best = rival, candidate
        if best is None:
            raise draft.refusals[0]
        for distance in LAST_MOVES:
            for moved in self._neighbours(ends, distance):
                has_step = self._objective != "memory" and best.evaluation.fits_exactly
                most_s = NEAR * best.evaluation.step_s if has_step else math.inf
                if budget.work.over or self._rank(draft.estimate, moved, draft.limits)[1] > most_s:
                    continue
                candidate = self._run(_Cut(draft, moved), budget)
                if self._is_better(candidate, best):
                    ends, best = moved, candidate
        if not best.evaluation.fits_exactly:
            raise too_large(best, self.figures.cluster)
        return best

    def _run(self, cut: _Cut, budget: Budget, most: int = CHOICES) -> Candidate | None:
        """The best plan of a cut, whose stages compute again what they must; None if none can run.

        Where the referee counts other bytes than those by which offers were chosen, they are chosen
        anew for as much less or more, which the next cut begins with: until a plan fits, and once
        more if the first one does. The cut has at most so many plans then.
        """
        draft, plans, work = cut.draft, cut.plans, budget.work
        figures, estimate = self.figures, draft.estimate
        if self.again is None and not plans:
            plans += self._simulated(cut, figures.sharding, budget)
        while self.again is not None and len(plans) < most:
            fits = any(plan.evaluation.fits_exactly for plan in plans)
            if plans and ((len(plans) > 1 and fits) or (work.over if fits else work.late)):
                break
            taken = self.again.packed(cut.ends, estimate.runs, draft.limits)
            if taken.again in cut.seen:
                break
            cut.seen.add(taken.again)
            found = self._simulated(cut, self.again.offering.taking(taken.again), budget)
            if not found:
                break
            plans += found
            bytes_of = found[0].evaluation.exact_bytes
            for lane, mesh in enumerate(figures.lane_devices):
                peak = max(bytes_of[device] for device in mesh)
                draft.limits[lane] = self._limits[lane] + taken.bytes[lane] - peak
        return min(plans, key=lambda plan: figure(plan, self._objective), default=None)

    def _simulated(self, cut: _Cut, sharding: Sharding, budget: Budget) -> tuple[Candidate, ...]:
        """The plan of a cut of a sharding of all stages' devices; none if it cannot run."""
        draft, units = cut.draft, np.arange(len(self.figures.units))
        stage_of = np.searchsorted(np.array(cut.ends), units, side="right").tolist()
        try:
            plan = self._plan(draft.name, draft.lane_of, stage_of, sharding=sharding)
            budget.work.spend(EVALUATION_STEPS * len(plan.nodes))
            return (self._candidate(draft.name, plan, sharding.graph),)
        except PhaseError as error:
            draft.refusals.append(error)
            return ()

    def _is_better(
        self, candidate: Candidate | None, best: Candidate | None
    ) -> TypeGuard[Candidate]:
        if candidate is None or best is None:
            return candidate is not None
        return figure(candidate, self._objective) < figure(best, self._objective)

    @property
    def _objective(self) -> Objective:
        return self.ways.request.objective

    @cached_property
    def _limits(self) -> tuple[float, ...]:
        """Bytes of a device of each lane that plans may take; next to none if least is wanted."""
        if self._objective == "memory":
            return (1.0,) * self.figures.lanes
        devices = self.figures.cluster.devices
        return tuple(
            float(min(devices[device].memory_bytes for device in own))
            for own in self.figures.lane_devices
        )

    def _as_pinned(self, name: Table) -> Candidate:
        """The plan whose stages are those that are kept, or stretches of nodes pinned to one group.

        Raises:
            Infeasible: It does not fit.
            PipelineScheduleError: The schedule does not serve the lanes.
        """
        groups, kept = self.ways.groups, self.ways.stages
        changes = (one != other for one, other in pairwise(groups))
        numbers = sorted(set(kept))
        stage_of = [*map(numbers.index, kept)] if kept else [*accumulate(changes, initial=0)]
        stages = [groups[stage_of.index(stage)] for stage in range(1 + max(stage_of))]
        lanes = tuple(dict.fromkeys(stages))
        lane_of = tuple(map(lanes.index, stages))
        plan = self._plan(name, lane_of, stage_of, lanes)
        candidate = self._candidate(name, plan, self.figures.sharding.graph)
        if not candidate.evaluation.fits_exactly:
            raise too_large(candidate, self.figures.cluster)
        return candidate

    def _candidate(self, name: Table, plan: Plan, graph: Graph) -> Candidate:
        evaluation = evaluate(graph, plan, self.figures.cluster, resharder=self._resharder)
        cost = step_cost(evaluation, self._objective)
        kept = self.ways.request.constraints.plan
        is_only = kept is not None and kept.nodes.keys() == plan.nodes.keys()
        bound = cost if is_only else min(cost, self._bound_s)
        solution = Solution((), cost, bound, "feasible", None, SOLVER)
        return Candidate(self._family(name), graph, plan, evaluation, solution)

    @cached_property
    def _resharder(self) -> Resharder:
        return Resharder(self.figures.cluster)

    @cached_property
    def _bound_s(self) -> float:
        """No cut of the sharding costs less, in the order of any of the schedules."""
        if self._objective == "memory":
            return 0.0
        if self.shardings:
            of_size = {
                size: replace(self.figures, sharding=each) for size, each in self.shardings.items()
            }
            groups = dict.fromkeys(self.ways.groups)
            return least_of_nodes(of_size[len(group)].on(group) for group in groups)
        if self.ways.groups:
            return self.figures.least_s()
        tables = []
        for name in self.ways.schedules:
            with suppress(PipelineScheduleError):
                tables.append(self._table(name))
        return min(map(self.figures.least_s, tables), default=0.0)

    def _family(self, name: Table) -> Family:
        named = name if isinstance(name, str) else "table"
        kind = f"pipeline {named}".strip()
        count = self.ways.micro_batches
        text = f"{kind} of {count} micro-batch{'es' if count > 1 else ''}"
        axes = max(self.figures.sharding.plan.groups, key=DeviceMesh.size).axes
        meshes = tuple(DeviceMesh(axes, devices) for devices in self.figures.lane_devices)
        if self.shardings:
            sizes = sorted({*map(len, self.ways.groups)})
            text += f" in stages of {' and '.join(map(str, sizes))} devices"
            meshes = tuple(DeviceMesh.line(size) for size in sizes[:1])
        return Family(text, meshes, meshes[:1], symmetric=False)

    def _table(self, name: Table) -> PipelineSchedule:
        if name not in self._tables:
            lanes, size = self.figures.lanes, self.figures.sharding.size
            self._tables[name] = table_of(name, lanes, size, self.ways.micro_batches)
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
            over = self.figures.over_bytes(ends, estimate.runs, limits)
        else:
            load = self.again.load(ends, estimate.runs, limits)
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
        stage_of: Sequence[int],
        lanes: Sequence[tuple[int, ...]] = (),
        sharding: Sharding | None = None,
    ) -> Plan:
        sharding = sharding or self.figures.sharding
        forward = dict(zip(self.figures.units, stage_of, strict=True))
        stages = stages_of_all(sharding.graph, forward)
        groups = [(lanes or self.figures.lane_devices)[lane] for lane in lane_of]
        shardings = [self.shardings.get(len(own), sharding) for own in groups]
        cluster, count = self.figures.cluster, self.ways.micro_batches
        return staged_plan(shardings, cluster, stages, groups, name, count)
