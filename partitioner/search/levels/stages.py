"""The search over stages and meshes of a large cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.even_mesh import EvenMesh
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.problem.folding import Folded, fold
from partitioner.search.levels.axis_sharder import AxisSharder
from partitioner.search.levels.mesh_sharder import Sharded, Sharder
from partitioner.search.levels.meshes import Layout, kinds, split_from
from partitioner.search.levels.stretches import Blocks, blocks, stage_option
from partitioner.solver import Infeasible
from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.stages import Cut, Pool, StageOption, StageProblem, cut_stages
from partitioner.strategies.derive import Rules

#: Meshes of more axes are sharded one axis at a time.
JOINT_AXES = 2
#: So much longer a layout takes than one with an axis less, as long as none is known.
MORE_AXES = 12.0
#: Cuts of least estimated load that are counted anew.
RIVALS = 3
#: Of the time that is left, what the solver may take for one layout.
SHARE = 0.2


@dataclass(frozen=True)
class Option:
    """One layout with the model sharded over it.

    Attributes:
        layout: The mesh.
        sharded: How the model is sharded over it.
        stage: What stretches of blocks cost on it; None if it runs the whole model.
    """

    layout: Layout
    sharded: Sharded
    stage: StageOption | None


@dataclass(frozen=True)
class Staged:
    """The best cut found.

    Attributes:
        folded: The model.
        cut: The stages: stretches of `blocks`.
        blocks: Positions that stages begin and end at.
        options: What each stage runs on.
        bound_s: No plan of stages on these devices has a lower largest load.
        searched: Layouts that the model was sharded over.
        failed: The others, and why not.
        in_time: Whether the time limit cut nothing off.
        tight: Whether memory forbids a plan that costs less by more than the gap.
    """

    folded: Folded
    cut: Cut
    blocks: Blocks
    options: tuple[Option, ...]
    bound_s: float
    searched: tuple[Layout, ...]
    failed: dict[Layout, str]
    in_time: bool
    tight: bool = False


def search_levels(
    graph: Graph,
    rules: Rules,
    cluster: Cluster,
    candidates: Sequence[Layout],
    *,
    deadline: float,
    gap: float,
    progress: Callable[[str], None],
    seed: int = 0,
    engine: Engine = HIGHS,
) -> tuple[Staged, ...]:
    """The best plans of stages by estimated load, each stage on one of the layouts.

    Layouts are sharded in order until the gap is met or time is up.

    Args:
        graph: The model.
        rules: Its rules.
        cluster: The devices.
        candidates: Layouts to choose from, the most promising first.
        deadline: Monotonic second after which no further layout is begun.
        gap: Relative gap between load and bound at which to stop.
        progress: Called with a line of text before each layout.
        seed: Of all random choices.
        engine: MILP solver.

    Raises:
        Infeasible: No cut into stages fits the devices' memory.
    """
    job = _Levels(graph, rules, cluster, tuple(candidates), deadline, gap, progress)
    return job.run(seed, engine)


@dataclass
class _Levels:
    graph: Graph
    rules: Rules
    cluster: Cluster
    layouts: tuple[Layout, ...]
    deadline: float
    gap: float
    progress: Callable[[str], None]
    found: list[Option] = field(default_factory=list)
    failed: dict[Layout, str] = field(default_factory=dict)
    sharded: list[Layout] = field(default_factory=list)
    cuts: list[tuple[Cut, tuple[Option, ...]]] = field(default_factory=list)
    best: tuple[Cut, tuple[Option, ...]] | None = None
    refusals: list[tuple[Infeasible, Layout]] = field(default_factory=list)
    in_time: bool = True

    def run(self, seed: int, engine: Engine) -> tuple[Staged, ...]:
        """Fold the model, shard it over layout after layout, cut stages."""
        self.folded = fold(self.graph, self.rules)
        self.sharder = Sharder(self.folded, self.cluster, seed, engine)
        self.kinds = kinds(self.cluster)
        self.pools = tuple(
            Pool(kind.count, float(self.cluster.devices[kind.first].memory_bytes))
            for kind in self.kinds
        )
        self.blocks = blocks(self.graph)
        self.bound_s = work_bound(self.sharder)
        self._pass()
        if self.best is None:
            raise self._refused()
        if len(self.kinds) == 1 and len(self.found) > 1 and not self._met():
            self._cut(self.found)
        ranked = sorted(self.cuts, key=lambda found: found[0].load_s)
        return tuple(
            Staged(
                self.folded,
                cut,
                self.blocks,
                options,
                self.bound_s,
                tuple(dict.fromkeys(self.sharded)),
                self.failed,
                self.in_time,
            )
            for cut, options in ranked[:RIVALS]
        )

    def _pass(self) -> None:
        """Shard over layout after layout."""
        took: dict[int, float] = {}  # seconds of the longest layout, by number of axes
        for layout in self._ranked():
            if self._met():
                return
            axes, begun = len(layout.mesh.axes), time.monotonic()
            more = MORE_AXES if axes <= JOINT_AXES else 1.0
            expected = took.get(axes, max(took.values(), default=0.0) * more)
            if begun + expected > self.deadline and (self.best is not None or axes > 1):
                self.failed[layout] = "not searched within the time limit"
                self.in_time = False
                continue
            self.progress(f"planning stages of {layout.mesh.size()} devices ({layout})")
            self._attempt(layout)
            took[axes] = max(took.get(axes, 0.0), time.monotonic() - begun)

    def _attempt(self, layout: Layout) -> None:
        """Try a layout; if memory rules it out and nothing else is known, mind memory."""
        try:
            self._try(layout, limited=False)
        except Infeasible as error:
            self.refusals.append((error, layout))
            if self.best is None:
                self._attempt_limited(layout)
            else:
                self.failed[layout] = str(error)

    def _attempt_limited(self, layout: Layout) -> None:
        try:
            self._try(layout, limited=True)
        except Infeasible as error:
            self.failed[layout] = str(error)
            self.refusals.append((error, layout))

    def _refused(self) -> Infeasible:
        """The refusal of the cut that is short of the fewest bytes a device.

        Those of the solver are of all stages together, not of a device.
        """
        near = [(e, layout) for e, layout in self.refusals if e.bytes_short and e.device is None]
        if not near:
            errors = [error for error, _ in self.refusals]
            return errors[0] if errors else Infeasible("no layout was searched", proven=False)
        error, layout = min(near, key=lambda refusal: refusal[0].bytes_short)
        first = self.kinds[layout.kind].first
        return Infeasible(str(error), device=first, bytes_short=error.bytes_short, proven=False)

    def _ranked(self) -> Iterator[Layout]:
        """Layouts of one axis, then those of two that add a second one to the best of these.

        Those about as large as the innermost level come first: their links are fast, and there
        are enough stages to choose from. Then those of three that split a mesh of the best cut.
        """
        near = math.log2(self.cluster.levels[0].size)
        simple = [layout for layout in self.layouts if len(layout.mesh.axes) < 2]
        yield from sorted(simple, key=lambda layout: abs(math.log2(layout.mesh.size()) - near))
        used = self.best[1] if self.best is not None else ()
        best = {option.layout.mesh.size() for option in used}
        rest = [layout for layout in self.layouts if len(layout.mesh.axes) == JOINT_AXES]
        yield from sorted(
            rest,
            key=lambda layout: (layout.mesh.axes[0][1] not in best, layout.mesh.axes[1][1]),
        )
        for layout in self.layouts:
            if len(layout.mesh.axes) > JOINT_AXES and self._splits_best(layout):
                yield layout

    def _splits_best(self, layout: Layout) -> bool:
        """Whether it splits a mesh of several axes of the best cut; any does if there is none."""
        used = self.best[1] if self.best is not None else ()
        origins = (split_from(layout.mesh, option.layout.mesh) for option in used)
        return not used or any(len(set(origin)) >= JOINT_AXES for origin in origins)

    def _met(self) -> bool:
        if self.best is None:
            return False
        load = self.best[0].load_s
        return load - self.bound_s <= self.gap * load

    def _try(self, layout: Layout, *, limited: bool) -> None:
        """Shard over one layout, and cut stages once every kind of device has one."""
        stages = self.kinds[layout.kind].count // layout.mesh.size()
        left = max(1.0, SHARE * (self.deadline - time.monotonic()))
        sharded = self._sharded(layout, stages, left, limited=limited)
        self.sharded.append(layout)
        alone = len(self.kinds) == 1
        if alone and self.best and sharded.solution.bound / stages >= self.best[0].load_s:
            return
        option = stage_option(sharded, self.blocks, stages, layout.kind, str(layout))
        self.found.append(Option(layout, sharded, option))
        if alone:
            self._cut(self.found[-1:])
        elif {option.layout.kind for option in self.found} == set(range(len(self.pools))):
            self._cut(self.found)

    def _sharded(
        self, layout: Layout, stages: int, time_limit_s: float, *, limited: bool
    ) -> Sharded:
        """The best sharding over all axes at once; over more than two, axis by axis."""
        if len(layout.mesh.axes) <= JOINT_AXES:
            return self.sharder.shard(
                layout.mesh, stages, limited=limited, time_limit_s=time_limit_s, gap=self.gap / 2
            )
        until, known = time.monotonic() + time_limit_s, self.best is not None
        groups = float(stages) if limited else math.inf
        sharder = AxisSharder(self.sharder, until, known, groups=groups)
        first, *_ = sharder.begin(layout.mesh, self.gap / 2)
        sharded = sharder.improve(first)
        return replace(sharded, solution=replace(sharded.solution, bound=0.0))

    def _cut(self, options: Sequence[Option]) -> None:
        stages = tuple(option.stage for option in options if option.stage is not None)
        cut = cut_stages(StageProblem(stages, self.pools, in_flight=False), gap=self.gap / 4)
        self.cuts.append((cut, tuple(options[stage.option] for stage in cut.stages)))
        self.best = min(self.cuts, key=lambda found: found[0].load_s)


def work_bound(sharder: Sharder) -> float:
    """No plan is below: all nodes' least device seconds, shared by all devices.

    A node on a mesh takes no fewer device seconds than on one device: launches are paid by
    each, and FLOPs and bytes are at best divided. Unlike devices count by their speed. Optional
    nodes may be left out.
    """
    graph, cluster, times = sharder.folded.graph, sharder.cluster, _times(sharder.folded)
    seconds, pools = [], kinds(cluster)
    for kind in pools:
        mesh = DeviceMesh.single(kind.first)
        even = EvenMesh(mesh, mesh, cluster)
        alone = (place(graph, n, mesh, {}, sharder.rule(n)) for n in graph.nodes)
        seconds.append(
            [
                0.0 if placed.node.name in graph.optional else even.node_seconds(graph, placed)
                for placed in alone
            ]
        )
    whole = [sum(t * s for t, s in zip(times, own, strict=True)) for own in seconds]
    if not all(whole):
        return 0.0
    speed = sum(kind.count / total for kind, total in zip(pools, whole, strict=True))
    weights = [1 / total / speed for total in whole]
    return sum(
        count * min(w * own[node] for w, own in zip(weights, seconds, strict=True))
        for node, count in enumerate(times)
    )


def _times(folded: Folded) -> list[int]:
    """How many nodes of the whole graph each node of the folded one stands for."""
    counted = [0] * len(folded.graph.nodes)
    for node in folded.places:
        counted[node] += 1
    return counted
