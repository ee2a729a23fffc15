"""The cheapest way to run a graph within the memory of its devices, some of it in blocks.

A path goes over the graph's order: each node runs as it is, its constants held throughout, or is in
a stretch that runs in blocks. What lives at the border of a stretch is whole, so the bytes of a
stretch depend on it alone, and the cheapest path is found by going along the order once, for each
share of the memory that is set apart: for constants that stay, and for the constants of the block
that is loaded next.

Over several devices a path is cut into stages, each within the memory of its device, or the blocks
of each stretch run on all devices, or both. In training, every device runs its part of each block
(`search.blocks.shared`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.evaluate import evaluate, one_device
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.memory.lifetimes import with_headroom
from partitioner.ir.blocks import Blocks
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan
from partitioner.problem.decode import planned_on
from partitioner.rewrites.block_graph import BlockGraph, traced_blocks
from partitioner.search.blocks.runs import Option, Runs
from partitioner.search.blocks.shared import SHARED_KINDS, Shared
from partitioner.search.blocks.training import training_blocks
from partitioner.search.outcome import Candidate, Outcome, SpaceResult, winner
from partitioner.search.request import Budget, Request
from partitioner.solver import Objective, Solution
from partitioner.solver.work import Work
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.spaces import Family

#: Shares of the constants that may stay, and of the memory for those of the next block.
STAYING = (1.0, 0.5, 0.25, 0.125, 0.0)
NEXT = (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
#: Shares of the constants of a module that a stage may have, all of which stay.
STAGE_SHARES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)
#: Shares of the memory that paths may fill: bytes inside blocks are counted as if their parts were
#: equal, and the referee may refuse a path that fills all.
MARGINS = (1.0, 0.95, 0.88)
#: As `MARGINS`, of stages, which also hold what they send and receive.
STAGE_MARGINS = (*MARGINS, 0.75)
#: Most positions at which a stretch may begin or end; of longer graphs those where least lives.
MOST_BORDERS = 96
#: Most positions at which a stage may begin: of as many equal runs of nodes, where least lives.
MOST_STARTS = 16
#: Most paths to a position that are followed: where constants of many sizes may stay or be loaded,
#: the paths of which none is both cheaper and lighter grow with the number of subsets.
MOST_PATHS = 64
#: Most devices over which blocks are searched.
MOST_DEVICES = 8
#: Pricing runs may take one of so many equal shares of the seconds: two thirds.
PRICING_SHARES = 1.5


@dataclass(frozen=True)
class _Path:
    """The way from the first node to a position."""

    seconds: float
    staying_bytes: int
    options: tuple[Option, ...]  # the stretches


@dataclass(frozen=True)
class BlockPlan:
    """A way to run a graph in blocks.

    Attributes:
        blocks: The stretches.
        stages: Position at which each stage begins, with its device; ascending, the first is 0.
        is_spread: Whether the blocks of a stretch that is cut run on all devices, on that of its
            stage first.
        shared: How every device runs its part of each node, in place of stages; None if nodes are
            placed whole.
    """

    blocks: Blocks
    stages: tuple[tuple[int, int], ...]
    is_spread: bool = False
    shared: Shared | None = None

    def plan(
        self, graph: Graph, cut: BlockGraph, cluster: Cluster, budget: Budget
    ) -> tuple[Family, Plan] | None:
        """The plan of the graph of all blocks; None if the search finds none.

        Args:
            graph: The whole graph.
            cut: The graph of all blocks.
            cluster: The devices.
            budget: The budget of the search.
        """
        if self.shared is not None:
            planned = self.shared.plan(cut.graph, cluster, budget)
            if planned is None:
                return None
            family, plan = planned
            return family, replace(plan, blocks=self.blocks)
        groups = tuple(DeviceMesh.single(device) for device in range(len(cluster)))
        name = "inter" if len(cluster) > 1 else "single"
        devices = self.devices(graph, cut, len(cluster))
        decided = {name: NodePlan(device, {}) for name, device in devices.items()}
        _, plan = planned_on(cut.graph, cluster, groups, decided)
        return Family(name, groups, groups, symmetric=False), replace(plan, blocks=self.blocks)

    def devices(self, graph: Graph, cut: BlockGraph, count: int) -> Mapping[str, int]:
        """The device of each node of the graph of all blocks.

        Args:
            graph: The whole graph.
            cut: The graph of all blocks.
            count: Number of devices.
        """
        blocks = {graph.order[s.first]: s.blocks for s in self.blocks.stretches if s.chunks}
        devices = {}
        for node in cut.graph.nodes:
            position = cut.positions[node.name]
            device = max((begin, device) for begin, device in self.stages if begin <= position)[1]
            if self.is_spread and node.name in cut.numbers:
                of = blocks[position]
                turn = cut.numbers[node.name] * min(count, of) // of
                device = (device + turn) % count
            devices[node.name] = device
        return devices


@dataclass(frozen=True)
class Found:
    """The cheapest ways that the cost model expects to fit.

    Attributes:
        ways: The ways: some of the cheapest, then the others, those first that leave most room.
        searched: In words, the plans that were searched.
        complete: Whether all runs in blocks were priced within the budget.
    """

    ways: tuple[BlockPlan, ...]
    searched: str
    complete: bool


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
    """A search in which no plan fits.

    Attributes:
        needed_bytes: Bytes of the fullest device in the plan in which that has least; None if the
            cost model expects none to fit.
        searched: In words, the plans that were searched.
    """

    needed_bytes: int | None
    searched: str = ""


#: Ways that the referee prices, the cheapest, and most that it prices beyond if none of them fits.
MOST_PRICED, MOST_MORE = 12, 24
#: Ways that it prices behind the time limit, if none of those before fits.
LATE_PRICED = 3
#: Limits that are tried for a refusal, as multiples of the one asked for.
TIMES_LIMIT = (1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
SOLVER = "decomposition into blocks, the cheapest path through them"


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
    searches: dict[DeviceSpec, _Search] = {}
    for spec in cluster.first_of_spec:
        searches[spec] = _Search.of(prices.runs(graph, cluster, spec), spec, len(cluster), budget)
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
    cluster: Cluster, searches: Mapping[DeviceSpec, _Search], objective: Objective
) -> Iterator[tuple[float, BlockPlan, float]]:
    """Ways on one device and in stages, each with the share of memory that it fills and seconds."""
    count = len(cluster)
    for spec, device in cluster.first_of_spec.items():
        for margin, path in searches[spec].paths_of_all():
            blocks = _blocks(next(iter(searches.values())).graph, path.options)
            yield margin, BlockPlan(blocks, ((0, device),)), path.seconds
            if count > 1:
                yield (
                    margin,
                    BlockPlan(blocks, ((0, device),), is_spread=True),
                    path.seconds / count,
                )
    for margin in STAGE_MARGINS if count > 1 else ():
        chain = _staged(cluster, searches, margin, objective)
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


@dataclass(frozen=True)
class _Chain:
    """Stages from the first node to a position."""

    longest_s: float = 0.0
    sum_s: float = 0.0
    stages: tuple[tuple[int, int], ...] = ()
    options: tuple[Option, ...] = ()

    def rank(self, objective: Objective) -> tuple[float, ...]:
        both = self.longest_s, self.sum_s
        return both[::-1] if objective == "latency" else both


def _staged(
    cluster: Cluster, searches: Mapping[DeviceSpec, _Search], margin: float, objective: Objective
) -> _Chain | None:
    """The best stages over the devices in their order, some of which may be left out."""
    any_search = next(iter(searches.values()))
    count = len(any_search.graph.nodes)
    starts = any_search.starts
    best: dict[int, _Chain] = {0: _Chain()}
    for device, spec in enumerate(cluster.devices):
        search, after = searches[spec], dict(best)
        for begin in starts:
            if begin not in best:
                continue
            for stop, path in search.paths_from(begin, margin).items():
                chain = best[begin]
                seconds = path.seconds + _arriving_s(any_search.runs, cluster, begin, chain, device)
                longer = _Chain(
                    max(chain.longest_s, seconds),
                    chain.sum_s + seconds,
                    (*chain.stages, (begin, device)),
                    (*chain.options, *path.options),
                )
                known = after.get(stop)
                if known is None or longer.rank(objective) < known.rank(objective):
                    after[stop] = longer
        best = after
    return best.get(count)


def _arriving_s(runs: Runs, cluster: Cluster, begin: int, chain: _Chain, device: int) -> float:
    """Seconds of sending a stage what lives where it begins."""
    if not chain.stages:
        return 0.0
    level = cluster.level((chain.stages[-1][1], device))
    return level.message_s + level.transfer_s(runs.around(begin, begin)[1])


@dataclass(frozen=True)
class _Search:
    """The paths of a graph on devices of one kind.

    Attributes:
        runs: The graph's runs on one such device.
        limit: Bytes of memory of a device.
        devices: Number of all devices.
        options: The runs in blocks that may fit.
        complete: Whether all were priced within the budget.
        starts: Positions at which stages may begin, ascending, the first 0.
        work: Of the search: behind its clock each path is looked for with one share of bytes.
    """

    runs: Runs
    limit: int
    devices: int
    options: Sequence[Option]
    complete: bool
    starts: Sequence[int]
    work: Work
    _from: dict[tuple[int, float], Mapping[int, _Path]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Runs, spec: DeviceSpec, devices: int, budget: Budget) -> _Search:
        """Price the runs in blocks."""
        limit = spec.memory_bytes
        pricing = replace(budget, work=budget.work.of_the_clock(PRICING_SHARES))
        options, complete = _options(runs, limit, devices, pricing)
        starts = _starts(runs, len(runs.graph.nodes)) if devices > 1 else (0,)
        return cls(runs, limit, devices, options, complete, starts, budget.work)

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.runs.graph

    def _shares(self) -> Iterator[tuple[float, float]]:
        """Shares of the constants that stay, and of the memory for those of the next block."""
        if executor_of(self.graph).loads_blocks:
            return itertools.product(STAYING, NEXT)
        return ((share, 0.0) for share in (STAGE_SHARES if self.devices > 1 else STAYING[:1]))

    def paths_of_all(self) -> Iterator[tuple[float, _Path]]:
        """Paths over the whole graph, with the share of the memory that each may fill."""
        count = len(self.graph.nodes)
        for margin in MARGINS:
            for share, ahead in self._shares():
                paths = self._paths(0, margin, share, ahead, (count,))
                if count in paths:
                    yield margin, paths[count]

    def paths_from(self, begin: int, margin: float) -> Mapping[int, _Path]:
        """The cheapest path from a position to each at which a stage may end."""
        if (begin, margin) not in self._from:
            self._from[begin, margin] = self._paths_from(begin, margin)
        return self._from[begin, margin]

    def _paths_from(self, begin: int, margin: float) -> Mapping[int, _Path]:
        best: dict[int, _Path] = {}
        stops = (*(stop for stop in self.starts if stop > begin), len(self.graph.nodes))
        for share, ahead in self._shares():
            if best and self.work.late:
                break
            for stop, path in self._paths(begin, margin, share, ahead, stops).items():
                if stop not in best or path.seconds < best[stop].seconds:
                    best[stop] = path
        return best

    def _paths(
        self, begin: int, margin: float, share: float, ahead: float, stops: Sequence[int]
    ) -> Mapping[int, _Path]:
        total = self.runs.constant_bytes(0, len(self.graph.nodes))
        room, staying, next_bytes = (
            int(self.limit * margin),
            int(share * total),
            int(ahead * self.limit),
        )
        if begin and with_headroom(_arriving_bytes(self.runs, begin)) > room:
            return {}
        return _cheapest(
            self.graph, self.runs, self.options, room, staying, next_bytes, begin, stops
        )


def _starts(runs: Runs, count: int) -> Sequence[int]:
    """Positions at which stages may begin, ascending."""
    runs_of = [
        range(1 + i * (count - 1) // MOST_STARTS, 1 + (i + 1) * (count - 1) // MOST_STARTS)
        for i in range(MOST_STARTS)
    ]
    return (0, *(min(some, key=lambda at: runs.around(at, at)[1]) for some in runs_of if some))


def _arriving_bytes(runs: Runs, begin: int) -> int:
    """Bytes of what a stage receives, the largest of which lies there twice as it arrives."""
    return runs.around(begin, begin)[1] + runs.largest_at(begin)


def _options(runs: Runs, limit: int, devices: int, budget: Budget) -> tuple[list[Option], bool]:
    """The runs in blocks that may fit one of so many devices, each of so many bytes."""
    graph, count = runs.graph, len(runs.graph.nodes)
    total = runs.constant_bytes(0, count)
    streams = executor_of(graph).loads_blocks
    room = limit if streams else limit - total // devices
    needs = [
        with_headroom(int(runs.activation_bytes[at]))
        + (2 * runs.constant_bytes(at, at + 1) if streams else 0)
        for at in range(count)
    ]
    # Nodes that do not fit as they are; with constants that stay, if these leave most of the room.
    hot = [need > (limit - total if 2 * total < limit else limit) for need in needs]
    borders = _borders(runs, count)
    options: list[Option] = []
    most_bytes = _without_headroom(room)
    # Short and long stretches in turn, so that a search that is stopped has seen both.
    lengths = sorted(range(1, len(borders)), key=lambda n: min(n, len(borders) - n))
    few = total if streams else 0
    enough_bytes = most_bytes // 2 if 8 * few > limit else most_bytes * 9 // 10
    for length in lengths:
        for start, stop in zip(borders, borders[length:], strict=False):
            if budget.work.late:
                return options, False
            most = int(runs.activation_bytes[start:stop].max())
            if 4 * few > limit and with_headroom(most) <= limit:
                option = runs.as_one(start, stop)
                if option.constant_bytes <= limit:
                    options.append(option)
            if any(hot[start:stop]):
                options += runs.cut(start, stop, most_bytes, enough_bytes)
    return options, True


def _borders(runs: Runs, count: int) -> Sequence[int]:
    """Positions at which stretches may begin or end, ascending."""
    if count < MOST_BORDERS:
        return range(count + 1)
    inner = sorted(range(1, count), key=lambda at: (runs.around(at, at)[1], at))
    return sorted({0, count, *inner[: MOST_BORDERS - 2]})


def _without_headroom(nbytes: int) -> int:
    """Most bytes of tensors that need so many with head-room."""
    most = nbytes * 100 // with_headroom(100)
    return most + 1


def _cheapest(
    graph: Graph,
    runs: Runs,
    options: Sequence[Option],
    limit: int,
    staying: int,
    ahead: int,
    begin: int,
    stops: Sequence[int],
) -> Mapping[int, _Path]:
    """The cheapest path from a position to each stop that has one.

    It holds so many bytes of constants, and `ahead` of those of the next block.
    """
    count, room = stops[-1], limit - staying
    streams = executor_of(graph).loads_blocks
    # Where all constants of a module stay, they are not counted one by one: layers may share them.
    counts = streams or staying < runs.constant_bytes(0, len(graph.nodes))
    fitting = (
        option
        for option in options
        if begin <= option.start and option.stop <= count and _fits(option, room, ahead, streams)
    )
    by_start: dict[int, list[tuple[Option, int]]] = {}
    for option in fitting:
        stay = (
            option.staying_bytes
            if streams or not counts
            else runs.constant_bytes(option.start, option.stop)
        )
        by_start.setdefault(option.start, []).append((option, stay if counts else 0))
    paths: dict[int, list[_Path]] = {begin: [_Path(0.0, 0, ())]}
    found = {}
    for at in range(begin, count + 1):
        here = _best(paths.pop(at, ()))
        if here and at in stops:
            found[at] = here[0]
        if at == count or not here:
            continue
        more = ahead if streams and at > begin else 0
        is_plain = with_headroom(int(runs.activation_bytes[at])) + more <= room
        own = runs.constant_bytes(at, at + 1) if counts else 0
        for path in here:
            if is_plain and path.staying_bytes + own <= staying:
                seconds = path.seconds + runs.seconds[at]
                longer = _Path(seconds, path.staying_bytes + own, path.options)
                paths.setdefault(at + 1, []).append(longer)
            for option, stay in by_start.get(at, ()):
                if (held := path.staying_bytes + stay) <= staying:
                    seconds = path.seconds + option.seconds
                    longer = _Path(seconds, held, (*path.options, option))
                    paths.setdefault(option.stop, []).append(longer)
    return found


def _fits(option: Option, room: int, ahead: int, streams: bool) -> bool:
    """Whether a run in blocks fits, with `ahead` bytes of constants of the next block."""
    held = with_headroom(option.activation_bytes)
    if not streams:
        return held <= room
    return held + option.constant_bytes + ahead <= room and option.constant_bytes <= ahead


def _best(paths: Sequence[_Path]) -> Sequence[_Path]:
    """The paths than which none is both cheaper and holds less, the cheapest first.

    Of more than `MOST_PATHS` it keeps so many, the cheapest and the lightest among them.
    """
    front: list[_Path] = []
    for path in sorted(paths, key=lambda p: (p.seconds, p.staying_bytes, len(p.options))):
        if not front or path.staying_bytes < front[-1].staying_bytes:
            front.append(path)
    if len(front) <= MOST_PATHS:
        return front
    return [front[i * (len(front) - 1) // (MOST_PATHS - 1)] for i in range(MOST_PATHS)]
