"""Recomputation chosen for each stage of a pipeline, so that it fits its device's memory.

A sharding of a graph with offers says how every node is cut, computed or not. The
stages of one cut hold different numbers of micro-batches, so each takes its own of the offers: the
fastest within its memory, a multiple-choice knapsack over the regions (`offered_ways`) of the
stages of a device. Cuts are compared by its linear relaxation.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.offers import originals
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.phases import weight_nodes
from partitioner.ir.plan import NodePlan, Plan, resolve
from partitioner.ir.rule import Cut, Rule
from partitioner.rewrites.graph_writer import chosen
from partitioner.search.request import Budget
from partitioner.search.stages.figures import Ints, Sharding, StageFigures
from partitioner.search.stages.offered_ways import Region, offered_regions, takes_either
from partitioner.search.stages.stage_lives import RESERVED, Floats, LaneRuns, Span
from partitioner.solver.stages.knapsack import Ways, pack, relaxed, steps

#: Choices of what a lane computes again, each by other weights of the moments at which it is full.
WEIGHINGS = 12
#: Of these, those behind which the limit shrinks, too.
AT_THE_LIMIT = 4
#: Relative error that a sum of bytes may have.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Offering:
    """A sharding with the cuts of all nodes of a graph with offers, computed or not."""

    graph: Graph
    sharding: Sharding  #: The sharding that was searched.
    #: Decisions of all nodes of the graph, on the sharding's groups, in its order.
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


class Load(NamedTuple):
    """Seconds and bytes of lanes whose stages compute nodes again."""

    seconds: Floats  #: Of a micro-batch, by stage.
    over_bytes: float  #: Bytes above the limits of the lanes, in all.


class Taken(NamedTuple):
    """Nodes that the stages of a cut compute again, and the bytes of lanes then."""

    again: frozenset[str]  #: The optional nodes.
    bytes: tuple[float, ...]  #: Of a device of each lane, as counted when they were chosen.


@dataclass(frozen=True, eq=False)
class _Counted:
    """The bytes of a step by what is computed again."""

    nbytes: tuple[Floats, ...]  #: Kept bytes of a micro-batch of each region, by way and `Span`.
    units: Ints  #: Unit of each step of the hulls of the regions' ways, ascending.
    lost: Floats  #: Seconds that each step loses.
    saved: Floats  #: Bytes of a micro-batch that it saves, by `Span`; (steps, 3).


@dataclass(frozen=True)
class ComputedAgain:
    """Chooses what stages compute again."""

    offering: Offering  #: The sharding.
    figures: StageFigures  #: Those of the sharding in which nothing is computed again.
    whole: StageFigures  #: Those of the sharding in which everything is.
    #: Offers that are independent of one another, in the order of their units.
    regions: tuple[Region, ...]
    _known: dict[bool, _Counted] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, offering: Offering, kept: StageFigures, budget: Budget) -> ComputedAgain:
        """Price the offers of a sharding, beside the figures of what is computed once."""
        graph = offering.graph
        whole = replace(kept, sharding=offering.taking(graph.optional))
        offered = offered_regions(
            graph,
            _seconds(whole, graph.optional),
            _kept_sizes(kept, whole),
            whole.unit_of,
            budget.share(2).work,
            budget.engine,
        )
        return cls(offering, kept, whole, tuple(sorted(offered, key=lambda region: region.unit)))

    def _counted(self, *, splits: bool) -> _Counted:
        """The bytes of a step; those of one whose backward passes are split are other ones."""
        if splits not in self._known:
            whole = (np.array([(kept, 0.0, 0.0) for _, kept in each.ways]) for each in self.regions)
            nbytes = self._split_bytes() if splits else tuple(whole)
            taken = [
                (region.unit, region.ways[end][0] - region.ways[start][0], own[start] - own[end])
                for region, own in zip(self.regions, nbytes, strict=True)
                for start, end in steps(region.ways)
            ]
            units = np.array([unit for unit, _, _ in taken], np.int64)
            lost = np.array([lost for _, lost, _ in taken])
            saved = np.array([saved for *_, saved in taken]).reshape(-1, len(Span))
            self._known[splits] = _Counted(nbytes, units, lost, saved)
        return self._known[splits]

    def _split_bytes(self) -> tuple[Floats, ...]:
        """Kept bytes of the regions where backward passes are split.

        What is read again by weight gradients alone is made there, and not kept. Each way is taken
        in all regions at once, since they do not depend on one another.
        """
        sizes, made = _kept_sizes(self.figures, self.whole), self.whole.made_bytes
        copies = self.whole.lives(splits=True).kept_bytes
        unit_of = {**self.figures.unit_of, **self.whole.unit_of}
        table = [np.zeros((len(region.ways), len(Span))) for region in self.regions]
        for way in range(max((len(region.ways) for region in self.regions), default=0)):
            ways = [min(way, len(region.ways) - 1) for region in self.regions]
            again = (region.again[at] for region, at in zip(self.regions, ways, strict=True))
            graph = chosen(self.offering.graph, frozenset().union(*again))
            roots, spans = _spans(graph, weight_nodes(graph, graph.backward, unit_of))
            for region, at, nbytes in zip(self.regions, ways, table, strict=True):
                copied = (
                    value
                    for name in sorted(region.again[at])
                    if name in graph.by_name
                    for value in graph.by_name[name].writes
                )
                nbytes[at] = 0.0
                for value in dict.fromkeys(roots.get(v, v) for v in (*region.kept, *copied)):
                    span = spans.get(value)
                    if span is Span.BETWEEN:
                        copied_bytes = copies.get(value, (0, 0, 0))[span]
                        nbytes[at, span] += copied_bytes or made.get(value, 0)
                    elif span is not None:
                        nbytes[at, span] += sizes.get(value, 0)
        return tuple(table)

    # Cuts, by the relaxation ----------------------------------------------------------------

    def lost_s(self, at: Ints, need: Floats) -> Floats:
        """Least seconds that stretches between positions lose to keep so many bytes less.

        Bytes are of a micro-batch; seconds are infinite where so many cannot be saved.
        """
        counted = self._counted(splits=False)
        lost, saved = counted.lost, counted.saved.sum(axis=1)
        order = np.argsort(lost / saved, kind="stable")
        before, pairs = counted.units[order] < at[:, None], np.indices(need.shape).reshape(2, -1)
        least, _ = relaxed(lost[order], saved[order], before, pairs, need.reshape(-1))
        return least.reshape(need.shape)

    def _held(self, runs: LaneRuns, bounds: Sequence[tuple[int, int]]) -> Floats:
        """Bytes of a lane that keeps all, with what passes make at most, whatever they compute."""
        lives = (of.lives(splits=runs.phases.splits) for of in (self.figures, self.whole))
        kept, whole = (each.lane(runs, bounds) for each in lives)
        return kept.beside(whole).at(runs)

    def load(self, ends: Sequence[int], lanes: Sequence[LaneRuns], limits: Sequence[float]) -> Load:
        """Give what a cut takes, at least: at the moment at which each lane needs most."""
        extra, over, bounds = np.zeros(len(ends)), 0.0, tuple(pairwise((0, *ends)))
        counted = self._counted(splits=lanes[0].phases.splits)
        units = counted.units
        for rows, limit in zip(lanes, limits, strict=True):
            own = [bounds[stage] for stage in rows.stages]
            need = self._held(rows, bounds) - limit
            if need.max() <= 0:
                continue
            spans = [np.searchsorted(units, bound) for bound in own]
            most = np.array([counted.saved[first:last].sum(axis=0) for first, last in spans])
            tightest = {int(need.argmax()), int((need - rows.kept(most)).argmax())}
            # The moments that need most before and behind all that can be saved.
            loads = [_lost_at(counted, rows, at, float(need[at]), spans) for at in sorted(tightest)]
            lost_s, short = max(loads, key=lambda load: (load[1], float(load[0].sum())))
            extra[list(rows.stages)] += lost_s
            over += short
        return Load(extra, over)

    # One cut, exactly ------------------------------------------------------------------------

    def packed(
        self, ends: Sequence[int], lanes: Sequence[LaneRuns], limits: Sequence[float]
    ) -> Taken:
        """The optional nodes that are computed in the stages of a cut; see `load`.

        They take the fewest seconds within the memory of each lane or, where nothing fits, the
        least memory.
        """
        bounds = tuple(pairwise((0, *ends)))
        counted = self._counted(splits=lanes[0].phases.splits)
        at = np.array([region.unit for region in self.regions], np.int64)
        again: set[str] = set()
        used = []
        for rows, limit in zip(lanes, limits, strict=True):
            own = [bounds[stage] for stage in rows.stages]
            spans = [np.searchsorted(at, bound) for bound in own]
            numbers = [number for span in spans for number in range(*span)]
            of = [index for index, (first, last) in enumerate(spans) for _ in range(first, last)]
            ways = [self.regions[number].ways for number in numbers]
            nbytes = [counted.nbytes[number] for number in numbers]
            kept = np.zeros((len(own), len(Span)))
            for index, each in zip(of, nbytes, strict=True):
                kept[index] += each[0]
            fixed = self._held(rows, bounds) - rows.kept(kept)
            taken, most = ways_within(rows, fixed, limit, ways, nbytes, of)
            for number, way in zip(numbers, taken, strict=True):
                again |= self.regions[number].again[way]
            used.append(most)
        return Taken(frozenset(again), tuple(used))


def _lost_at(
    counted: _Counted, rows: LaneRuns, moment: int, need: float, spans: Sequence[Ints]
) -> tuple[Floats, float]:
    """Seconds that the stages of a lane lose to save so many bytes at a moment, and the rest."""
    extra, lost = np.zeros(len(rows.stages)), counted.lost
    if need <= 0:
        return extra, 0.0
    numbers = np.concatenate([np.arange(first, last) for first, last in spans])
    of = np.concatenate([np.full(last - first, i) for i, (first, last) in enumerate(spans)])
    sizes = RESERVED * np.einsum("nk,nk->n", counted.saved[numbers], rows.spans[moment][of])
    saves = sizes > 0
    numbers, of, sizes = numbers[saves], of[saves], sizes[saves]
    order = np.argsort(lost[numbers] / sizes, kind="stable")
    sums = np.cumsum(sizes[order])
    whole = int(np.searchsorted(sums, need))
    np.add.at(extra, of[order[:whole]], lost[numbers[order[:whole]]])
    if whole == len(order):
        return extra, need - (float(sums[-1]) if len(order) else 0.0)
    last = order[whole]
    part = (need - (float(sums[whole - 1]) if whole else 0.0)) / sizes[last]
    extra[of[last]] += part * lost[numbers[last]]
    return extra, 0.0


def ways_within(
    rows: LaneRuns,
    fixed: Floats,
    limit: float,
    ways: Sequence[Ways],
    nbytes: Sequence[Floats],
    of: Sequence[int],
) -> tuple[Sequence[int], float]:
    """A way for each region of a lane with the fewest seconds within the limit at all moments.

    A knapsack has one limit. So moments are weighed: first the one that needs most counts alone,
    then each that is still above the limit gets weight. The first choices that are within the
    limit at all moments take the fewest seconds; later ones are made for a lower limit.

    Args:
        rows: The moments.
        fixed: Bytes at each moment that no way bears on.
        nbytes: Bytes of the ways by `Span`.
        of: The stage of each region, as a number among those of the lane.

    Returns:
        The ways, and the most bytes of all moments.
    """

    def over(taken: Sequence[int]) -> Floats:
        kept = np.zeros((len(rows.stages), len(Span)))
        for index, each, way in zip(of, nbytes, taken, strict=True):
            kept[index] += each[way]
        return fixed + rows.kept(kept) - limit

    taken: Sequence[int] = [0] * len(ways)
    excess = over(taken)
    best = excess, taken
    weights, less = np.zeros(len(fixed)), 0.0
    for turn in range(1, WEIGHINGS + 1):
        if excess.max() <= ROUNDING * limit:
            break
        weights[int(excess.argmax())] += 1.0
        less += float(excess.max()) / 2 if turn > AT_THE_LIMIT else 0.0
        shares = weights / turn
        held = np.einsum("m,msk->sk", shares, rows.spans)
        things = [
            tuple(
                (seconds, float(size))
                for (seconds, _), size in zip(own, RESERVED * (each @ held[index]), strict=True)
            )
            for own, each, index in zip(ways, nbytes, of, strict=True)
        ]
        packed = pack(things, limit - less - float(shares @ fixed))
        if packed is not None:
            taken = packed.way
        else:
            taken = [min(range(len(each)), key=lambda way: each[way][1]) for each in things]
        excess = over(taken)
        if excess.max() < best[0].max():
            best = excess, taken
    excess, taken = best
    return taken, limit + float(excess.max())


def _kept_sizes(kept: StageFigures, whole: StageFigures) -> Mapping[str, int]:
    """Bytes of each value that may be kept for the backward pass."""
    sizes = dict(kept.made_bytes)
    for figures in (whole, kept):
        each = figures.lives(splits=False).kept_bytes
        sizes |= {value: int(nbytes.sum()) for value, nbytes in each.items()}
    return sizes


def _spans(
    graph: Graph, weights: Container[str]
) -> tuple[Mapping[str, str], Mapping[str, Span | None]]:
    """The value whose memory each name or view has, and the span of each, without offers."""
    roots: dict[str, str] = {}
    made: dict[str, int] = {}
    read: dict[str, int] = {}
    for node in graph.nodes:
        row = row_of(node)
        turn = 0 if node.name not in graph.backward else 2 if node.name in weights else 1
        if (row.view or row.again or row.either) and node.inputs:
            value = node.inputs[0]
            roots.update(dict.fromkeys(node.writes, roots.get(value, value)))
            continue
        for value in node.reads:
            root = roots.get(value, value)
            read[root] = max(turn, read.get(root, 0))
        made.update(dict.fromkeys(node.writes, turn))
    spans = {(0, 1): Span.TO_INPUT, (0, 2): Span.TO_WEIGHT, (1, 2): Span.BETWEEN}
    return roots, {value: spans.get((turn, read.get(value, 0))) for value, turn in made.items()}


def _seconds(figures: StageFigures, names: frozenset[str]) -> Mapping[str, float]:
    """Seconds of some nodes and of the communications that they cause, on the busiest device."""
    seconds: dict[str, dict[int, float]] = {}
    for task in figures.tasks.tasks:
        if task.of_node in names:
            own = seconds.setdefault(task.of_node, {})
            for device, more in task.devices.items():
                own[device] = own.get(device, 0.0) + more
    return {name: max(own.values(), default=0.0) for name, own in seconds.items()}
