"""Plans of graphs in stages, with a bound on all plans.

A graph of few downsets is cut at any of them, exactly. One of more is cut along several orders;
then the best cut's ends move: to any downset a few nodes away, and along other orders that pass
through them, all at once, until no move helps. Its bound is on all plans, whatever their cuts.

A *slot* is a kind of stage: its data degree d, its tensor degree, and the micro-batches y that it
holds. For a load L the linear program

    min  sum_s devices_s n_s
    s.t. sum_s,c x[v,s,c] = 1                                              for each node
         sum_v,c seconds[v,s,c] x[v,s,c] + least_cut_s n_s <= L n_s        for each slot
         sum_v,c (flying[v,c] y_s + resident[v,c]) x[v,s,c] <= limit n_s   for each slot
         sum of d_s n_s over slots with d_s y_s <= h  <=  h                for each h
         sum_s d_s n_s <= micro-batches

spreads the nodes over n_s stages of each slot in any parts. A stage with y micro-batches in flight
and degree d lies, with all later ones, within d * y degrees: so no more of them than have room
there. If the program takes more devices than there are, no plan has the load L: nodes that no
slot can run within L and the limit make it infeasible. The least cut counts the edges that part
any nodes from all others at least, which every stage pays if there are several.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

import numpy as np

from partitioner.solver.milp.engines import HIGHS, Engine, solve_milp
from partitioner.solver.milp.program import Milp, MilpBuilder
from partitioner.solver.outcome import Infeasible, Status, relative_gap
from partitioner.solver.stages.cut import find_cut
from partitioner.solver.stages.cut_orders import first_orders, random_order
from partitioner.solver.stages.graph import (
    Downset,
    Layout,
    PlannedStage,
    Sharded,
    StageGraph,
    around,
    between,
    enumerate_downsets,
)
from partitioner.solver.stages.knapsack import Packed, Ways, pack, relaxed, sorted_steps
from partitioner.solver.stages.model import Cut, Floats, Pool, StageOption, StageProblem, flights
from partitioner.solver.work import Work

Side = Literal["lower", "upper"]

#: Flights up to which each is a range of its own, and the growth of ranges from there.
SINGLE_FLIGHTS = 12
GROWTH = 1.25
#: Relative error that a sum of seconds or bytes may have.
SUMMED = 1e-12


def first_ranges(graph: StageGraph) -> list[int]:
    """The last flight of each range."""
    most = graph.most_in_flight
    lasts = list(range(1, min(most, SINGLE_FLIGHTS) + 1))
    while lasts[-1] < most:
        lasts.append(min(most, math.ceil(lasts[-1] * GROWTH)))
    return lasts


@dataclass
class StageSeconds:
    """Bounds on the least seconds a sample of every stage; `refine` makes them meet.

    With y micro-batches in flight a node's way is a pair of seconds and bytes, so the ways of a
    stage are a knapsack. For all stages at once its linear relaxation is found by bisection in sums
    over downsets. Its last step in part is a lower bound; whole, a plan. Between the two lies one
    step of one node at most, and stages for which that matters are packed exactly. Flights are
    taken in ranges where there are too many: the lower bound of a range is that of its first, the
    plan that of its last.
    """

    layout: Layout  #: The stages.
    lasts: list[int]  #: The last flight of each range, ascending.
    #: For (tensor degree, flights): bounds of each pair of the layout, before they are shared over
    #: the data degree.
    seconds: dict[tuple[int, int], dict[Side, Floats]] = field(default_factory=dict)
    #: Stages that were packed exactly, by (tensor degree, pair, flights).
    packed: dict[tuple[int, int, int], Packed | None] = field(default_factory=dict)

    @property
    def graph(self) -> StageGraph:
        """The graph whose stages these are."""
        return self.layout.graph

    @cached_property
    def moved_s(self) -> tuple[Floats, ...]:
        """Seconds of communication of each pair, for each of the graph's degrees."""
        return tuple(self.layout.moved_s(data, tensor) for data, tensor in self.graph.degrees)

    @property
    def precision(self) -> tuple[int, int]:
        """Numbers of ranges and of packed stages, which only grow."""
        return len(self.lasts), len(self.packed)

    def problem(self, side: Side, below_s: float = math.inf) -> StageProblem:
        """The problem of stages with lower loads than some, at one of the bounds.

        Memory is in shares of a device: way k has room for the flights of ranges up to k.
        """
        rooms = 1 / (np.array(self.lasts) + 0.5)[:, None, None]
        options, count = [], len(self.layout.downsets)
        for (data, tensor), moved_s in zip(self.graph.degrees, self.moved_s, strict=True):
            flying = self.lasts if side == "upper" else [1, *(last + 1 for last in self.lasts[:-1])]
            seconds = np.array([self._bounds(tensor, many)[side] for many in flying])
            if side == "lower":  # more flights never take less
                seconds = np.maximum.accumulate(seconds, axis=0)
            load = seconds / data + moved_s
            load[load >= below_s] = np.inf
            load[:-1][load[:-1] >= load[1:]] = np.inf  # a way that has more room is as fast
            used = np.asarray(np.isfinite(load).any(axis=1))
            used[-1] = True
            load_s = np.full((int(used.sum()), count, count), np.inf)  # [range, I, J]
            load_s[:, *self.layout.pairs] = load[used]
            shares = np.broadcast_to(rooms[used], load_s.shape)
            nothing = np.broadcast_to(0.0, load_s.shape)
            options.append(StageOption(data * tensor, load_s, nothing, shares, degree=data))
        pools = (Pool(self.graph.devices, 1.0),)
        return StageProblem(tuple(options), pools, most_degrees=self.graph.microbatches)

    def _bounds(self, tensor: int, many: int) -> dict[Side, Floats]:
        if (tensor, many) not in self.seconds:
            lower, upper = relax(self.layout, tensor, many)
            self.seconds[tensor, many] = {"lower": lower, "upper": upper}
        return self.seconds[tensor, many]

    def refine(self, tensor: int, pair: int, many: int) -> Packed | None:
        """Pack one stage exactly; its bounds are those of the packing from here on."""
        key = tensor, pair, many
        if key not in self.packed:
            start, stop = (int(ends[pair]) for ends in self.layout.pairs)
            nodes = self.layout.stage_nodes(start, stop)
            things = list(node_ways(self.graph, nodes, tensor, many).values())
            packed = pack(things, self.graph.limit_bytes)
            bounds = self._bounds(tensor, many)
            bounds["lower"][pair] = np.inf if packed is None else packed.bound_s
            bounds["upper"][pair] = np.inf if packed is None else packed.seconds
            self.packed[key] = packed
        return self.packed[key]

    def plan(self, cut: Cut) -> tuple[tuple[PlannedStage, ...], float] | None:
        """Pack the stages of a cut: the plan and its load; None if a stage does not fit.

        Ranges that hold the flights of a stage between two ends are split there.
        """
        stages, load_s = [], 0.0
        many_of = flights([self.graph.degrees[stage.option][0] for stage in cut.stages])
        for stage, many in zip(cut.stages, many_of, strict=True):
            self.lasts = sorted({*self.lasts, many, *([many - 1] if many > 1 else [])})
            data, tensor = self.graph.degrees[stage.option]
            starts, stops = self.layout.pairs
            pair = int(np.flatnonzero((starts == stage.start) & (stops == stage.stop))[0])
            packed = self.refine(tensor, pair, many)
            if packed is None:
                load_s = math.inf
                continue
            nodes = sorted(self.layout.stage_nodes(stage.start, stage.stop))
            configs = {
                v: self.graph.nodes[v][tensor].configs[way].name
                for v, way in zip(nodes, packed.way, strict=True)
            }
            stages.append(PlannedStage(configs, data, tensor))
            seconds = packed.seconds / data + float(self.moved_s[stage.option][pair])
            load_s = max(load_s, seconds)
        return (tuple(stages), load_s) if math.isfinite(load_s) else None

    def refine_between(self, low_s: float, high_s: float, most: int, work: Work) -> None:
        """Pack the stages of which it is open whether their load is below some, so many at most."""
        doubtful: list[tuple[float, int, int, int]] = []
        for (data, tensor), moved_s in zip(self.graph.degrees, self.moved_s, strict=True):
            for last in self.lasts:
                bounds = self._bounds(tensor, last)
                lower, upper = (bounds[side] / data + moved_s for side in ("lower", "upper"))
                open_ = np.flatnonzero((lower < high_s) & (upper > low_s) & (lower < upper))
                doubtful += [
                    (float(lower[pair]), tensor, pair, last)
                    for pair in open_.tolist()
                    if (tensor, pair, last) not in self.packed
                ]
        for _, tensor, pair, many in sorted(doubtful)[:most]:
            if work.late:
                return
            self.refine(tensor, pair, many)


