"""The cheapest way to run a graph within the memory of its devices, some of it in blocks.

On one device it is a path (`search.blocks.paths`). Over several a path is cut into stages over the
devices in their order, each within the memory of its device, or the blocks of each stretch run on
all devices, or both. In training, every device runs its part of each block
(`search.blocks.shared`).

In micro-batches a path goes over the graph of one of them, and the graph in blocks that it gives is
cut into stages, or shared on a mesh, as any other graph is (`search.stages.pipelines`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.evaluate import evaluate, one_device
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.plan import NodePlan, Plan
from partitioner.problem.build import planned_on
from partitioner.rewrites.block_graph import BlockGraph, traced_blocks
from partitioner.search.blocks.paths import MARGINS, PathSearch
from partitioner.search.blocks.runs import Option, Runs
from partitioner.search.blocks.shared import Shared, is_shared, on_blocks
from partitioner.search.blocks.training import training_blocks
from partitioner.search.levels.asked_nodes import AskedNodes
from partitioner.search.outcome import Candidate, NoCheaper, Outcome, SpaceResult, winner
from partitioner.search.request import Budget, Request
from partitioner.search.stages.cut_search import LEAN, Table, flying_shares
from partitioner.search.stages.pipelines import find_pipeline, least_memory
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.referee import Objective
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.spaces import Family, SearchError

#: As `MARGINS`, of stages, which also hold what they send and receive.
STAGE_MARGINS = (*MARGINS, 0.75)
#: Ways that the referee prices, the cheapest, and most that it prices beyond if none of them fits.
MOST_PRICED, MOST_MORE = 12, 24
#: Ways that it prices behind the time limit, if none of those before fits.
LATE_PRICED = 3
#: Limits that are tried for a refusal, as multiples of the one asked for.
TIMES_LIMIT = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
#: Says that a plan has blocks, as the end of a clause.
PARTS_IN_BLOCKS = "parts of it run in blocks, one after the other"
SOLVER = "decomposition into blocks, the cheapest path through them"


@dataclass(frozen=True)
class BlockPlan:
    """A way to run a graph in blocks."""

    blocks: Blocks  #: The stretches.
    #: Position at which each stage begins, with its device; ascending, the first is 0.
    stages: tuple[tuple[int, int], ...]
    #: Whether the blocks of a stretch that is cut run on all devices, on that of its stage first.
    is_spread: bool = False
    #: How every device runs its part of each node, in place of stages; None if nodes are placed
    #: whole.
    shared: Shared | None = None
    #: Devices of a stage of micro-batches; None of a whole batch.
    stage_size: int | None = None

    def plan(
        self, graph: Graph, cut: BlockGraph, cluster: Cluster, pins: Constraints, budget: Budget
    ) -> tuple[Family, Plan] | None:
        """The plan of the graph of all blocks, `cut`; None if the search finds none.

        Args:
            pins: Those to devices, on nodes of `graph`.

        Raises:
            ConstraintError: A pin leaves a node without a strategy.
        """
        planned = self._planned(graph, cut, cluster, budget)
        if planned is None:
            return None
        family, plan = planned
        if pins.names_devices and len(cluster) > 1:
            of_blocks = on_blocks(pins, graph, cut)
            plan = AskedNodes(cut.graph, plan, of_blocks, Resharder(cluster)).decided()
        return family, replace(plan, blocks=self.blocks)

    def _planned(
        self, graph: Graph, cut: BlockGraph, cluster: Cluster, budget: Budget
    ) -> tuple[Family, Plan] | None:
        if self.shared is not None:
            return self.shared.plan(cut, cluster, budget)
        groups = tuple(DeviceMesh.single(device) for device in range(len(cluster)))
        name = "inter" if len(cluster) > 1 else "single"
        devices = self._devices(graph, cut, len(cluster))
        decided = {name: NodePlan(device, {}) for name, device in devices.items()}
        _, plan = planned_on(cut.graph, cluster, groups, decided)
        return Family(name, groups, groups, symmetric=False), plan

    def _devices(self, graph: Graph, cut: BlockGraph, count: int) -> Mapping[str, int]:
        """The device of each node of the graph of all blocks, of so many."""
        blocks = {graph.order[s.first]: s.blocks for s in self.blocks.stretches if s.chunks}
        devices: dict[str, int] = {}
        for node in cut.graph.nodes:
            position = cut.positions[node.name]
            device = max((begin, device) for begin, device in self.stages if begin <= position)[1]
            if self.is_spread and node.name in cut.numbers:
                of = blocks[position]
                turn = cut.numbers[node.name] * min(count, of) // of
                device = (device + turn) % count
            slot = row_of(node).in_place
            if slot is not None:  # it lies where what it writes to does
                device = devices[cut.graph.producers[node.inputs[slot]].name]
            devices[node.name] = device
        return devices


def why_not_in_blocks(cluster: Cluster, request: Request, *, staged: bool) -> str:
    """The part of a request with which no blocks are searched; "" if they are.

    They are `staged` in micro-batches, through stages.
    """
    copies = len(cluster) > 1 and not staged and request.strategy == "copies"
    asked = {
        "the plan in constraints": request.constraints.plan is not None,
        f"strategy {request.strategy!r}": copies,
        "recompute=False": request.recompute is False,
    }
    return " or ".join(what for what, is_asked in asked.items() if is_asked)


@dataclass
class BlockSearch:
    """The search of plans that run stretches of a graph in blocks."""

    graph: Graph
    cluster: Cluster
    request: Request
    #: Of a graph of one of several micro-batches: their number, and numbers of devices of a stage.
    micro_batches: int | None = None
    sizes: tuple[int, ...] = ()
    searched: str = ""  #: In words, the plans that were searched.
    #: If none of them fits: bytes of the fullest device in the one in which that has least; None if
    #: the cost model expects none to fit.
    needed_bytes: int | None = None
    #: The runs of each kind of device, whatever the limits of memory.
    _runs: dict[DeviceSpec, Runs] = field(default_factory=dict)
    _shared: dict[Shared, Runs] = field(default_factory=dict)

    def plan(self, budget: Budget) -> Outcome | None:
        """The cheapest known plan; None if none fits.

        Its bound is the price of the whole graph on the fastest device, or the share of one device
        in it if there are several: blocks compute no less.
        """
        if not self.graph.nodes:
            return None
        self.searched, self.needed_bytes = "", None
        said, complete = list[str](), True
        fitting: list[Candidate] = []
        try:
            for search in self._searches(budget):
                ways, in_time = search(budget)
                complete = complete and in_time
                said.append(self.searched)
                fitting += self._fitting(ways, budget)
                if len(fitting) >= self._wanted or budget.work.late:
                    break
        except (ConstraintError, SearchError) as error:
            said.append(str(error))
        self.searched = ", and ".join(dict.fromkeys(said))
        if not fitting:
            return None
        fitting.sort(key=lambda candidate: candidate.cost(self.request.objective))
        result = SpaceResult(tuple(fitting[: self._wanted]), self.searched)
        stopped = budget.work.stopped or not complete
        return winner([result], self.request, self.cluster, stopped=stopped)

    def _searches(
        self, budget: Budget
    ) -> Iterator[Callable[[Budget], tuple[tuple[BlockPlan, ...], bool]]]:
        """The searches of ways that the request leaves open, in turn until enough plans fit."""
        several, trains = len(self.cluster) > 1, bool(self.graph.backward)
        if self.micro_batches is not None:
            yield from (partial(self._in_micro_batches, size) for size in self.sizes)
            return
        if not several or not (trains or is_shared(self.request)):
            yield partial(self._in_training, None) if trains else self._in_stages
        if several and trains:
            sharing = Shared.ways(self.graph, self.cluster, self.request, budget)
            yield from (partial(self._in_training, shared) for shared in sharing)
        elif several and self.request.strategy != "inter":
            yield self._on_a_mesh

    def _ratio(self, shared: Shared) -> float:
        """By how many times the largest value is larger than its largest part."""
        types = self.graph.types
        return shared.ratio(
            self.graph, max(self.graph.producers, key=lambda value: types[value].numel)
        )

    @property
    def _schedule(self) -> Table:
        """The schedule of a training in stages: where it is left open, one that holds little."""
        return self.request.schedule or LEAN

    @property
    def _wanted(self) -> int:
        return self.request.tune or 1

    def _fitting(self, ways: Sequence[BlockPlan], budget: Budget) -> list[Candidate]:
        """Price ways until enough of them fit; those that do, the cheapest first."""
        trains = bool(self.graph.backward)
        fitting: list[Candidate] = []
        needed: list[int] = []
        graphs: dict[Blocks, BlockGraph] = {}
        took_s, enough = 0.0, math.inf  # for the way before; number of ways that are priced
        for priced, way in enumerate(ways, 1):
            left_s = budget.work.left_s
            # The last way holds least: there must be time for it, too.
            if trains and priced < len(ways) and left_s <= 2 * took_s:
                budget.work.stop()
                continue
            if way.blocks not in graphs:
                graphs[way.blocks] = traced_blocks(self.graph, way.blocks)
            cut, left = graphs[way.blocks], len(ways) - priced
            candidate = (
                self._priced(way, cut, budget)
                if way.stage_size is None
                else self._staged(way, cut, budget.of_clock(2 if left else 1))
            )
            took_s = left_s - budget.work.left_s
            if candidate is not None:
                needed.append(max(candidate.evaluation.needed_bytes.values()))
                fitting += [candidate] if candidate.evaluation.fits_exactly else []
            late = budget.work.late
            if fitting:  # in training the first that fits is the cheapest by these prices
                is_first = trains or late or way.stage_size is not None
                enough = 1 if is_first else MOST_PRICED
            elif late and not trains:
                enough = LATE_PRICED
            if priced >= enough and (late or len(fitting) >= self._wanted):
                break
        if not fitting:
            known = () if self.needed_bytes is None else (self.needed_bytes,)
            self.needed_bytes = min((*needed, *known), default=None)
        return sorted(fitting, key=lambda candidate: candidate.cost(self.request.objective))

    def _priced(self, way: BlockPlan, cut: BlockGraph, budget: Budget) -> Candidate | None:
        """The plan of a way, which may not fit; None if the search finds none."""
        cluster, objective = self.cluster, self.request.objective
        pins = replace(self.request.constraints, plan=None)
        planned = way.plan(self.graph, cut, cluster, pins, budget)
        if planned is None:
            return None
        family, plan = planned
        evaluation = evaluate(cut.graph, plan, cluster)
        cost, least = evaluation.cost(objective), 0.0
        if objective != "memory":
            first = cluster.first_of_spec.values()
            alone = (one_device(self.graph, cluster, device).cost(objective) for device in first)
            least = min(alone) / len(cluster)
        solution = Solution((), cost, min(cost, least), "feasible", None, SOLVER)
        return Candidate(family, cut.graph, plan, evaluation, solution)

    def _staged(self, way: BlockPlan, cut: BlockGraph, budget: Budget) -> Candidate | None:
        """The best plan of stages of a graph of blocks; None if none is found to fit."""
        assert self.micro_batches is not None
        assert way.stage_size is not None
        asked, least = self.request, self.cluster.devices[0].memory_bytes
        if self.graph.backward:
            asked = replace(asked, schedule=self._schedule)
        asked = replace(asked, constraints=on_blocks(asked.constraints, self.graph, cut))
        sizes = (way.stage_size,)
        try:
            found = find_pipeline(cut.graph, self.cluster, asked, budget, self.micro_batches, sizes)
        except Infeasible as error:
            if error.bytes_short:
                short = least + math.ceil(error.bytes_short)
                self.needed_bytes = min(short, self.needed_bytes or short)
            return None
        except (ConstraintError, NoCheaper, PipelineScheduleError, SearchError):
            return None
        best = min(found.candidates, key=lambda one: one.cost(asked.objective))
        solution = replace(best.solution, bound=0.0, status="feasible", solver=SOLVER)
        plan = replace(best.plan, blocks=way.blocks)
        return replace(best, plan=plan, solution=solution, bounds_space=False)

    def least_limit(self, budget: Budget) -> int | None:
        """A larger limit of memory under which a plan is known; None if none is found."""
        asked = self.cluster.devices[0].memory_bytes
        limits = [round(times * asked) for times in TIMES_LIMIT]
        if (needed := self.needed_bytes) is not None:  # a plan that takes no more is known
            limits = [needed, *(limit for limit in limits if limit > needed)]
        for limit in limits[:1] if self.graph.backward else limits:
            if replace(self, cluster=self.cluster.with_memory(limit)).plan(budget) is not None:
                return limit
            if budget.work.late:
                break
        return None

    def _in_stages(self, budget: Budget) -> tuple[tuple[BlockPlan, ...], bool]:
        """The ways in which each node runs whole on one device, as of `_cheapest`."""
        count = len(self.cluster)
        searches = {
            spec: PathSearch.of(self._runs_on(spec), spec, count, budget)
            for spec in self.cluster.first_of_spec
        }
        on, spread = "one device", ""
        if count > 1:
            on = f"stages of {count} devices in their order"
            spread = ", which may be spread over all devices"
        runs = sum(len(search.options) for search in searches.values())
        self.searched = f"{on}, with {runs} runs of nodes in blocks{spread}"
        return _cheapest(self._ways(searches), [*searches.values()], budget)

    def _on_a_mesh(self, budget: Budget) -> tuple[tuple[BlockPlan, ...], bool]:
        """The ways in which each device runs its part of each node, as of `_cheapest`.

        Paths are searched as on one device with as much memory as if all values were cut as the
        largest is.
        """
        spec = min(self.cluster.devices, key=lambda device: device.memory_bytes)
        if not self._shared:
            alone = self._alone(replace(spec, memory_bytes=1))
            for one in Shared.ways(self.graph, self.cluster, self.request, budget):
                weigh = self._ratio(one) * one.constants_share(self.graph)
                self._shared[one] = Runs(self.graph, alone, weigh)
        searches = {}
        for one, runs in self._shared.items():
            more = replace(spec, memory_bytes=int(self._ratio(one) * spec.memory_bytes))
            searches[one] = PathSearch.of(runs, more, 1, budget)
        kinds = dict.fromkeys(one.kind for one in searches)
        count = sum(len(search.options) for search in searches.values())
        on = f"{' and '.join(kinds)} over {len(self.cluster)} devices"
        self.searched = f"{on}, with {count} runs of nodes in blocks"
        found = (
            (margin, BlockPlan(self._blocks(path.runs), (), shared=one), path.seconds)
            for one, search in searches.items()
            for margin, path in search.paths_of_all()
        )
        return _cheapest(found, [*searches.values()], budget)

    def _in_micro_batches(self, size: int, budget: Budget) -> tuple[tuple[BlockPlan, ...], bool]:
        """The ways of stages of so many devices, as of `_cheapest`.

        Paths are searched as on one device with the memory of a stage and room for what the others
        store. Of what a micro-batch keeps for its backward pass, a device has the share of its
        stages, as often as the schedule has micro-batches in flight there. In inference it holds
        the inputs and outputs of all micro-batches.
        """
        graph, stages = self.graph, len(self.cluster) // size
        assert self.micro_batches is not None
        elsewhere = kept_bytes(graph) * (stages - 1) // stages
        spec, memory = self.cluster.devices[0], size * least_memory(self.cluster) + elsewhere
        if not graph.backward:
            ends = sum(graph.types[value].nbytes for value in (*graph.inputs, *graph.outputs))
            memory -= self.micro_batches * ends
        more = replace(spec, memory_bytes=max(1, memory))
        on = f"stages of {size} device{'s' if size > 1 else ''}" if stages > 1 else "all devices"
        if graph.backward:
            names = (self._schedule,)
            shares = flying_shares(names, stages, size, self.micro_batches)
            flying = next(shares, 1.0)  # the search of pipelines refuses what serves no lanes
            found, runs, complete = training_blocks(graph, self._alone(more), budget, flying=flying)
            ways = tuple(BlockPlan(blocks, (), stage_size=size) for blocks in found)
        else:
            search = PathSearch.of(self._runs_on(spec), more, 1, budget)
            paths = (
                (margin, BlockPlan(self._blocks(path.runs), (), stage_size=size), path.seconds)
                for margin, path in search.paths_of_all()
            )
            ways, complete = _cheapest(paths, [search], budget)
            runs = len(search.options)
        self.searched = f"{self.micro_batches} micro-batches on {on}, with {runs} runs in blocks"
        return tuple(way for way in ways if way.blocks), complete

    def _blocks(self, runs: Sequence[Option]) -> Blocks:
        return Blocks(tuple(option.stretch(self.graph) for option in runs))

    def _alone(self, spec: DeviceSpec) -> Cluster:
        level = replace(self.cluster.levels[0], size=1)
        return replace(self.cluster, devices=(spec,), levels=(level,))

    def _runs_on(self, spec: DeviceSpec) -> Runs:
        any_memory = replace(spec, memory_bytes=1)
        if any_memory not in self._runs:
            self._runs[any_memory] = Runs(self.graph, self._alone(any_memory))
        return self._runs[any_memory]

    def _ways(
        self, searches: Mapping[DeviceSpec, PathSearch]
    ) -> Iterator[tuple[float, BlockPlan, float]]:
        """Ways on one device and in stages, each with the share of memory it fills and seconds."""
        count = len(self.cluster)
        for spec, device in self.cluster.first_of_spec.items():
            for margin, path in searches[spec].paths_of_all():
                blocks = self._blocks(path.runs)
                for is_spread in (False, True)[: min(count, 2)]:
                    seconds = path.seconds / (count if is_spread else 1)
                    yield margin, BlockPlan(blocks, ((0, device),), is_spread), seconds
        for margin in STAGE_MARGINS if count > 1 else ():
            chain = _staged(self.cluster, searches, margin, self.request.objective)
            if chain is not None:
                blocks = self._blocks(chain.options)
                for is_spread in (False, True):
                    yield margin, BlockPlan(blocks, chain.stages, is_spread), chain.longest_s

    def _in_training(
        self, shared: Shared | None, budget: Budget
    ) -> tuple[tuple[BlockPlan, ...], bool]:
        """The same on one device, or on devices of which each runs its part of each block."""
        graph, cluster, on = self.graph, self.cluster, "one device"
        if shared is not None:
            on = f"{shared.kind} over {len(cluster)} devices"
        alone = self._alone(min(cluster.devices, key=lambda device: device.memory_bytes))
        trained, runs, complete = training_blocks(graph, alone, budget, shared)
        self.searched = f"{on}, with {runs} runs of nodes in blocks"
        stages = ((0, 0),) if shared is None else ()
        return tuple(BlockPlan(blocks, stages, shared=shared) for blocks in trained), complete


def find_staged_blocks(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    budget: Budget,
    micro_batches: int,
    sizes: tuple[int, ...] | None = None,
) -> Outcome:
    """The best plan of stages for a graph of one micro-batch, stretches of which run in blocks.

    It is called as `find_pipeline`. Its bound is 0: ways in blocks have more plans than are cut.

    Raises:
        Infeasible: No plan of stages in blocks was found that fits.
    """
    sizes = sizes or request.stage_sizes(len(cluster))
    search = BlockSearch(graph, cluster, request, micro_batches, sizes)
    found = search.plan(budget)
    if found is not None:
        return found
    short = (search.needed_bytes or 0) - cluster.devices[0].memory_bytes
    why = f"within the limit given, none in blocks was found (searched: {search.searched})"
    raise Infeasible(why, bytes_short=max(0, short), proven=False)


def _cheapest(
    found: Iterator[tuple[float, BlockPlan, float]], searches: Sequence[PathSearch], budget: Budget
) -> tuple[tuple[BlockPlan, ...], bool]:
    """The ways that are expected to fit, and whether all runs in blocks were priced in time.

    Some of the cheapest come first, then the others, those first that leave most room.
    """
    ways: dict[BlockPlan, tuple[float, int]] = {}
    margins: dict[BlockPlan, float] = {}
    for margin, way, seconds in found:
        ways.setdefault(way, (seconds, len(way.blocks.stretches)))
        margins[way] = margin
        if budget.work.late:
            break
    cheapest = sorted(ways, key=ways.__getitem__)
    more = sorted(cheapest[MOST_PRICED:], key=lambda way: (margins[way], ways[way]))
    complete = all(search.complete for search in searches) and not budget.work.late
    return (*cheapest[:MOST_PRICED], *more[:MOST_MORE]), complete


@dataclass(frozen=True)
class _Chain:
    """Stages from the first node to a position."""

    longest_s: float = 0.0
    sum_s: float = 0.0
    stages: tuple[tuple[int, int], ...] = ()
    options: tuple[Option, ...] = ()

    def rank(self, objective: Objective) -> tuple[float, ...]:
        """The seconds by which chains are compared, those of the objective first."""
        both = self.longest_s, self.sum_s
        return both[::-1] if objective == "latency" else both


def _staged(
    cluster: Cluster, searches: Mapping[DeviceSpec, PathSearch], margin: float, objective: Objective
) -> _Chain | None:
    """The best stages over the devices in their order, some of which may be left out."""
    any_search = next(iter(searches.values()))
    count = len(any_search.runs.graph.nodes)
    starts = any_search.starts
    best: dict[int, _Chain] = {0: _Chain()}
    for device, spec in enumerate(cluster.devices):
        search, after = searches[spec], dict(best)
        for begin in starts:
            if begin not in best:
                continue
            for stop, path in search.paths_from(begin, margin).items():
                chain = best[begin]
                seconds = path.seconds
                if chain.stages:  # it is sent what lives where it begins
                    level = cluster.level((chain.stages[-1][1], device))
                    nbytes = any_search.runs.around(begin, begin)[1]
                    seconds += level.message_s + level.transfer_s(nbytes)
                longer = _Chain(
                    max(chain.longest_s, seconds),
                    chain.sum_s + seconds,
                    (*chain.stages, (begin, device)),
                    (*chain.options, *path.runs),
                )
                known = after.get(stop)
                if known is None or longer.rank(objective) < known.rank(objective):
                    after[stop] = longer
        best = after
    return best.get(count)
