"""The cheapest way to run a graph within the memory of its devices, some of it in blocks.

On one device it is a path (`search.blocks.paths`). Over several a path is cut into stages, each
within the memory of its device (`search.blocks.chains`), or the blocks of each stretch run on all
devices, or both. In training, every device runs its part of each block (`search.blocks.shared`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.evaluate import evaluate, one_device
from partitioner.ir.graph import Graph
from partitioner.ir.pieces.blocks import Blocks
from partitioner.rewrites.block_graph import BlockGraph, traced_blocks
from partitioner.search.blocks.block_plan import BlockPlan
from partitioner.search.blocks.chains import staged
from partitioner.search.blocks.paths import MARGINS, PathSearch
from partitioner.search.blocks.runs import Option, Runs
from partitioner.search.blocks.shared import SHARED_KINDS, Shared
from partitioner.search.blocks.training import training_blocks
from partitioner.search.outcome import Candidate, Outcome, SpaceResult, winner
from partitioner.search.request import Budget, Request
from partitioner.solver import Objective, Solution
from partitioner.strategies.constraints import ConstraintError

#: As `MARGINS`, of stages, which also hold what they send and receive.
STAGE_MARGINS = (*MARGINS, 0.75)
#: Most devices over which blocks are searched.
MOST_DEVICES = 8
#: Ways that the referee prices, the cheapest, and most that it prices beyond if none of them fits.
MOST_PRICED, MOST_MORE = 12, 24
#: Ways that it prices behind the time limit, if none of those before fits.
LATE_PRICED = 3
#: Limits that are tried for a refusal, as multiples of the one asked for.
TIMES_LIMIT = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
SOLVER = "decomposition into blocks, the cheapest path through them"


@dataclass(frozen=True)
class Found:
    """The cheapest ways that the cost model expects to fit."""

    #: The ways: some of the cheapest, then the others, those first that leave most room.
    ways: tuple[BlockPlan, ...]
    searched: str  #: In words, the plans that were searched.
    complete: bool  #: Whether all runs in blocks were priced within the budget.


@dataclass(frozen=True)
class Prices:
    """The runs of a graph in blocks that searches have priced, whatever their limits of memory."""

    _runs: dict[DeviceSpec, Runs] = field(default_factory=dict)

    def runs(self, graph: Graph, cluster: Cluster, spec: DeviceSpec) -> Runs:
        """Those on a device of a cluster."""
        any_memory = replace(spec, memory_bytes=1)
        if any_memory not in self._runs:
            level = replace(cluster.levels[0], size=1)
            alone = replace(cluster, devices=(spec,), levels=(level,))
            self._runs[any_memory] = Runs(graph, alone)
        return self._runs[any_memory]


@dataclass(frozen=True)
class Unfit:
    """A search in which no plan fits."""

    #: Bytes of the fullest device in the plan in which that has least; None if the cost model
    #: expects none to fit.
    needed_bytes: int | None
    searched: str = ""  #: In words, the plans that were searched.


def why_not_in_blocks(graph: Graph, cluster: Cluster, request: Request) -> str:
    """The part of a request with which no blocks are searched; "" if they are."""
    trains, several = bool(graph.backward), len(cluster) > 1
    is_kept, is_kind = request.constraints.plan is not None, bool(request.parallel)
    is_pinned = request.constraints.bound and not is_kept
    is_shared = trains and request.parallel in SHARED_KINDS
    unlike = "inter" if trains else "intra"  # what is searched is the other
    asked = {  # a kind of parallelism has a mesh and pins of its own; on one device it says nothing
        "a plan to keep": is_kept,
        "pins": several and is_pinned and (trains or not is_kind),
        f"parallel {request.parallel!r}": several and is_kind and not is_shared,
        "a mesh": several and request.mesh and not is_kind,
        "tune": request.tune,
        f"strategy {request.strategy!r}": several and request.strategy == unlike,
        f"more than {MOST_DEVICES} devices": len(cluster) > MOST_DEVICES,
        "recompute=False": trains and request.recompute is False,
    }
    return " or ".join(what for what, is_asked in asked.items() if is_asked)


def plan_in_blocks(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, prices: Prices
) -> Outcome | Unfit:
    """The cheapest known plan that runs stretches of a graph in blocks, if one fits.

    Runs are priced into `prices`, where other limits of memory find them.

    Its bound is the price of the whole graph on the fastest device, or the share of one device in
    it if there are several: blocks compute no less.
    """
    if not graph.nodes:
        return Unfit(None)
    found = find_blocks(graph, cluster, request, budget, prices)
    best: Candidate | None = None
    needed: list[int] = []
    graphs: dict[Blocks, BlockGraph] = {}
    took_s = 0.0  # for the way before
    for priced, way in enumerate(found.ways, 1):
        left_s = budget.work.left_s
        # The last way holds least: there must be time for it, too.
        if graph.backward and priced < len(found.ways) and left_s <= 2 * took_s:
            budget.work.stop()
            continue
        if way.blocks not in graphs:
            graphs[way.blocks] = traced_blocks(graph, way.blocks)
        candidate = _priced(way, graph, graphs[way.blocks], cluster, request.objective, budget)
        took_s = left_s - budget.work.left_s
        if candidate is not None:
            needed.append(max(candidate.evaluation.needed_bytes.values()))
            best = _better(best, candidate, request.objective)
        if priced >= _enough(best, trains=bool(graph.backward), late=budget.work.late):
            break
    if best is None:
        return Unfit(min(needed, default=None), found.searched)
    result = SpaceResult((best,), found.searched)
    stopped = budget.work.stopped or not found.complete
    return winner([result], request, cluster, stopped=stopped)


def _priced(
    way: BlockPlan,
    graph: Graph,
    cut: BlockGraph,
    cluster: Cluster,
    objective: Objective,
    budget: Budget,
) -> Candidate | None:
    """The plan of a way, which may not fit; None if the search finds none."""
    planned = way.plan(graph, cut, cluster, budget)
    if planned is None:
        return None
    family, plan = planned
    evaluation = evaluate(cut.graph, plan, cluster)
    cost = evaluation.cost(objective)
    least = min(cost, _least(graph, cluster, objective))
    solution = Solution((), cost, least, "feasible", None, SOLVER)
    return Candidate(family, cut.graph, plan, evaluation, solution)


def _better(best: Candidate | None, other: Candidate, objective: Objective) -> Candidate | None:
    """The cheaper one of those that fit."""
    is_cheaper = best is None or other.cost(objective) < best.cost(objective)
    return other if other.evaluation.fits_exactly and is_cheaper else best


def _enough(best: Candidate | None, *, trains: bool, late: bool) -> float:
    """Number of ways after which no other is priced.

    In training the first that fits is the cheapest by the same prices.
    """
    if best is not None:
        return 1 if trains or late else MOST_PRICED
    return LATE_PRICED if late and not trains else math.inf


def _least(graph: Graph, cluster: Cluster, objective: Objective) -> float:
    """No plan in blocks costs less."""
    if objective == "memory":
        return 0.0
    first = cluster.first_of_spec.values()
    alone = (one_device(graph, cluster, device).cost(objective) for device in first)
    return min(alone) / len(cluster)


def least_limit(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    budget: Budget,
    prices: Prices,
    unfit: Unfit,
) -> int | None:
    """A larger limit of memory under which a plan in blocks is known; None if none is found.

    Args:
        graph: The graph.
        cluster: The devices.
        request: The request.
        budget: The budget of this search.
        prices: Those of the search in which no plan fits.
        unfit: What came of it.
    """
    asked = cluster.devices[0].memory_bytes
    limits = [round(times * asked) for times in TIMES_LIMIT]
    if unfit.needed_bytes is not None:  # a plan that takes no more is known
        limits = [unfit.needed_bytes, *(limit for limit in limits if limit > unfit.needed_bytes)]
    for limit in limits[:1] if graph.backward else limits:
        found = plan_in_blocks(graph, cluster.with_memory(limit), request, budget, prices)
        if isinstance(found, Outcome):
            return limit
        if budget.work.late:
            break
    return None


def find_blocks(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, prices: Prices
) -> Found:
    """Look for stretches and stages that bring a graph within the memory of its devices."""
    if graph.backward:
        return _find_in_training(graph, cluster, request, budget)
    objective = request.objective
    searches: dict[DeviceSpec, PathSearch] = {}
    for spec in cluster.first_of_spec:
        searches[spec] = PathSearch.of(
            prices.runs(graph, cluster, spec), spec, len(cluster), budget
        )
    ways: dict[BlockPlan, tuple[float, int]] = {}
    margins: dict[BlockPlan, float] = {}
    for margin, way, seconds in _ways(cluster, searches, objective):
        ways.setdefault(way, (seconds, len(way.blocks.stretches)))
        margins[way] = margin
        if budget.work.late:
            break
    cheapest = sorted(ways, key=ways.__getitem__)
    more = sorted(cheapest[MOST_PRICED:], key=lambda way: (margins[way], ways[way]))
    on, spread = "one device", ""
    if len(cluster) > 1:
        on = f"stages of {len(cluster)} devices in their order"
        spread = ", which may be spread over all devices"
    runs = sum(len(search.options) for search in searches.values())
    return Found(
        (*cheapest[:MOST_PRICED], *more[:MOST_MORE]),
        f"{on}, with {runs} runs of nodes in blocks{spread}",
        all(search.complete for search in searches.values()) and not budget.work.late,
    )


def _ways(
    cluster: Cluster, searches: Mapping[DeviceSpec, PathSearch], objective: Objective
) -> Iterator[tuple[float, BlockPlan, float]]:
    """Ways on one device and in stages, each with the share of memory that it fills and seconds."""
    count = len(cluster)
    for spec, device in cluster.first_of_spec.items():
        for margin, path in searches[spec].paths_of_all():
            blocks = _blocks(next(iter(searches.values())).graph, path.runs)
            yield margin, BlockPlan(blocks, ((0, device),)), path.seconds
            if count > 1:
                yield (
                    margin,
                    BlockPlan(blocks, ((0, device),), is_spread=True),
                    path.seconds / count,
                )
    for margin in STAGE_MARGINS if count > 1 else ():
        chain = staged(cluster, searches, margin, objective)
        if chain is not None:
            blocks = _blocks(next(iter(searches.values())).graph, chain.options)
            for is_spread in (False, True):
                yield margin, BlockPlan(blocks, chain.stages, is_spread), chain.longest_s


def _find_in_training(graph: Graph, cluster: Cluster, request: Request, budget: Budget) -> Found:
    """Look for stretches on one device, or on devices of which each runs its part of them."""
    shared, on = None, "one device"
    if len(cluster) > 1:
        try:
            shared = Shared.of(graph, len(cluster), request)
        except ConstraintError as error:
            return Found((), str(error), complete=True)
        on = f"{shared.kind} over {len(cluster)} devices"
    spec = min(cluster.devices, key=lambda device: device.memory_bytes)
    alone = replace(cluster, devices=(spec,), levels=(replace(cluster.levels[0], size=1),))
    trained = training_blocks(graph, alone, budget, shared)
    stages = ((0, 0),) if shared is None else ()
    ways = tuple(BlockPlan(blocks, stages, shared=shared) for blocks in trained.blocks)
    return Found(ways, f"{on}, with {trained.runs} runs of nodes in blocks", trained.complete)


def _blocks(graph: Graph, options: Sequence[Option]) -> Blocks:
    return Blocks(tuple(option.stretch(graph) for option in options))