def node_ways(graph: StageGraph, nodes: Downset, tensor: int, many: int) -> Mapping[int, Ways]:
    """The ways of some nodes by id, in the order of their configs, with `many` in flight."""
    return {
        v: tuple(
            (c.time_s, c.flying_bytes * many + c.resident_bytes)
            for c in graph.nodes[v][tensor].configs
        )
        for v in sorted(nodes)
    }


def relax(layout: Layout, tensor: int, many: int) -> tuple[Floats, Floats]:
    """Bounds on the least seconds of each pair of the layout with `many` flights; (pairs,) each.

    The lower is the linear relaxation's, the upper a choice's; infinite where no choice fits.
    """
    graph = layout.graph
    present = frozenset(v for v, shards in graph.nodes.items() if tensor in shards)
    tables = node_ways(graph, present, tensor, many)
    fast = [min(tables[v]) if v in tables else (0.0, 0.0) for v in graph.nodes]
    time_s, held = (layout.sums([way[axis] for way in fast]) for axis in (0, 1))
    need = held - graph.limit_bytes
    taken, columns = sorted_steps(list(tables.values())), [layout.column[v] for v in tables]
    lost, saved = np.array([step[:2] for step in taken]).reshape(-1, 2).T
    before = layout.has[:, [columns[thing] for _, _, thing, _ in taken]]
    least, most = relaxed(lost, saved, before, np.array(layout.pairs), need)
    lower, upper = (time_s + least) * np.where(need > 0, 1 - SUMMED, 1.0), time_s + most
    absent = layout.missing(tensor)
    lower[absent], upper[absent] = np.inf, np.inf
    return lower, upper


