"""The cheapest way to run a graph on one device within its memory, some of it in blocks.

A way is a path over the graph's order: each node runs as it is, its constants held throughout, or
is in a stretch that runs in blocks. What lives at the border of a stretch is whole, so the bytes of
a stretch depend on it alone, and the cheapest path is found by going along the order once, for each
share of the memory that is set apart: for constants that stay, and for the constants of the block
that is loaded next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import evaluate, one_device
from partitioner.cost_model.memory import with_headroom
from partitioner.ir.blocks import Blocks
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops.pieces import is_of_torch
from partitioner.ir.plan import NodePlan
from partitioner.problem.decode import planned_on
from partitioner.search.block_options import Option, Runs
from partitioner.search.outcome import Candidate, Outcome, SpaceResult, winner
from partitioner.search.request import Budget, Request
from partitioner.solver import Solution
from partitioner.strategies.block_graph import block_graph
from partitioner.strategies.spaces import Family

#: Shares of the constants that may stay, and of the memory for those of the next block.
STAYING = (1.0, 0.5, 0.25, 0.125, 0.0)
NEXT = (0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
#: Shares of the memory that ways may fill: bytes inside blocks are counted as if their parts were
#: equal, and the referee may refuse a way that fills all.
MARGINS = (1.0, 0.95, 0.88)
#: Most positions at which a stretch may begin or end; of longer graphs those where least lives.
MOST_BORDERS = 96


@dataclass(frozen=True)
class _Path:
    """The way from the first node to a position."""

    seconds: float
    staying_bytes: int
    options: tuple[Option, ...]  # the stretches


@dataclass(frozen=True)
class Found:
    """The cheapest ways that the cost model expects to fit.

    Attributes:
        ways: The stretches of each, the cheapest first.
        runs: Number of runs in blocks that were priced.
        complete: Whether all were priced within the budget.
    """

    ways: tuple[Blocks, ...]
    runs: int
    complete: bool


#: Most ways that the referee prices.
MOST_PRICED = 12
#: Limits that are tried for a refusal, as multiples of the one asked for.
TIMES_LIMIT = (1.25, 1.5, 2.0, 3.0)
SOLVER = "paths over runs of nodes in blocks"


def may_run_in_blocks(cluster: Cluster, request: Request) -> bool:
    """Whether a model that fits no plan may run in blocks: on one device, as it likes."""
    asked = request.constraints.bound or request.parallel or request.mesh or request.tune
    return len(cluster) == 1 and request.strategy == "auto" and not asked


def plan_in_blocks(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget
) -> Outcome | None:
    """The cheapest known plan that runs stretches of a graph in blocks; None if none fits.

    Its bound is the price of the whole graph on the device: blocks compute no less.
    """
    if graph.backward or len(graph.nodes) < 1:
        return None
    found = find_blocks(graph, Runs(graph, cluster), budget)
    mesh = (DeviceMesh.single(0),)
    family = Family("single", mesh, mesh, symmetric=False)
    objective = request.objective
    best: Candidate | None = None
    for priced, way in enumerate(found.ways, 1):
        cut = block_graph(graph, way)
        decided = {node.name: NodePlan(0, {}) for node in cut.nodes}
        _, plan = planned_on(cut, cluster, mesh, decided)
        plan = replace(plan, blocks=way)
        evaluation = evaluate(cut, plan, cluster)
        cost = evaluation.cost(objective)
        if evaluation.fits and (best is None or cost < best.cost(objective)):
            least = 0.0 if objective == "memory" else one_device(graph, cluster).cost(objective)
            solution = Solution((), cost, min(cost, least), "feasible", None, SOLVER)
            best = Candidate(family, cut, plan, evaluation, solution)
        if best is not None and priced >= MOST_PRICED:
            break
    if best is None:
        return None
    searched = f"one device, with {found.runs} runs of nodes in blocks"
    result = SpaceResult((best,), searched)
    return winner([result], request, cluster, stopped=not found.complete)


def least_limit(graph: Graph, cluster: Cluster, request: Request, budget: Budget) -> int | None:
    """A larger limit of memory under which a plan in blocks is known; None if none is found."""
    for times in TIMES_LIMIT:
        limit = round(times * cluster.devices[0].memory_bytes)
        if plan_in_blocks(graph, cluster.with_memory(limit), request, budget) is not None:
            return limit
        if budget.work.late:
            break
    return None


def find_blocks(graph: Graph, runs: Runs, budget: Budget) -> Found:
    """Look for stretches that bring a graph within the memory of one device."""
    limit = runs.cluster.devices[0].memory_bytes
    options, complete = _options(graph, runs, limit, budget)
    ways: dict[Blocks, float] = {}
    total = runs.constant_bytes(0, len(graph.nodes))
    streams = not is_of_torch(graph)
    for margin, share, ahead in itertools.product(
        MARGINS, STAYING if streams else STAYING[:1], NEXT if streams else NEXT[-1:]
    ):
        room = int(limit * margin)
        path = _cheapest(graph, runs, options, room, int(share * total), int(ahead * limit))
        if path is not None:
            blocks = Blocks(tuple(option.stretch(graph) for option in path.options))
            ways[blocks] = min(path.seconds, ways.get(blocks, path.seconds))
    ordered = sorted(ways, key=lambda blocks: (ways[blocks], len(blocks.stretches)))
    return Found(tuple(ordered), len(options), complete)


def _options(graph: Graph, runs: Runs, limit: int, budget: Budget) -> tuple[list[Option], bool]:
    """The runs in blocks that may fit, by where they end."""
    count = len(graph.nodes)
    total = runs.constant_bytes(0, count)
    streams = not is_of_torch(graph)
    room = limit if streams else limit - total
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
    graph: Graph, runs: Runs, options: Sequence[Option], limit: int, staying: int, ahead: int
) -> _Path | None:
    """The cheapest path that holds so many bytes of constants, and so many of the next block."""
    count, room = len(graph.nodes), limit - staying
    streams = not is_of_torch(graph)
    by_start: dict[int, list[Option]] = {}
    for option in options:
        constants = option.constant_bytes if streams else 0
        held = with_headroom(option.activation_bytes) + constants + (ahead if streams else 0)
        if held <= room and (constants <= ahead or not streams):
            by_start.setdefault(option.start, []).append(option)
    paths: list[list[_Path]] = [[] for _ in range(count + 1)]
    paths[0] = [_Path(0.0, 0, ())]
    for at in range(count):
        is_plain = (
            with_headroom(int(runs.activation_bytes[at])) + (ahead if streams and at else 0) <= room
        )
        own = sum(graph.types[name].nbytes for name in runs.constants[at]) if streams else 0
        for path in _best(paths[at]):
            if is_plain and path.staying_bytes + own <= staying:
                seconds = path.seconds + runs.seconds[at]
                paths[at + 1].append(_Path(seconds, path.staying_bytes + own, path.options))
            for option in by_start.get(at, ()):
                held = path.staying_bytes + (option.staying_bytes if streams else 0)
                if held <= staying:
                    seconds = path.seconds + option.seconds
                    paths[option.stop].append(_Path(seconds, held, (*path.options, option)))
        paths[at] = []
    return next(iter(_best(paths[count])), None)


def _best(paths: Sequence[_Path]) -> Iterator[_Path]:
    """The paths than which none is both cheaper and holds less, the cheapest first."""
    least: int | None = None
    for path in sorted(paths, key=lambda p: (p.seconds, p.staying_bytes, len(p.options))):
        if least is None or path.staying_bytes < least:
            least = path.staying_bytes
            yield path
