"""Recomputation chosen for each stage of a pipeline, so that it fits its device's memory.

A sharding of a graph with offers says how every node is cut, computed or not. The
stages of one cut hold different numbers of micro-batches, so each takes its own of the offers: the
fastest within its memory, a multiple-choice knapsack over the regions of the stages of a device.
Cuts are compared by its linear relaxation.

Offers that read from one another, or that give copies of the same value, make up a *region*: about
half a layer of a transformer. A way of a region is a set of its optional nodes that are computed;
it takes their seconds, and keeps the bytes of the values that are then still read as the forward
pass made them. The ways that no other beats come from small MILPs: the least seconds within a limit
of bytes, for several limits. Regions of equal nodes, seconds and bytes have theirs in common.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.offers import originals
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.phases import weight_nodes
from partitioner.ir.plan import NodePlan, Plan, resolve
from partitioner.ir.rule import Cut, Rule
from partitioner.rewrites.graph_writer import chosen
from partitioner.search.request import Budget
from partitioner.search.stages.figures import Ints, Sharding, StageFigures
from partitioner.search.stages.stage_lives import RESERVED, Floats, LaneRuns, Span
from partitioner.solver.milp.engines import Engine, solve_milp
from partitioner.solver.milp.program import Milp, MilpBuilder
from partitioner.solver.stages.knapsack import Ways, frontier, pack, relaxed, steps
from partitioner.solver.work import Work

#: Limits of bytes for which the ways of a region are searched, beside keeping all.
LIMITS = 8
#: Weight of the bytes beside the seconds, both as shares: of equally fast ways the smallest counts.
BYTES_WEIGHT = 1e-4
#: Digits of the seconds by which regions are told apart.
DIGITS = 4


@dataclass(frozen=True)
class Region:
    """Offers that depend on one another, and the ways to take them."""

    unit: int  #: The unit of the forward pass (`StageFigures.units`) that it goes with.
    ways: Ways  #: Seconds and kept bytes of a micro-batch; all kept first, none beats another.
    again: tuple[frozenset[str], ...]  #: The optional nodes that are computed, of each way.
    kept: tuple[str, ...]  #: The values that may be kept.


def offered_regions(
    graph: Graph,
    seconds: Mapping[str, float],
    kept_bytes: Mapping[str, int],
    unit_of: Mapping[str, int],
    work: Work,
    engine: Engine,
) -> tuple[Region, ...]:
    """The regions of a graph with offers that have more ways than one.

    Args:
        seconds: Of each optional node, with the communications that it causes.
        kept_bytes: Of each value that may be kept for the backward pass.
        work: Pays for the MILPs; where it is over, a region has two ways: all kept, and the least.
    """
    known: dict[object, tuple[tuple[tuple[float, float], ...], tuple[tuple[int, ...], ...]]] = {}
    regions = []
    for members in _components(graph):
        part = _Part(graph, members, seconds, kept_bytes)
        key = part.key
        if key not in known:
            known[key] = part.ways(work, engine)
        ways, taken = known[key]
        if len(ways) > 1:
            names = [node.name for node in members]
            again = tuple(frozenset(names[i] for i in way) for way in taken)
            regions.append(Region(max(unit_of[name] for name in names), ways, again, part.kept))
    return tuple(regions)


def takes_either(node: Node) -> bool:
    """Tell whether a node takes a value as it was kept or, if it has a second operand, a copy."""
    return row_of(node).either


def _components(graph: Graph) -> Iterator[tuple[Node, ...]]:
    """Optional nodes and those that take either operand, joined where one bears on another."""
    import networkx as nx

    members = [n for n in graph.nodes if n.name in graph.optional or takes_either(n)]
    joined = nx.Graph()
    joined.add_nodes_from(node.name for node in members)
    first_reader: dict[str, str] = {}  # of a value that a node takes as it was kept
    for node in members:
        made_by = (graph.producers[value].name for value in node.reads if value in graph.producers)
        joined.add_edges_from((name, node.name) for name in made_by if name in graph.optional)
        if takes_either(node):
            joined.add_edge(first_reader.setdefault(node.inputs[0], node.name), node.name)
    for names in nx.connected_components(joined):
        yield tuple(graph.by_name[name] for name in sorted(names, key=graph.order.__getitem__))


@dataclass(frozen=True)
class _Part:
    """The nodes of a region, in the order of the graph."""

    graph: Graph
    nodes: tuple[Node, ...]
    seconds: Mapping[str, float]
    kept_bytes: Mapping[str, int]

    @cached_property
    def kept(self) -> tuple[str, ...]:
        taken = (node.inputs[0] for node in self.nodes if takes_either(node))
        return tuple(dict.fromkeys(taken))

    @cached_property
    def key(self) -> object:
        """Give what the ways depend on."""
        index = {v: (i, k) for i, n in enumerate(self.nodes) for k, v in enumerate(n.outputs)}
        kept = {value: number for number, value in enumerate(self.kept)}
        return (
            tuple(
                (
                    node.name in self.graph.optional,
                    takes_either(node),
                    float(f"{self._seconds_of(node):.{DIGITS}g}"),
                    tuple(index.get(v, kept.get(v, -1)) for v in node.inputs),
                )
                for node in self.nodes
            ),
            tuple(self.kept_bytes.get(value, 0) for value in self.kept),
        )

    def _seconds_of(self, node: Node) -> float:
        return self.seconds.get(node.name, 0.0) if node.name in self.graph.optional else 0.0

    def ways(
        self, work: Work, engine: Engine
    ) -> tuple[tuple[tuple[float, float], ...], tuple[tuple[int, ...], ...]]:
        """Seconds and bytes of the ways, and the numbers of the nodes that are computed."""
        needed = (n for n in self.nodes if takes_either(n) and n.name not in self.graph.optional)
        values = {node.inputs[0] for node in needed}
        most = float(sum(self.kept_bytes.get(value, 0) for value in values))
        keep_all: tuple[int, ...] = ()
        found = {keep_all: (0.0, most)}
        least = self._least(None, work, engine)
        if least is not None:
            found[least[0]] = least[1]
            low = least[1][1]
            for step in range(1, LIMITS):
                if work.over:
                    break
                limit = low + (most - low) * step / LIMITS
                better = self._least(limit, work, engine)
                if better is not None:
                    found[better[0]] = better[1]
        taken, ways = tuple(found), tuple(found.values())
        best = frontier(ways)
        return tuple(ways[i] for i in best), tuple(taken[i] for i in best)

    def _least(
        self, limit: float | None, work: Work, engine: Engine
    ) -> tuple[tuple[int, ...], tuple[float, float]] | None:
        """The way of least seconds within a limit of bytes or, without one, of least bytes."""
        milp, columns, kept = self._milp(limit)
        result = solve_milp(milp, work, 0.0, engine=engine)
        if not result.values:
            return None
        taken = tuple(i for i, column in columns.items() if result.values[column] > 0.5)
        seconds = sum(self._seconds_of(self.nodes[i]) for i in taken)
        sizes = (self.kept_bytes.get(v, 0) for v, c in kept.items() if result.values[c] > 0.5)
        return taken, (seconds, float(sum(sizes)))

    def _milp(self, limit: float | None) -> tuple[Milp, dict[int, int], dict[str, int]]:
        """The program, the column of each optional node, and of each value that may be kept."""
        build = MilpBuilder()
        total_s = sum(map(self._seconds_of, self.nodes)) or 1.0
        total = sum(self.kept_bytes.get(value, 0) for value in self.kept) or 1
        weights = (1.0, BYTES_WEIGHT) if limit is not None else (BYTES_WEIGHT, 1.0)
        columns: dict[int, int] = {}
        present: dict[str, int] = {}  # column of the node that makes a value
        for index, node in enumerate(self.nodes):
            if node.name in self.graph.optional:
                cost = weights[0] * self._seconds_of(node) / total_s
                columns[index] = build.column(cost=cost, upper=1.0, integer=True)
                present.update(dict.fromkeys(node.writes, columns[index]))
        kept: dict[str, int] = {}
        for value in self.kept:
            cost = weights[1] * self.kept_bytes.get(value, 0) / total
            kept[value] = build.column(cost=cost, upper=1.0, integer=True)
        for index, node in enumerate(self.nodes):
            due = [(columns[index], -1.0)] if index in columns else []
            if takes_either(node):  # kept, or computed; if the node is not computed, neither
                value, *copies = node.inputs
                copied = [(present[copy], 1.0) for copy in copies if copy in present]
                build.row([(kept[value], 1.0), *copied, *due], 1, 0.0 if due else 1.0)
            elif due:
                for value in node.reads:
                    if value in present:
                        build.row([(present[value], 1.0), *due], 1, 0.0)
        if limit is not None:
            shares = [(c, self.kept_bytes.get(v, 0) / total) for v, c in kept.items()]
            build.row(shares, -1, limit / total)
        return build.build(), columns, kept


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