#: Entries of all options that arrays are meant for: 1 GB.
MOST_ENTRIES = 10**8
#: Stages that are packed between two cuts, and cuts where others are to be tried.
PACKED, COARSE_CUTS = 400, 10
#: A graph of so few downsets is cut at them at once; one of more along orders first.
FEW_DOWNSETS = 100
#: Downsets that are tried together at least, however many kinds of stages there are.
LEAST_DOWNSETS = 60
#: Downsets near a cut's ends that are tried together, and rounds without a better cut at the end.
NEAR = 240
PATIENCE = 8
#: Relative difference that rounding may make between two sums of the same plan.
ROUNDING = 1e-9


@dataclass(frozen=True)
class StagePlan:
    """A plan with its certificate."""

    #: None where no plan was found below some load, which is the load then.
    stages: tuple[PlannedStage, ...] = ()
    load_s: float = math.inf  #: Seconds a sample of its slowest stage.
    bound_s: float = 0.0  #: No plan takes less.
    status: Status = "feasible"  #: `optimal` within the gap asked for.
    solver: str = "bisection / bisection"  #: Methods that found the plan / proved the bound.


def plan_stages(
    graph: StageGraph, work: Work, *, gap: float = 0.0, seed: int = 0, engine: Engine = HIGHS
) -> StagePlan:
    """Plan a graph, until no plan is better by more than `gap` or the work is done.

    Raises:
        SolverError: No number of devices holds any node.
        Infeasible: No plan fits, or none was found; `proven` tells which.
    """
    best, bound_s = StagePlan(), 0.0
    downsets = enumerate_downsets(graph)
    if downsets is None or len(downsets) > FEW_DOWNSETS:
        for order in first_orders(graph):
            if not (best.stages and work.over):
                best = _better(graph, between((), order), best, work, gap)
    if downsets is None or len(downsets) > _most_downsets(graph):
        # the best cut after its ends have moved, until none of several moves in a row helps
        rng, idle = random.Random(seed), 0  # noqa: S311 - no secret
        while idle < PATIENCE and not work.over:
            stages = (frozenset(stage.configs) for stage in best.stages)
            ends = tuple(accumulate(stages, operator.or_))[:-1]
            if idle == 0 and ends:
                family = around(graph, ends, NEAR)
            else:
                family = between(ends, random_order(graph, rng))
            moved = _better(graph, family, best, work, gap)
            idle = 0 if moved.load_s < best.load_s * (1 - ROUNDING) else idle + 1
            best = moved
        best = replace(best, solver="orders / bisection")
    elif not (best.stages and work.over):
        layout = Layout(graph, downsets)
        best = best_cut(layout, work, gap, best)
        bound_s = best.bound_s
        if not best.stages:
            why = "no plan was found in time" if work.stopped else "no cut into stages fits"
            raise Infeasible(why, proven=not work.stopped)
    best = _bounded(graph, replace(best, bound_s=bound_s), work, gap, engine)
    met = relative_gap(best.load_s, best.bound_s) <= gap
    return replace(best, status="optimal" if met else "time_limit" if work.stopped else "feasible")


