"""A piper instance as a problem of cutting into stages, all ways of its stages counted.

Nodes of which one way is slower and smaller than the other are grouped in *classes* by the bytes
that the slower way saves: with r nodes of a class in their slower way, the r that lose least time
are best. So a way of a stage is one number r a class, and all plans that matter are covered. That
is for graphs of few classes; `piper_ways` is for all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.solver.formats.piper import Config, Instance, Sharded
from partitioner.solver.formats.piper_layout import MOST_ENTRIES, Layout, all_degrees
from partitioner.solver.formats.piper_referee import PlannedStage
from partitioner.solver.stages import Cut, Pool, Stage, StageOption, StageProblem
from partitioner.solver.stages.model import Floats


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
        layout: Its downsets are the positions of the problem.
        degrees: (data degree, tensor degree) of each option of the problem.
        savings: Of each tensor degree; a way is an index into an array of their sizes + 1.
    """

    layout: Layout
    degrees: tuple[tuple[int, int], ...]
    savings: Mapping[int, tuple[Saving, ...]]
    problem: StageProblem

    def plan(self, cut: Cut) -> tuple[PlannedStage, ...]:
        """The stages of a cut with the config of each node."""
        return tuple(map(self.planned, cut.stages))

    def planned(self, stage: Stage) -> PlannedStage:
        """A stage with the config of each node."""
        nodes = self.layout.stage_nodes(stage.start, stage.stop)
        data, tensor = self.degrees[stage.option]
        pairs = {v: frontier(self.layout.instance.nodes[v][tensor]) for v in nodes}
        configs = {v: pair[0].name for v, pair in sorted(pairs.items())}
        savings = self.savings[tensor]
        counts = np.unravel_index(stage.way, [len(saving.nodes) + 1 for saving in savings])
        for saving, many in zip(savings, counts, strict=True):
            slower = [v for v in saving.nodes if v in nodes][: int(many)]
            configs |= {v: pairs[v][-1].name for v in slower}
        return PlannedStage(configs, data, tensor)


def planner(layout: Layout) -> Planner | None:
    """State the stages of a layout as a problem; None if they have too many ways.

    Raises:
        SolverError: No number of devices holds any node.
    """
    instance = layout.instance
    degrees = all_degrees(instance)
    savings: dict[int, tuple[Saving, ...]] = {}
    room = MOST_ENTRIES / len(layout.downsets) ** 2
    for tensor in sorted({tensor for _, tensor in degrees}):
        classes = _find_savings(instance, tensor)
        if classes is None:
            return None
        savings[tensor] = classes
        ways = math.prod(len(saving.nodes) + 1 for saving in classes)
        room -= ways * sum(t == tensor for _, t in degrees)
    if room < 0:
        return None
    options = tuple(
        option
        for tensor, classes in savings.items()
        for option in _options(layout, tensor, classes, [d for d, t in degrees if t == tensor])
    )
    pool = Pool(instance.devices, instance.limit_bytes)
    problem = StageProblem(options, (pool,), most_degrees=instance.microbatches)
    return Planner(layout, degrees, savings, problem)


def frontier(sharded: Sharded) -> tuple[Config, ...]:
    """The configs that no other beats, fastest first; one micro-batch or more is in flight."""

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
    return tuple(kept)


def _find_savings(instance: Instance, tensor: int) -> tuple[Saving, ...] | None:
    """The classes of nodes on so many devices each; None if a node has more than two ways."""
    classes: dict[tuple[float, float], list[tuple[float, int]]] = {}
    for node, shards in instance.nodes.items():
        if tensor not in shards:
            continue
        fast, *small = frontier(shards[tensor])
        if len(small) > 1:
            return None
        for config in small:
            saved = (
                config.flying_bytes - fast.flying_bytes,
                config.resident_bytes - fast.resident_bytes,
            )
            classes.setdefault(saved, []).append((config.time_s - fast.time_s, node))
    savings = []
    for saved, members in sorted(classes.items()):
        lost_s, nodes = zip(*sorted(members), strict=True)
        savings.append(Saving(nodes, lost_s, *saved))
    return tuple(savings)


def _options(
    layout: Layout, tensor: int, savings: Sequence[Saving], data_degrees: Sequence[int]
) -> Iterator[StageOption]:
    """All stages on one tensor degree, for each data degree; infinite where there is none."""
    fast = [
        frontier(shards[tensor])[0] if tensor in shards else None
        for shards in layout.instance.nodes.values()
    ]
    time, flying, resident = (
        layout.sums([0.0 if config is None else getattr(config, name) for config in fast])
        for name in ("time_s", "flying_bytes", "resident_bytes")
    )
    lost, saved = _savings(layout, savings)
    there = layout.nested & ~layout.missing(tensor) & np.isfinite(lost)
    time = np.where(there, time + lost, np.inf)
    flying = np.where(there, flying + saved[:, 0, None, None], 0.0)
    resident = np.where(there, resident + saved[:, 1, None, None], 0.0)
    for data, moved_s in zip(data_degrees, layout.moved_s(tensor, data_degrees), strict=True):
        load_s = time / data + moved_s
        label = f"data {data} x tensor {tensor}"
        yield StageOption(label, data * tensor, load_s, resident, flying, degree=data)


def _savings(layout: Layout, savings: Sequence[Saving]) -> tuple[Floats, Floats]:
    """Time lost by each way, (ways, I, J); bytes it holds more, (ways, flying and resident)."""
    lost, saved = np.zeros((1, *layout.nested.shape)), np.zeros((1, 2))
    for saving in savings:
        lost_by_many = _lost_s(layout, saving)
        lost = (lost[:, None] + lost_by_many).reshape(-1, *layout.nested.shape)
        many = np.arange(len(lost_by_many))[:, None]
        more = many * np.array([saving.flying_bytes, saving.resident_bytes])
        saved = (saved[:, None] + more).reshape(-1, 2)
    return lost, saved


def _lost_s(layout: Layout, saving: Saving) -> Floats:
    """[r, I, J]: least time lost by r nodes of the class; infinite if there are not so many."""
    shape = layout.nested.shape
    lost = np.full((len(saving.nodes) + 1, *shape), np.inf)
    lost[0] = 0.0
    many, total = np.zeros(shape, dtype=np.int64), np.zeros(shape)
    for node, seconds in zip(saving.nodes, saving.lost_s, strict=True):
        there = layout.has[:, layout.column[node]]
        start, stop = np.nonzero(layout.nested & (there[:, None] < there))
        many[start, stop] += 1
        total[start, stop] += seconds
        lost[many[start, stop], start, stop] = total[start, stop]
    return lost
