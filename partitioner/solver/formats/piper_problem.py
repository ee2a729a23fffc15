"""A piper instance as a problem of cutting into stages, and a cut of it as a plan.

A *downset* is a set of nodes that holds all that its nodes need. In any plan the nodes of the
first k stages are one, for every k: so positions are downsets, and the stage from I to J is J less
I, where I is a part of J. That loses no plan. Seconds and bytes of all stages are computed at once,
as arrays over pairs of downsets.

Nodes of which one way is slower and smaller than the other are grouped in *classes* by the bytes
that the slower way saves: with r nodes of a class in their slower way, the r that lose least time
are best. So a way of a stage is one number r a class, and all plans that matter are covered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partitioner.solver.formats.piper import Config, Instance, Sharded
from partitioner.solver.formats.piper_referee import PlannedStage
from partitioner.solver.problem import SolverError
from partitioner.solver.stages import Cut, Pool, Stage, StageOption, StageProblem
from partitioner.solver.stages.model import Bools, Floats

#: Downsets of a graph, and ways of a stage, that the arrays are meant for.
MOST_DOWNSETS = 500
MOST_WAYS = 1_000


@dataclass(frozen=True)
class Saving:
    """A class of nodes, by the time that the slower way loses, ascending.

    Attributes:
        lost_s: That time, of each node.
        flying_bytes: Bytes that the slower way holds more (or less: negative) per micro-batch.
        resident_bytes: Bytes that it holds more besides.
    """

    nodes: tuple[int, ...]
    lost_s: tuple[float, ...]
    flying_bytes: float
    resident_bytes: float


@dataclass(frozen=True)
class Planner:
    """The problem of an instance, and the way back from its cuts.

    Attributes:
        downsets: Sets of nodes by size, the positions of the problem; the first is empty, the last
            has all nodes.
        degrees: (data degree, tensor degree) of each option of the problem.
        savings: Of each tensor degree; a way is an index into an array of their sizes + 1.
    """

    instance: Instance
    downsets: tuple[frozenset[int], ...]
    degrees: tuple[tuple[int, int], ...]
    savings: Mapping[int, tuple[Saving, ...]]
    problem: StageProblem

    def plan(self, cut: Cut) -> tuple[PlannedStage, ...]:
        """The stages of a cut with the config of each node."""
        return tuple(map(self.planned, cut.stages))

    def planned(self, stage: Stage) -> PlannedStage:
        """One stage with the config of each node."""
        nodes = self.downsets[stage.stop] - self.downsets[stage.start]
        data, tensor = self.degrees[stage.option]
        pairs = {v: fast_and_small(v, self.instance.nodes[v][tensor]) for v in nodes}
        configs = {v: pair[0].name for v, pair in sorted(pairs.items())}
        savings = self.savings[tensor]
        counts = np.unravel_index(stage.way, [len(saving.nodes) + 1 for saving in savings])
        for saving, many in zip(savings, counts, strict=True):
            slower = [v for v in saving.nodes if v in nodes][: int(many)]
            configs |= {v: pairs[v][-1].name for v in slower}
        return PlannedStage(configs, data, tensor)


def planner(instance: Instance) -> Planner:
    """State an instance as a problem of cutting into stages.

    Raises:
        SolverError: The graph has too many downsets, or its nodes differ too much in memory.
    """
    downsets = enumerate_downsets(instance)
    layout = _Layout(instance, downsets)
    tensor_degrees = sorted({t for shards in instance.nodes.values() for t in shards})
    savings = {t: _find_savings(instance, t) for t in tensor_degrees if t <= instance.devices}
    degrees = [
        (data, tensor)
        for tensor in savings
        for data in range(1, min(instance.devices // tensor, instance.microbatches) + 1)
        if instance.microbatches % data == 0
    ]
    if not degrees:
        raise SolverError("no number of devices holds any node")
    options = [
        option
        for tensor, classes in savings.items()
        for option in layout.options(tensor, classes, [d for d, t in degrees if t == tensor])
    ]
    pool = Pool(instance.devices, instance.limit_bytes)
    problem = StageProblem(tuple(options), (pool,), most_degrees=instance.microbatches)
    return Planner(instance, downsets, tuple(degrees), savings, problem)


def enumerate_downsets(instance: Instance) -> tuple[frozenset[int], ...]:
    """All downsets by size, then by their nodes."""
    needs: dict[int, set[int]] = {v: set() for v in instance.nodes}
    for source, target in instance.edges:
        needs[target].add(source)
    downsets: set[frozenset[int]] = {frozenset()}
    largest = downsets
    while largest:
        largest = {
            downset | {v}
            for downset in largest
            for v in needs
            if v not in downset and needs[v] <= downset
        }
        downsets |= largest
        if len(downsets) > MOST_DOWNSETS:
            raise SolverError(f"the graph has more than {MOST_DOWNSETS} downsets")
    return tuple(sorted(downsets, key=lambda downset: (len(downset), sorted(downset))))


def fast_and_small(node: int, sharded: Sharded) -> tuple[Config, ...]:
    """The configs that another does not beat: the fastest, and one that is smaller, if any is."""

    def least_bytes(config: Config) -> float:
        return config.flying_bytes + config.resident_bytes

    kept: list[Config] = []
    for config in sorted(
        sharded.configs, key=lambda c: (c.time_s, c.flying_bytes, c.resident_bytes)
    ):
        if not any(
            other.flying_bytes <= config.flying_bytes and least_bytes(other) <= least_bytes(config)
            for other in kept
        ):
            kept.append(config)
    if len(kept) > 2:
        names = ", ".join(repr(config.name) for config in kept)
        raise SolverError(f"node {node} has more than two ways that matter: {names}")
    return tuple(kept)


def _find_savings(instance: Instance, tensor: int) -> tuple[Saving, ...]:
    """The classes of nodes on so many devices each."""
    classes: dict[tuple[float, float], list[tuple[float, int]]] = {}
    for node, shards in instance.nodes.items():
        if tensor not in shards:
            continue
        fast, *small = fast_and_small(node, shards[tensor])
        for config in small:
            saved = (
                config.flying_bytes - fast.flying_bytes,
                config.resident_bytes - fast.resident_bytes,
            )
            classes.setdefault(saved, []).append((config.time_s - fast.time_s, node))
    ways = np.prod([len(members) + 1 for members in classes.values()], dtype=float)
    if ways > MOST_WAYS:
        raise SolverError(
            f"nodes on {tensor} devices differ too much in what they save: a stage has {ways:.0f} "
            f"ways, {MOST_WAYS} are supported"
        )
    savings = []
    for saved, members in sorted(classes.items()):
        lost_s, nodes = zip(*sorted(members), strict=True)
        savings.append(Saving(nodes, lost_s, *saved))
    return tuple(savings)


@dataclass(frozen=True)
class _Layout:
    """Which downset has which node, for sums over the nodes of all stages.

    With I a part of J, a sum over J less I is the sum over J less the sum over I, and an edge
    enters the stage if its source is in I and its target in J only.
    """

    instance: Instance
    downsets: tuple[frozenset[int], ...]

    @cached_property
    def has(self) -> Floats:
        """[downset, node]: 1 where the node is in it."""
        nodes = self.instance.nodes
        return np.array([[float(v in downset) for v in nodes] for downset in self.downsets])

    @cached_property
    def column(self) -> dict[int, int]:
        """Column of each node in `has`."""
        return {v: index for index, v in enumerate(self.instance.nodes)}

    @cached_property
    def nested(self) -> Bools:
        """[I, J]: whether I is a smaller part of J."""
        both = self.has @ self.has.T
        size = self.has.sum(axis=1)
        return np.asarray((both == size[:, None]) & (size[:, None] < size))

    def options(
        self, tensor: int, savings: Sequence[Saving], data_degrees: Sequence[int]
    ) -> Iterator[StageOption]:
        """All stages on one tensor degree, for each data degree; infinite where there is none."""
        batch, bandwidth = self.instance.microbatches, self.instance.bandwidth_bytes_per_s
        sharded = [shards.get(tensor) for shards in self.instance.nodes.values()]
        fast = [
            None if shards is None else fast_and_small(v, shards)[0]
            for v, shards in zip(self.instance.nodes, sharded, strict=True)
        ]
        missing = self._sums([float(shards is None) for shards in sharded])
        time, flying, resident = (
            self._sums([0.0 if config is None else getattr(config, name) for config in fast])
            for name in ("time_s", "flying_bytes", "resident_bytes")
        )
        lost, saved = self._savings(savings)
        there = self.nested & (missing == 0) & np.isfinite(lost)
        time = np.where(there, time + lost, np.inf)
        flying = np.where(there, flying + saved[:, 0, None, None], 0.0)
        resident = np.where(there, resident + saved[:, 1, None, None], 0.0)
        cut = self._cut_bytes(tensor)
        parameters = self._sums([0.0 if of is None else of.parameter_bytes for of in sharded])
        for data in data_degrees:
            renewed = 4 * (data - 1) / data * parameters / batch
            moved_s = (2 * cut / data + renewed) / bandwidth
            label, devices = f"data {data} x tensor {tensor}", data * tensor
            load_s = time / data + moved_s
            yield StageOption(label, devices, load_s, resident, flying, degree=data)

    def _sums(self, values: Sequence[float]) -> Floats:
        """[I, J]: sum over the nodes of J less I of one value a node; 0 if I is not within J."""
        total = self.has @ np.array(values)
        return np.where(self.nested, total - total[:, None], 0.0)

    def _cut_bytes(self, tensor: int) -> Floats:
        total = np.zeros(self.nested.shape)
        for (u, v), moved in self.instance.edges.items():
            source, target = self.has[:, self.column[u]], self.has[:, self.column[v]]
            head, tail = (self.instance.nodes[end].get(tensor) for end in (v, u))
            if head is not None:
                enters = (source - target)[:, None] * target
                total += enters * (moved + head.sync_in_bytes[u])
            if tail is not None:
                leaves = (1 - source)[:, None] * (source - target)
                total += leaves * (moved + tail.sync_out_bytes[v])
        return np.where(self.nested, total, 0.0)

    def _savings(self, savings: Sequence[Saving]) -> tuple[Floats, Floats]:
        """Time lost by each way, (ways, I, J); bytes it holds more, (ways, flying and resident)."""
        lost, saved = np.zeros((1, *self.nested.shape)), np.zeros((1, 2))
        for saving in savings:
            lost_by_many = self._lost_s(saving)
            lost = (lost[:, None] + lost_by_many).reshape(-1, *self.nested.shape)
            many = np.arange(len(lost_by_many))[:, None]
            more = many * np.array([saving.flying_bytes, saving.resident_bytes])
            saved = (saved[:, None] + more).reshape(-1, 2)
        return lost, saved

    def _lost_s(self, saving: Saving) -> Floats:
        """[r, I, J]: least time lost by r nodes of the class; infinite if there are not so many."""
        shape = self.nested.shape
        lost = np.full((len(saving.nodes) + 1, *shape), np.inf)
        lost[0] = 0.0
        many, total = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        for node, seconds in zip(saving.nodes, saving.lost_s, strict=True):
            there = self.has[:, self.column[node]]
            start, stop = np.nonzero(self.nested & (there[:, None] < there))
            many[start, stop] += 1
            total[start, stop] += seconds
            lost[many[start, stop], start, stop] = total[start, stop]
        return lost