def _bounded(
    graph: StageGraph, best: StagePlan, work: Work, gap: float, engine: Engine
) -> StagePlan:
    """The plan with the bound of the relaxation, if that is higher and the gap is not met."""
    if best.stages and relative_gap(best.load_s, best.bound_s) <= gap:
        return best
    several_s = bound_plans(graph, best.load_s, work, engine)
    if not best.stages and math.isinf(several_s):
        raise Infeasible("no cut into stages: the memory of all devices together is short")
    if not best.stages:
        raise Infeasible("no cut along the orders that were tried fits", proven=False)
    whole = Layout(graph, (frozenset(), frozenset(graph.nodes)))
    alone = best_cut(whole, Work(), 0.0, best)  # which takes no time
    relaxed_s = min(alone.bound_s, several_s)
    finder, _, prover = best.solver.partition(" / ")
    return replace(
        alone,
        bound_s=max(relaxed_s, best.bound_s),
        solver=f"{finder} / {'relaxation' if relaxed_s > best.bound_s else prover}",
    )


def _most_downsets(graph: StageGraph) -> int:
    """Downsets of whose stages the arrays are small enough."""
    ways = len(first_ranges(graph)) * len(graph.degrees)
    return max(LEAST_DOWNSETS, math.isqrt(MOST_ENTRIES // ways))


def _better(
    graph: StageGraph, downsets: tuple[Downset, ...], best: StagePlan, work: Work, gap: float
) -> StagePlan:
    """The best cut at some downsets, spread over all if they are many, or the known one."""
    kept = np.linspace(0, len(downsets) - 1, min(len(downsets), _most_downsets(graph)))
    layout = Layout(graph, tuple(downsets[at] for at in kept.astype(np.int64)))
    return best_cut(layout, work, gap, best, cuts=COARSE_CUTS)


def best_cut(
    layout: Layout, work: Work, gap: float, best: StagePlan, cuts: int | None = None
) -> StagePlan:
    """The best cut of a layout, or the known plan if none is better; the bound is of the layout.

    Cuts are made at the lower bounds of all stages. Of those the stages in doubt are packed or, if
    a number of cuts is given, only those of the cuts themselves.
    """
    table, bound_s, done = StageSeconds(layout, first_ranges(layout.graph)), 0.0, 0
    cut = find_cut(table.problem("upper", best.load_s)) or find_cut(
        table.problem("lower", best.load_s)
    )
    if cut is None:
        return replace(best, bound_s=best.load_s)
    while cut is not None:
        known, done = table.precision, done + 1
        plan = table.plan(cut)
        if plan is not None and plan[1] < best.load_s:
            best = StagePlan(*plan)
        if math.isfinite(best.load_s):
            if relative_gap(best.load_s, bound_s) <= gap or done == cuts:
                break
            if cuts is None:
                table.refine_between(bound_s, best.load_s, PACKED, work)
        if (table.precision == known and bound_s > 0) or work.late:
            break  # the stages of the cut are as exact as they can be, or time is up
        cut = find_cut(table.problem("lower", best.load_s))
        bound_s = max(bound_s, best.load_s if cut is None else cut.bound_s)
    return replace(best, bound_s=min(best.load_s, bound_s))


#: Columns of a program at most; flights are taken in wider ranges until it has no more.
MOST_COLUMNS = 30_000
#: Trials of loads, each halves what is left between the bound and the plan.
TRIALS = 10
#: Relative error of a solved program.
SOLVED = 1e-5


@dataclass(frozen=True)
class Slot:
    """A kind of stage that holds `first` to `last` micro-batches."""

    data: int
    tensor: int
    first: int
    last: int


@dataclass(frozen=True)
class EqualNodes:
    """Nodes that are equal but for their edges: how many, and each on its numbers of devices."""

    count: int
    shards: Mapping[int, Sharded]


def bound_plans(graph: StageGraph, load_s: float, work: Work, engine: Engine = HIGHS) -> float:
    """Bound the load from below: no plan of several stages has a lower one, up to `load_s`.

    With an infinite load that is known, an infinite bound says that no plan fits at all.
    """
    by_key: dict[object, list[Mapping[int, Sharded]]] = {}
    for shards in graph.nodes.values():
        key = tuple((t, of.parameter_bytes, of.configs) for t, of in shards.items())
        by_key.setdefault(key, []).append(shards)
    groups = [EqualNodes(len(members), members[0]) for members in by_key.values()]
    slots = _slots(graph, len(groups))
    least_bytes = 0.0 if work.over else least_cut(graph)
    # the nodes' least seconds of devices, over all devices; none runs faster than alone
    seconds = (
        of.count * min(t * c.time_s for t, on in of.shards.items() for c in on.configs)
        for of in groups
        if of.shards
    )
    low, high = math.fsum(seconds) / graph.devices * (1 - SOLVED), load_s
    for trial in range(TRIALS):
        # the plan's own load comes first: it is often the bound
        tried = high * (1 - SOLVED) if not trial else (low + high) / 2
        if work.over or tried <= low or (trial and math.isinf(high)):
            break
        program = _program(graph, groups, slots, least_bytes, tried)
        result = solve_milp(program, work, gap=0.0, engine=engine)
        if result.status == "time_limit":
            break
        devices = math.inf if result.status == "infeasible" else result.bound
        if devices > graph.devices * (1 + SOLVED):
            low = tried
            if not trial:
                break
        else:
            high = tried
    return min(low, load_s)


def _slots(graph: StageGraph, groups: int) -> list[Slot]:
    """All slots, their flights in ranges that are wider where there are too many."""
    most = graph.most_in_flight
    growth = 1.0
    while True:
        slots = []
        for data, tensor in graph.degrees:
            first = 1
            while first <= -(-most // data):
                last = max(first, math.floor(first * growth))
                slots.append(Slot(data, tensor, first, last))
                first = last + 1
        if 2 * groups * len(slots) <= MOST_COLUMNS or growth > most:
            return slots
        growth *= 1.2


def least_cut(graph: StageGraph) -> float:
    """The fewest bytes of edges between some nodes and all others; 0 if there is one node."""
    import networkx as nx

    net: nx.Graph[int] = nx.Graph()
    net.add_nodes_from(graph.nodes)
    net.add_weighted_edges_from((u, v, size) for (u, v), size in graph.edges.items())
    if len(net) < 2 or not nx.is_connected(net):
        return 0.0
    return float(nx.stoer_wagner(net)[0])


def _program(
    graph: StageGraph,
    groups: Sequence[EqualNodes],
    slots: Sequence[Slot],
    least_bytes: float,
    load_s: float,
) -> Milp:
    """The program of a load; seconds are in shares of the load, bytes of the limit."""
    build = MilpBuilder()
    stages = [build.column(cost=float(slot.data * slot.tensor)) for slot in slots]
    placed: list[list[tuple[int, float]]] = [[] for _ in groups]
    bandwidth, batch = graph.bandwidth_bytes_per_s, graph.microbatches
    unit = max(graph.limit_bytes, 1.0)
    for slot, stage in zip(slots, stages, strict=True):
        d = slot.data
        busy = [(stage, 2 * least_bytes / d / bandwidth / load_s - 1.0)]
        held = [(stage, -graph.limit_bytes / unit)]
        for index, of in enumerate(groups):
            if (on := of.shards.get(slot.tensor)) is None:
                continue
            renewed_s = 4 * (d - 1) / d * on.parameter_bytes / batch / bandwidth
            for config in on.configs:
                seconds = config.time_s / d + renewed_s
                size = config.flying_bytes * slot.first + config.resident_bytes
                if seconds > load_s * (1 + SOLVED) or size > graph.limit_bytes:
                    continue
                part = build.column()
                placed[index].append((part, 1.0))
                busy.append((part, seconds / load_s))
                held.append((part, size / unit))
        build.row(busy, -1, 0.0)
        build.row(held, -1, 0.0)
    for of, parts in zip(groups, placed, strict=True):
        build.row(parts, 0, float(of.count))
    degrees = [(slot, (stage, float(slot.data))) for slot, stage in zip(slots, stages, strict=True)]
    for most in sorted({slot.data * slot.last for slot in slots}):
        # the stages that lie within so many degrees of the end
        within = (term for slot, term in degrees if slot.data * slot.last <= most)
        build.row(within, -1, float(most))
    build.row((term for _, term in degrees), -1, float(graph.microbatches))
    return build.build()
