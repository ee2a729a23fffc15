"""Stages whose nodes differ: the least seconds of each by the micro-batches that it holds.

With y micro-batches in flight a node's way is a pair of seconds and bytes, so the ways of a stage
are a knapsack (`knapsack`). For all stages at once its linear relaxation is found by bisection in
sums over downsets: ways sorted by the seconds that a byte costs, each stage takes them until it
fits. The last one in part is a lower bound; whole, a plan. Between the two lies at most one step
of one node, and stages for which that matters are packed exactly, one by one.

Flights are taken in ranges where there are too many: the lower bound of a range is that of its
first, the plan that of its last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from partitioner.solver.stages.graph import Downset, Layout, PlannedStage, StageGraph
from partitioner.solver.stages.knapsack import Packed, Ways, pack, relaxed, sorted_steps
from partitioner.solver.stages.model import Cut, Floats, Pool, StageOption, StageProblem, flights
from partitioner.solver.work import Work

Side = Literal["lower", "upper"]

#: Flights up to which each is a range of its own, and the growth of ranges from there.
SINGLE_FLIGHTS = 12
GROWTH = 1.25
#: Relative error that a sum of seconds or bytes may have.
ROUNDING = 1e-12


def first_ranges(graph: StageGraph) -> list[int]:
    """The last flight of each range."""
    most = graph.most_in_flight
    lasts = list(range(1, min(most, SINGLE_FLIGHTS) + 1))
    while lasts[-1] < most:
        lasts.append(min(most, math.ceil(lasts[-1] * GROWTH)))
    return lasts


@dataclass
class StageSeconds:
    """Bounds on the least seconds a sample of every stage; `refine` makes them meet."""

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
    lower, upper = (time_s + least) * np.where(need > 0, 1 - ROUNDING, 1.0), time_s + most
    absent = layout.missing(tensor)
    lower[absent], upper[absent] = np.inf, np.inf
    return lower, upper
