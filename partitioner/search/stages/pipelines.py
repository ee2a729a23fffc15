"""The search of pipelines over sizes of stages: a sharding for each size, cut for each schedule.

A stage is a stretch of the traced order of the forward pass, with the backward nodes that belong to
it. For each size of a stage's mesh, the graph of a micro-batch is sharded over one mesh as a whole,
within a limit of memory, and that plan is cut (`search.stages.cut_search`). Of stages of several
sizes the cut and the sizes are chosen together, for the least largest load of a stage: it
takes the seconds that its nodes and messages take in the sharding of its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations

import numpy as np

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import evaluate_placed
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh, numbers
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.pipeline.generate import SCHEDULES
from partitioner.ir.plan import Pipeline, Plan, resolve
from partitioner.problem.build import planned_on
from partitioner.rewrites.graph_writer import chosen
from partitioner.rewrites.staging import changing_nodes, layers
from partitioner.search.find_plan import find_plan, goes_by_levels, is_decided
from partitioner.search.outcome import NoCheaper, Outcome, OutOfTime, SpaceResult, winner
from partitioner.search.request import EXPLICIT, SOME_PLAN_S, Budget, Request
from partitioner.search.stages.computed_again import Offering
from partitioner.search.stages.cut_search import (
    LEAN,
    NOT_SEARCHED,
    RIVALS,
    TWICE,
    Pipelines,
    PipelineSearch,
    Table,
    flying_shares,
    step_cost,
    to_beat,
)
from partitioner.search.stages.figures import Sharding, StageFigures
from partitioner.search.stages.stage_lives import Floats
from partitioner.solver.outcome import Infeasible, short_of_memory
from partitioner.solver.stages.cut import State, least_cuts
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.spaces import Family, SearchError

#: Shardings that are searched where no cut of one fits; each is to hold fewer bytes than the last,
#: by so many times those that its cut is short of. No plan of `tests/benchmarks/plan_digests.py` or
#: `gpt3_training.py` beside it needs a second one; `llama.py` at 70B in 16 stages of `zbv` does.
ATTEMPTS, SHORT = 3, 1.2
#: Most stages of several sizes.
MOST_STAGES = 8
#: Limits that are tried where the first is a guess: within the least bytes that are proven to be
#: needed a search may find no plan, though there is one.
GUESSES = 3


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

    The request is called before `Request.over`; what cannot cost less than the known plan of the
    budget is left early. `sizes` are numbers of devices of a stage; None for those of the request.

    Raises:
        Infeasible: No plan of stages was found that fits.
        NoCheaper: None was found that costs less than the known plan of the budget.
        PipelineScheduleError: No schedule asked for serves any of the lanes.
    """
    results: list[SpaceResult] = []
    errors: list[PartitionerError] = []
    search = _Spaces(graph, cluster, request, micro_batches)
    request.constraints.check(graph, len(cluster))
    groups, stages = _pinned_groups(graph, request.constraints)
    if len({*map(len, groups)}) > 1:
        names = _schedules(request, len({*groups}), graph)
        ways = Pipelines(micro_batches, names, groups, stages, request)
        result = search.of_pinned_sizes(budget, ways)
        outcome = winner([result], request, cluster, stopped=budget.work.stopped)
        return _of_kept(replace(outcome, of=graph), request.constraints.plan)
    sizes = sizes or request.stage_sizes(len(cluster))
    sizes = (len(groups[0]),) if groups else _apt(sizes, graph, cluster)
    for index, size in enumerate(sizes):
        mesh = DeviceMesh.line(size)
        text = f"pipeline of {micro_batches} micro-batches in stages"
        family = Family(text, (mesh,), (mesh,), symmetric=False)
        if index and budget.work.late:
            results.append(SpaceResult(failed=((family, OutOfTime(NOT_SEARCHED)),)))
            continue
        share = _beating(results, budget.share(len(sizes) - index), request)
        names = _schedules(request, len(cluster) // size, graph)
        ways = Pipelines(micro_batches, names, groups, stages, request)
        budget.say(f"cutting stages of {size} device{'s' if size > 1 else ''}")
        try:
            results.append(search.of_size(share, size, ways))
        except (PipelineScheduleError, SearchError, Infeasible) as error:
            errors.append(error)
            results.append(SpaceResult(failed=((family, error),)))
    if len(sizes) > 1 and _takes_several_sizes(graph, cluster, request) and not budget.work.over:
        budget.say("cutting stages of several sizes")
        # other numbers of micro-batches are better for it, as a rule, unless one is asked for
        rest = budget if request.micro_batch_count else budget.of_clock(2)
        with suppress(PipelineScheduleError, Infeasible, ConstraintError):
            results.append(search.of_several_sizes(_beating(results, rest, request)))
        if rest.work.stopped:
            budget.work.cut_off()
    searched = [result for result in results if result.searched]
    if errors and not searched:
        short = [error for error in errors if isinstance(error, Infeasible)]
        raise min(short, key=lambda error: error.bytes_short) if short else errors[0]
    if not any(result.plans for result in results):
        bound = min(result.bound for result in results)
        raise NoCheaper(f"no plan of {micro_batches} micro-batches was found to be faster", bound)
    outcome = winner(results, request, cluster, stopped=budget.work.stopped)
    return _of_kept(replace(outcome, of=graph), request.constraints.plan)


def _apt(sizes: tuple[int, ...], graph: Graph, cluster: Cluster) -> tuple[int, ...]:
    """The sizes that divide the nodes of a cluster or consist of some; all if none does.

    Of these, those of which there are no more stages than operators to cut; all if there are.
    """
    levels, most = [level.size for level in cluster.levels], len(changing_nodes(graph))
    even = [s for s in sizes if all(s % level == 0 or level % s == 0 for level in levels)] or sizes
    return tuple(size for size in even if len(cluster) // size <= most) or tuple(even)


def _beating(results: Sequence[SpaceResult], budget: Budget, request: Request) -> Budget:
    """The budget with the cost that is to be beaten, if that is less than its own."""
    goal, plans = request.objective, (plan for result in results for plan in result.plans)
    costs = (step_cost(plan.evaluation, goal) for plan in plans)
    return replace(budget, best_s=min(budget.best_s, to_beat(costs, request.tune or 1)))


def _takes_several_sizes(graph: Graph, cluster: Cluster, request: Request) -> bool:
    """Tell whether stages of several sizes are searched.

    They are on few devices, of graphs that are not large.

    A table of the user's has its lanes, and schedules with two stages on each want equal ones.
    """
    by_levels = goes_by_levels(graph, len(cluster), request.inside_stages(len(cluster), 1))
    named = not isinstance(request.schedule, tuple) and request.schedule not in TWICE
    return 2 < len(cluster) <= EXPLICIT and not by_levels and named


@dataclass(frozen=True)
class UnevenCut:
    """Stages of several sizes."""

    ends: tuple[int, ...]  #: Ends of the stages, exclusive, as numbers of nodes that are cut.
    sizes: tuple[int, ...]  #: Devices of each stage.
    load_s: float  #: Of the busiest stage, for one micro-batch.

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Devices of each node that is cut, in order: neighbours share a stage."""
        groups, start, first = [], 0, 0
        for end, size in zip(self.ends, self.sizes, strict=True):
            groups += [tuple(range(first, first + size))] * (end - start)
            start, first = end, first + size
        return tuple(groups)


def uneven_cuts(figures: Mapping[int, StageFigures], devices: int) -> Iterator[UnevenCut]:
    """For each number of stages the cut of least largest load over all devices, if sizes differ."""
    at = figures[min(figures)].positions
    most = min(MOST_STAGES, devices)
    sizes, loads, numbers_of = list[int](), list[Floats](), dict[StageFigures, int]()
    behind: dict[int, list[tuple[int, int]]] = {}  # devices before a stage and its load, by its end
    for end in range(1, devices + 1):
        behind[end] = []
        for size, of_size in figures.items():
            if size > end:
                continue
            stage = of_size.on(range(end - size, end))
            if stage not in numbers_of:
                numbers_of[stage] = len(loads)
                sizes.append(size)
                loads.append(of_size.between(at, stage))
            behind[end].append((end - size, numbers_of[stage]))
    steps: dict[State, list[tuple[State, int]]] = {(0, 0): []}
    for stages in range(1, most + 1):
        for end in range(1, devices + 1):
            steps[stages, end] = [((stages - 1, used), load) for used, load in behind[end]]
    cuts = least_cuts(loads, steps)
    for stages in range(1, most + 1):
        load_s = float(cuts.load_s[stages, devices][-1])
        taken = cuts.stages((stages, devices)) if np.isfinite(load_s) else ()
        of_stages = tuple(sizes[load] for *_, load in taken)
        if len(set(of_stages)) > 1:
            yield UnevenCut(tuple(int(at[stop]) for _, stop, _ in taken), of_stages, load_s)


def _pinned_groups(
    graph: Graph, constraints: Constraints
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Devices and stage of each node that is cut, in order, if any is pinned or kept.

    Of a plan in part, one without a decision goes with those that belong to it, as its weights and
    its backward pass. Others go with the one before; pins name no stages.

    Raises:
        ConstraintError: Groups overlap.
    """
    units, kept = changing_nodes(graph), constraints.plan
    if kept is not None:
        known = [constraints.stage_of(node) for node in units]
        if not all(known):
            around = ([graph.nodes[at] for at in positions] for positions in layers(graph))
            others = (next(filter(None, map(constraints.stage_of, own)), ()) for own in around)
            known = [one or other for one, other in zip(known, others, strict=True)]
        stages = _filled(known)
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


def _of_kept(outcome: Outcome, kept: Plan | None) -> Outcome:
    """The outcome of stages that a plan says of some nodes; of all, its cost is the bound.

    Raises:
        ConstraintError: The stages contradict that plan.
    """
    if kept is None:
        return outcome
    found = replace(outcome.plan, blocks=kept.blocks)
    outcome = replace(outcome, plan=found)
    for name, decision in kept.nodes.items():
        wanted, own = kept.groups[decision.group], found.groups[found.nodes[name].group]
        if set(wanted.devices) != set(own.devices):
            raise ConstraintError(
                f"the plan in constraints has {name!r} on devices {numbers(wanted.devices)}, and "
                f"the nodes that it lists beside it bring it to {numbers(own.devices)}: list more "
                "nodes of the forward pass, from which stages are made"
            )
    if found.nodes.keys() != kept.nodes.keys():
        return outcome
    return outcome.certified(bound=outcome.certificate.cost, status="optimal")


def _filled(groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Give what each has or, if that is empty, what the one before has; empty if none has any."""
    last = next((group for group in groups if group), ())
    return tuple(last := group or last for group in groups) if last else ()


def _schedules(request: Request, lanes: int, graph: Graph) -> tuple[Table, ...]:
    """The schedules to try: that asked for, or all that fit the graph."""
    if request.schedule is not None:
        return (request.schedule,)
    if not graph.backward:
        return ("forward",)
    if lanes == 1:
        return ("1f1b",)
    return tuple(name for name in SCHEDULES if name != "forward")


def first_sharding(
    sharded: Callable[[int], Sharding], limit: int, memory: int, *, is_guess: bool
) -> Sharding:
    """The best plan within a limit or, if that is a guess, the one that is short of fewest bytes.

    The limit of several lanes is a guess: stages of that plan may fit, or show which does not. Each
    device has `memory`, which a refusal names.

    Raises:
        Infeasible: Nothing fits the limit, and it is no guess, or no such plan was found.
    """
    for left in reversed(range(GUESSES)):
        try:
            return sharded(limit)
        except Infeasible as error:
            if not (is_guess and left and error.bytes_short):
                raise _of_devices(error, limit, memory) from None
            limit += math.ceil(error.bytes_short)
    raise AssertionError("the last guess returns or raises")


def _of_devices(error: Infeasible, limit: int, memory: int) -> Infeasible:
    """A refusal of devices of `limit` bytes, as one of devices that have `memory`."""
    held = limit + math.ceil(error.bytes_short)
    if error.device is None or held <= memory or limit == memory:
        return error
    return short_of_memory(held, memory, error.device, error.name)


def least_memory(cluster: Cluster) -> int:
    """Bytes of the device that has fewest."""
    return min(device.memory_bytes for device in cluster.devices)


def limit_bytes(
    graph: Graph,
    cluster: Cluster,
    size: int,
    micro_batches: int,
    schedules: Sequence[Table] = (LEAN,),
) -> int:
    """Bytes that the whole model may take on each device of one mesh.

    A device holds what is kept of one stage alone. Of the activations of training, it holds its
    part of the micro-batches that are in flight, in that schedule in which these are fewest. Those
    of a request are not kept: one stage may hold as many as the whole model does.
    """
    if size == 1 and not graph.optional:  # there is one plan
        return 4 * sum(type_.nbytes for type_ in graph.types.values())
    lanes, kept = len(cluster) // size, kept_bytes(graph) // size
    shares = flying_shares(schedules, lanes, size, micro_batches) if graph.backward else ()
    return kept + int((least_memory(cluster) - kept // lanes) / min(shares, default=1.0))


@dataclass(frozen=True)
class _Spaces:
    """The spaces of stages of the graph of one micro-batch, by their sizes."""

    graph: Graph
    cluster: Cluster
    request: Request  #: The request, called before `Request.over`.
    micro_batches: int  #: Micro-batches of a step.
    #: Shardings that were found, by the digest of the graph that was searched, the number of its
    #: nodes that may be left out, the size of the mesh and the limit.
    known: dict[tuple[str, int, int, int], Sharding] = field(default_factory=dict)

    def of_size(self, budget: Budget, size: int, ways: Pipelines) -> SpaceResult:
        """The best plan of stages of so many devices.

        Where values may be computed again, or all devices share a request, and no cut of a sharding
        fits, one is searched that holds fewer bytes, as the search of shardings counts them. Of
        stages of one device all that there is to choose is what each computes again.

        Raises:
            Infeasible: No plan was found that fits.
            PipelineScheduleError: No schedule serves the lanes.
        """
        graph, cluster, is_guess = self.graph, self.cluster, size < len(self.cluster)
        memory, count = least_memory(cluster), self.micro_batches
        limit = limit_bytes(graph, cluster, size, count, ways.schedules)
        sharded = partial(self.sharded_within, budget, size)

        def most_held(sharding: Sharding) -> int:
            placed = resolve(sharding.graph, sharding.plan)
            of_step = None if graph.backward or is_guess else Pipeline("forward", count)
            evaluation = evaluate_placed(sharding.graph, placed, cluster.first(size), of_step)
            return max(evaluation.held_bytes.values())

        of_cuts = budget.work.left / 2
        is_given = size == 1 and bool(graph.optional) and not self.request.constraints.bound
        if is_given:
            sharding = Sharding.on_one(chosen(graph, graph.optional), cluster)
        else:
            sharding = first_sharding(sharded, limit, memory, is_guess=is_guess)
        budget = budget.with_steps(of_cuts)  # kinds of parallelism may have taken theirs
        for attempt in range(1, ATTEMPTS + 1):
            try:
                offering = None if ways.groups else Offering.of(graph, sharding)
                once = sharding if offering is None else offering.taking(())
                figures = StageFigures(
                    once,
                    cluster,
                    count,
                    groups=tuple(dict.fromkeys(ways.groups)),
                    resharder=Resharder(cluster.first(size)),
                )
                return PipelineSearch(figures, ways, budget, offering=offering).search()
            except Infeasible as error:
                last = is_given or attempt == ATTEMPTS or budget.work.late
                has_others = graph.optional or not (graph.backward or is_guess)
                if last or not has_others or not error.bytes_short:
                    raise
                refusal = error
            held_bytes = most_held(sharding)
            limit = held_bytes - int(SHORT * refusal.bytes_short)
            try:
                sharding = first_sharding(sharded, limit, memory, is_guess=is_guess)
            except Infeasible:  # it is short of bytes of one mesh; the last cut, of a stage's
                raise refusal from None
            if most_held(sharding) >= held_bytes:
                raise refusal
        raise AssertionError("every attempt returns or raises")

    def of_pinned_sizes(self, budget: Budget, ways: Pipelines) -> SpaceResult:
        """The plan of stages that are pinned to groups of several sizes: each sharded for its own.

        The smallest group says which values are computed again, since it holds most.

        Raises:
            ConstraintError: A mesh is asked for, which cannot be that of all groups.
            Infeasible: It does not fit.
            PipelineScheduleError: No schedule serves the lanes.
        """
        sizes = sorted({*map(len, ways.groups)})
        if self.request.mesh is not None:
            text = f"stages are pinned to groups of {' and '.join(map(str, sizes))} devices"
            raise ConstraintError(f"{text}: leave out the mesh")
        shardings = self._sharded_for(sizes, budget)
        figures = StageFigures(shardings[sizes[0]], self.cluster, self.micro_batches)
        return PipelineSearch(figures, ways, budget, shardings).search()

    def of_several_sizes(self, budget: Budget) -> SpaceResult:
        """The best plan of stages of several sizes, powers of two, on all devices.

        Raises:
            Infeasible: No plan was found that fits.
            PipelineScheduleError: No schedule serves the lanes.
        """
        devices, count = len(self.cluster), self.micro_batches
        sizes = [2**power for power in range(devices.bit_length()) if 2**power < devices]
        shardings = self._sharded_for(sizes, budget.share(2))
        graph = shardings[sizes[0]].graph
        figures = {n: StageFigures(of, self.cluster, count) for n, of in shardings.items()}

        def estimate(cut: UnevenCut) -> float:
            return cut.load_s * (count + len(cut.sizes) - 1)

        results: list[SpaceResult] = []
        errors: list[PartitionerError] = []
        for cut in sorted(uneven_cuts(figures, devices), key=estimate)[:RIVALS]:
            names = _schedules(self.request, len(cut.sizes), graph)
            once = tuple(name for name in names if name not in TWICE)
            ways = Pipelines(count, once, cut.groups, request=self.request)
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

    def sharded_within(self, budget: Budget, size: int, limit: int) -> Sharding:
        """The best plan of the graph on one mesh of so many devices, of `limit` bytes each.

        A plan that is kept and decides every node is that, whatever it holds: its cut tells. Else
        it takes half of what is left of the clock: its cuts take the rest, in training half of the
        steps, too. One that is `known` is not searched again, and a new one becomes known.
        """
        graph, devices = self.graph, len(self.cluster)
        key = graph.digest, len(graph.optional), size, limit
        if key in self.known:
            return self.known[key]
        first, least = self.cluster.first(size), least_memory(self.cluster)
        own = size == devices  # else the first devices stand for those of any stage
        limits = (limit + (spec.memory_bytes - least if own else 0) for spec in first.devices)
        specs = zip(first.devices, limits, strict=True)
        first = replace(first, devices=tuple(replace(d, memory_bytes=max(1, n)) for d, n in specs))
        inside = self.request.inside_stages(size, self.micro_batches, devices // size)
        inside, last = inside.over(size), inside.constraints.last
        if last is not None:
            try:
                inside.on(last)
            except ConstraintError as error:
                text = f"the last micro-batch, which is smaller: {error}"
                raise ConstraintError(f"{text}; give micro_batches that divide the batch") from None
        inside = inside.on(graph)
        kept = inside.constraints.plan
        if kept is not None and is_decided(graph, inside):
            inside.constraints.check(graph, size)
            self.known[key] = Sharding(*planned_on(graph, first, kept.groups, kept.nodes))
            return self.known[key]
        work = budget.work.share(2 if graph.backward else 1).of_the_clock(2)
        # the cost of a known step is none of one mesh: it says only that a plan is known
        best_s = SOME_PLAN_S if budget.best_s < math.inf else math.inf
        share = replace(budget, work=work, best_s=best_s)
        try:
            outcome = find_plan(graph, first, inside, share)
        finally:
            if work.stopped:
                budget.work.cut_off()
        self.known[key] = Sharding(outcome.graph, outcome.plan)
        return self.known[key]

    def _sharded_for(self, sizes: Sequence[int], budget: Budget) -> dict[int, Sharding]:
        """A sharding of one graph for each of these numbers of devices of a stage, ascending.

        Raises:
            Infeasible: One was not found.
        """
        shardings: dict[int, Sharding] = {}
        spaces, memory = self, least_memory(self.cluster)
        for index, size in enumerate(sizes):
            names = _schedules(self.request, len(self.cluster) // size, spaces.graph)
            limit = limit_bytes(spaces.graph, self.cluster, size, self.micro_batches, names)
            sharded = partial(spaces.sharded_within, budget.share(len(sizes) - index), size)
            shardings[size] = first_sharding(sharded, limit, memory, is_guess=True)
            spaces = replace(spaces, graph=shardings[size].graph)
        return shardings
