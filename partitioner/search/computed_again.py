"""Recomputation chosen for each stage of a pipeline, so that it fits its device's memory.

A sharding of a graph with offers (`ir.offers`) says how every node is cut, computed or not. The
stages of one cut hold different numbers of micro-batches, so each takes its own of the offers: the
fastest within its memory, a multiple-choice knapsack over the regions (`offered_ways`) of the
stages of a device. Cuts are compared by its linear relaxation.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.memory import with_headroom
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.offers import chosen, originals
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import NodePlan, Plan, resolve
from partitioner.ir.rule import Cut, Rule
from partitioner.search.offered_ways import Region, offered_regions, takes_either
from partitioner.search.request import Budget
from partitioner.search.stage_figures import Floats, Ints, Sharding, StageFigures
from partitioner.solver.stages.knapsack import pack, steps

#: Prices of a byte, in seconds, at which the relaxation is tabled for all stretches of an order.
PRICES = 24
#: Bytes that are reserved for one byte of a tensor.
RESERVED = with_headroom(1_000_000) / 1_000_000


@dataclass(frozen=True)
class Offering:
    """A sharding with the cuts of all nodes of a graph with offers, computed or not.

    Attributes:
        graph: The graph.
        sharding: The sharding that was searched.
        nodes: Decisions of all nodes of the graph, on the sharding's groups, in its order.
    """

    graph: Graph
    sharding: Sharding
    nodes: Mapping[str, NodePlan]

    @classmethod
    def of(cls, graph: Graph, sharding: Sharding) -> Offering | None:
        """A copy is cut as the node that it repeats, and a value that is taken as it is kept.

        None if the graph offers nothing, or some node is a copy of none.
        """
        if not graph.optional:
            return None
        plan, copied, nodes = sharding.plan, originals(graph), dict[str, NodePlan]()
        homes = {
            value: (placed.node.name, at.sharding)
            for placed in resolve(sharding.graph, plan)
            for value, at in placed.results()
        }
        for node in graph.nodes:
            decided = plan.nodes.get(node.name) or plan.nodes.get(copied.get(node.name, ""))
            if decided is None and takes_either(node) and node.inputs[0] in homes:
                maker, at = homes[node.inputs[0]]
                if any(layout.windows for layout in at.dims):
                    return None
                group = plan.nodes[maker].group
                rule = rule_of(graph, node)
                if not isinstance(rule, Rule) or rule.results[0] is None:
                    return None
                cuts = {
                    name: Cut.of(layout, plan.groups[group])
                    for ((name,),), layout in zip(rule.results[0], at.dims, strict=True)
                    if layout.axes
                }
                decided = NodePlan(group, cuts)
            if decided is None:
                return None
            nodes[node.name] = decided
        return cls(graph, sharding, nodes)

    def taking(self, again: Container[str]) -> Sharding:
        """The sharding in which these optional nodes are computed, less those that nothing reads.

        Raises:
            IRError: A node that is left out is read.
        """
        graph, plan = chosen(self.graph, again), self.sharding.plan
        nodes = {node.name: self.nodes[node.name] for node in graph.nodes}
        used = sorted({decided.group for decided in nodes.values()})
        number = {group: index for index, group in enumerate(used)}
        nodes = {n: NodePlan(number[at.group], at.cuts) for n, at in nodes.items()}
        groups: tuple[DeviceMesh, ...] = tuple(plan.groups[group] for group in used)
        return Sharding(graph, Plan(graph.digest, plan.cluster, groups, nodes))


@dataclass(frozen=True)
class Load:
    """What lanes take for what their stages compute again.

    Attributes:
        seconds: Of a micro-batch, by stage.
        over_bytes: Bytes above the limits of the lanes, in all.
    """

    seconds: Floats
    over_bytes: float


@dataclass(frozen=True)
class Taken:
    """What the stages of a cut compute again.

    Attributes:
        again: The optional nodes.
        bytes: Of a device of each lane, as counted when they were chosen.
    """

    again: frozenset[str]
    bytes: tuple[float, ...]


@dataclass(frozen=True)
class ComputedAgain:
    """Chooses what stages compute again.

    Attributes:
        offering: The sharding.
        figures: Those of the sharding in which nothing is computed again.
        regions: Offers that are independent of one another, in the order of their units.
        passing: Most bytes within a phase while the nodes of each unit run, everything computed
            again; (units,).
    """

    offering: Offering
    figures: StageFigures
    regions: tuple[Region, ...]
    passing: Floats

    @classmethod
    def of(
        cls, offering: Offering, cluster: Cluster, micro_batches: int, budget: Budget
    ) -> ComputedAgain:
        """Those of a sharding on the first devices of a cluster, in so many micro-batches."""
        graph = offering.graph
        kept = StageFigures(offering.taking(()), cluster, micro_batches)
        whole = StageFigures(offering.taking(graph.optional), cluster, micro_batches)
        offered = offered_regions(
            graph,
            _seconds(whole, graph.optional),
            {**kept.made_bytes, **whole.kept_bytes, **kept.kept_bytes},
            whole.unit_of,
            budget.share(2).work,
            budget.engine,
        )
        regions = tuple(sorted(offered, key=lambda region: region.unit))
        return cls(offering, kept, regions, np.maximum(whole.passing_bytes, kept.passing_bytes))

    # Cuts, by the relaxation -----------------------------------------------------------------

    @cached_property
    def _steps(self) -> tuple[Ints, Floats, Floats]:
        """Unit, seconds lost and bytes saved of each step of the hulls, in order of units."""
        taken = [
            (
                region.unit,
                region.ways[end][0] - region.ways[start][0],
                region.ways[start][1] - region.ways[end][1],
            )
            for region in self.regions
            for start, end in steps(region.ways)
        ]
        units = np.array([unit for unit, _, _ in taken], np.int64)
        lost, saved = (np.array([step[column] for step in taken]) for column in (1, 2))
        return units, lost, saved

    def lost_s(self, at: Ints, need: Floats) -> Floats:
        """Least seconds that stretches lose to keep so many bytes less of a micro-batch.

        Args:
            at: Positions.
            need: Bytes of the stretch from each position to each; none are needed below 0.

        Returns:
            Seconds, infinite where so many cannot be saved.
        """
        units, lost, saved = self._steps
        least = np.where(need > 0, np.inf, 0.0)
        if not len(units):
            return least
        order = np.argsort(lost / saved, kind="stable")
        before = np.zeros((2, *need.shape))
        for ended in np.unique(np.linspace(1, len(order), PRICES).astype(np.int64)):
            some = order[:ended]
            sums = np.zeros((2, int(at[-1]) + 1))
            np.add.at(sums[0], 1 + units[some], lost[some])
            np.add.at(sums[1], 1 + units[some], saved[some])
            upto = np.cumsum(sums, axis=1)[:, at]
            now = upto[:, None, :] - upto[:, :, None]
            open_ = np.isinf(least) & (need <= now[1])
            width = np.maximum(now[1] - before[1], 1e-9)
            part = np.clip((need - before[1]) / width, 0.0, 1.0)
            between = before[0] + (now[0] - before[0]) * part
            least[open_] = between[open_]
            before = now
        return least

    def load(
        self,
        ends: Sequence[int],
        held: Sequence[int],
        lane_of: Sequence[int],
        limits: Sequence[float],
    ) -> Load:
        """What a cut takes, at least.

        Args:
            ends: Ends of the stages, exclusive.
            held: Micro-batches that each stage holds where its lane holds most.
            lane_of: Lane of each stage.
            limits: Bytes of a device of each lane.
        """
        units, lost, saved = self._steps
        extra, over = np.zeros(len(ends)), 0.0
        bounds = tuple(pairwise((0, *ends)))
        for lane, limit in enumerate(limits):
            stages = [stage for stage, of in enumerate(lane_of) if of == lane]
            need = self._fixed(bounds, held, stages) - limit
            for stage in stages:
                start, stop = bounds[stage]
                kept = self.figures.byte_sums[1, stop] - self.figures.byte_sums[1, start]
                need += RESERVED * held[stage] * kept
            if need <= 0:
                continue
            spans = [np.searchsorted(units, bounds[stage]) for stage in stages]
            numbers = np.concatenate([np.arange(first, last) for first, last in spans])
            of = np.concatenate(
                [np.full(last - first, s) for s, (first, last) in zip(stages, spans, strict=True)]
            )
            sizes = saved[numbers] * RESERVED * np.array(held)[of]
            order = np.argsort(lost[numbers] / np.maximum(sizes, 1e-9), kind="stable")
            sums = np.cumsum(sizes[order])
            whole = int(np.searchsorted(sums, need))
            np.add.at(extra, of[order[:whole]], lost[numbers[order[:whole]]])
            if whole == len(order):
                over += need - (float(sums[-1]) if len(order) else 0.0)
            else:
                last = order[whole]
                part = (need - (float(sums[whole - 1]) if whole else 0.0)) / sizes[last]
                extra[of[last]] += part * lost[numbers[last]]
        return Load(extra, over)

    # One cut, exactly ------------------------------------------------------------------------

    def packed(
        self,
        ends: Sequence[int],
        held: Sequence[int],
        lane_of: Sequence[int],
        limits: Sequence[float],
    ) -> Taken:
        """The optional nodes that are computed in the stages of a cut; see `load`.

        They take the fewest seconds within the memory of each lane or, where nothing fits, the
        least memory.
        """
        bounds = tuple(pairwise((0, *ends)))
        at = np.array([region.unit for region in self.regions], np.int64)
        again: set[str] = set()
        used = []
        for lane, limit in enumerate(limits):
            stages = [stage for stage, of in enumerate(lane_of) if of == lane]
            room = limit - self._fixed(bounds, held, stages)
            regions: list[Region] = []
            things = []
            for stage in stages:
                start, stop = bounds[stage]
                weight = RESERVED * held[stage]
                kept = self.figures.byte_sums[1, stop] - self.figures.byte_sums[1, start]
                first, last = np.searchsorted(at, (start, stop))
                some = self.regions[first:last]
                room -= weight * (kept - sum(region.ways[0][1] for region in some))
                regions += some
                things += [tuple((s, weight * n) for s, n in region.ways) for region in some]
            best = pack(things, room)
            ways = best.way if best is not None else [len(thing) - 1 for thing in things]
            for region, way in zip(regions, ways, strict=True):
                again |= region.again[way]
            held_bytes = sum(thing[way][1] for thing, way in zip(things, ways, strict=True))
            used.append(limit - room + held_bytes)
        return Taken(frozenset(again), tuple(used))

    def _fixed(
        self, bounds: Sequence[tuple[int, int]], held: Sequence[int], stages: Sequence[int]
    ) -> float:
        """Bytes of a lane that do not depend on what is kept."""
        rest = self.figures.byte_sums[0]
        resident = sum(rest[bounds[stage][1]] - rest[bounds[stage][0]] for stage in stages)
        return float(resident) + max(
            (float(self.passing[slice(*bounds[stage])].max()) for stage in stages if held[stage]),
            default=0.0,
        )


def _seconds(figures: StageFigures, names: frozenset[str]) -> Mapping[str, float]:
    """Seconds of some nodes and of the communications that they cause, on the busiest device."""
    seconds: dict[str, dict[int, float]] = {}
    for task in figures.tasks.tasks:
        name = task.placed.node.name if task.placed is not None else ""
        if task.comm is not None:
            name = task.comm.why
        if name in names:
            own = seconds.setdefault(name, {})
            for device, more in task.devices.items():
                own[device] = own.get(device, 0.0) + more
    return {name: max(own.values(), default=0.0) for name, own in seconds.items()}
