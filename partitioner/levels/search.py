"""The search over stages and meshes of a large cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.even import EvenMesh
from partitioner.cost_model.prices import EvenPrices
from partitioner.cost_model.even import EvenResharder
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, PlacedNode, place
from partitioner.ir.rule import Cut
from partitioner.levels.layouts import Kind, kinds, meshes, sizes
from partitioner.levels.shard import Sharded, Sharder
from partitioner.levels.stage import Blocks, blocks, stage_option
from partitioner.repeats import Folded, fold
from partitioner.solver import Infeasible
from partitioner.solver.stages import Cut as StageCut
from partitioner.solver.stages import Pool, StageOption, StageProblem, cut_stages
from partitioner.strategies import Rules


@dataclass(frozen=True)
class Layout:
    """A way to run a stage: a mesh of so many devices of one kind."""

    kind: int
    mesh: DeviceMesh

    def __str__(self) -> str:
        shape = " ".join(f"{axis}={size}" for axis, size in self.mesh.axes)
        return shape or "one device"


@dataclass(frozen=True)
class Staged:
    """The best cut found, with what its options stand for.

    Attributes:
        folded: The model.
        cut: The stages, by options.
        blocks: The positions that the stages are of.
        options: Sharding of each option.
        layouts: Layout of each option.
        bound_s: No plan of stages over these kinds of devices has a lower largest load.
        tried: All layouts that were sharded, in order.
        failed: Layouts that were not, and why.
    """

    folded: Folded
    cut: StageCut
    blocks: Blocks
    options: tuple[Sharded, ...]
    layouts: tuple[Layout, ...]
    bound_s: float
    tried: tuple[Layout, ...]
    failed: Mapping[str, str]


def search_levels(
    graph: Graph,
    rules: Rules,
    cluster: Cluster,
    candidates: Sequence[Layout],
    *,
    deadline: float,
    gap: float,
    progress: Callable[[str], None],
) -> Staged:
    """The best plan of stages, each on one of the layouts.

    Layouts are sharded in order until the gap is met or time is up.

    Raises:
        Infeasible: No cut into stages fits the devices' memory.
    """
    return _Levels(graph, rules, cluster, tuple(candidates), deadline, gap, progress).run()


def layouts(cluster: Cluster, strategy: str, mesh: Mapping[str, int] | None) -> list[Layout]:
    """Layouts of a request, those with one axis first, larger stages first.

    Args:
        cluster: The devices.
        strategy: "auto", "intra" (one stage of all devices) or "inter" (stages of one device).
        mesh: The mesh of an intra plan; None for all.
    """
    found = []
    whole = kinds(cluster)
    for index, kind in enumerate(whole):
        for size in reversed(sizes(kind, cluster)):
            if strategy == "inter" and size > 1:
                continue
            if (strategy == "intra" or mesh) and (size < kind.count or len(whole) > 1):
                continue
            shapes = meshes(kind.first, size, cluster)
            if mesh is not None:
                shapes = iter([DeviceMesh.of(mesh)])
            found += [Layout(index, shape) for shape in shapes]
    return sorted(found, key=lambda layout: len(layout.mesh.axes) > 1)


@dataclass
class _Levels:
    graph: Graph
    rules: Rules
    cluster: Cluster
    layouts: tuple[Layout, ...]
    deadline: float
    gap: float
    progress: Callable[[str], None]
    found: list[tuple[Layout, Sharded, StageOption]] = field(default_factory=list)
    best: StageCut | None = None
    refusal: Infeasible | None = None

    def run(self) -> Staged:
        self.folded = fold(self.graph, self.rules)
        self.sharder = Sharder(self.folded, self.cluster)
        self.kinds = kinds(self.cluster)
        self.pools = tuple(
            Pool(kind.count, float(self.cluster.devices[kind.first].memory_bytes))
            for kind in self.kinds
        )
        self.blocks = blocks(self.graph)
        self.bound_s = self._work_bound()
        self.failed: dict[str, str] = {}
        self._pass(limited=False)
        if self.best is None:
            self._pass(limited=True)
        if self.best is None:
            raise self.refusal or Infeasible("no layout of stages was searched")
        if len(self.kinds) == 1 and len(self.found) > 1 and not self._met():
            self._cut([option for _, _, option in self.found])
        return Staged(
            self.folded,
            self.best,
            self.blocks,
            tuple(sharded for sharded, _ in self._used()),
            tuple(layout for _, layout in self._used()),
            min(self.bound_s, self.best.load_s),
            tuple(layout for layout in self.layouts if str(layout) not in self.failed),
            self.failed,
        )

    def _pass(self, *, limited: bool) -> None:
        """Shard over the layouts in order; `limited`: so that all stages together fit."""
        for layout in self._ranked():
            if self._met():
                return
            if self.found and time.monotonic() > self.deadline:
                self.failed[str(layout)] = "not searched within the time limit"
                continue
            self.progress(f"planning stages of {layout.mesh.size()} devices ({layout})")
            try:
                self._try(layout, limited=limited)
            except Infeasible as error:
                self.failed[str(layout)] = str(error)
                self.refusal = error

    def _ranked(self) -> Iterator[Layout]:
        """Layouts of one axis, then those of two that add a second one to the best of these."""
        yield from (layout for layout in self.layouts if len(layout.mesh.axes) < 2)
        best = {layout.mesh.size() for _, layout in self._used()}
        rest = [layout for layout in self.layouts if len(layout.mesh.axes) > 1]
        yield from sorted(rest, key=lambda layout: layout.mesh.axes[0][1] not in best)

    def _used(self) -> list[tuple[Sharded, Layout]]:
        """What the best cut uses."""
        stages = self.best.stages if self.best is not None else ()
        return [(self.used[s.option][1], self.used[s.option][0]) for s in stages]

    def _met(self) -> bool:
        return self.best is not None and (
            self.best.load_s - self.bound_s <= self.gap * self.best.load_s
        )

    def _try(self, layout: Layout, *, limited: bool) -> None:
        """Shard over one layout, and cut stages once every kind of device has one."""
        kind = self.kinds[layout.kind]
        stages = kind.count // layout.mesh.size()
        left = max(1.0, self.deadline - time.monotonic())
        sharded = self.sharder.shard(
            layout.mesh, stages, limited=limited, time_limit_s=left, gap=self.gap / 2
        )
        alone = len(self.kinds) == 1
        least = sharded.solution.bound / stages
        if alone and self.best is not None and least >= self.best.load_s:
            return
        option = stage_option(sharded, self.blocks, layout.kind, str(layout))
        self.found.append((layout, sharded, option))
        if alone:
            self._cut([option])
        elif {option.pool for _, _, option in self.found} == set(range(len(self.pools))):
            self._cut([option for _, _, option in self.found])

    def _cut(self, options: Sequence[StageOption]) -> None:
        problem = StageProblem(tuple(options), self.pools, in_flight=False)
        cut = cut_stages(problem, gap=self.gap / 4)
        if self.best is None or cut.load_s < self.best.load_s:
            index = {id(option): entry for entry in self.found for option in entry[2:]}
            self.best = cut
            self.used = [index[id(option)] for option in options]

    def _work_bound(self) -> float:
        """No plan is below: all nodes' least device seconds, shared by all devices.

        A node on a mesh takes no fewer device seconds than on one device: launches are paid by
        each, and FLOPs and bytes are at best divided. Unlike devices count by their speed.
        """
        graph, times = self.folded.graph, self._times()
        seconds = []
        for kind in self.kinds:
            mesh = DeviceMesh.single(kind.first)
            even = EvenMesh(mesh, mesh, self.cluster)
            prices = EvenPrices(graph, even, EvenResharder(self.cluster, even=even))
            alone = (place(graph, n, mesh, {}, self.sharder.rule(n)) for n in graph.nodes)
            seconds.append([sum(prices.node_seconds(placed).values()) for placed in alone])
        whole = [sum(t * s for t, s in zip(times, own, strict=True)) for own in seconds]
        if not all(whole):
            return 0.0
        speed = sum(kind.count / total for kind, total in zip(self.kinds, whole, strict=True))
        weights = [1 / total / speed for total in whole]
        return sum(
            times[node] * min(w * own[node] for w, own in zip(weights, seconds, strict=True))
            for node in range(len(graph.nodes))
        )

    def _times(self) -> list[int]:
        """How many nodes of the whole graph each node of the folded one stands for."""
        counted = [0] * len(self.folded.graph.nodes)
        for place_ in self.folded.places:
            counted[place_] += 1
        return counted


@dataclass(frozen=True)
class Group:
    """Devices of one stage, and the stand-in that its nodes' strategies are on."""

    mesh: DeviceMesh
    even: EvenMesh


def groups(staged: Staged, cluster: Cluster) -> tuple[DeviceMesh, ...]:
    """The devices of each stage, in the order of the stages.

    Larger stages take their devices first, so that all of them lie aligned in the cluster.
    """
    free = {index: kind.first for index, kind in enumerate(kinds(cluster))}
    order = sorted(
        range(len(staged.cut.stages)), key=lambda k: (-staged.layouts[k].mesh.size(), k)
    )
    found: dict[int, DeviceMesh] = {}
    for stage in order:
        layout = staged.layouts[stage]
        first, size = free[layout.kind], layout.mesh.size()
        found[stage] = DeviceMesh(layout.mesh.axes, tuple(range(first, first + size)))
        free[layout.kind] = first + size
    return tuple(found[stage] for stage in range(len(staged.cut.stages)))


def decisions(
    staged: Staged, meshes_of: Sequence[DeviceMesh]
) -> tuple[tuple[DeviceMesh, ...], dict[str, NodePlan]]:
    """Groups and decisions of a plan: opaque nodes are on the first device of their stage."""
    used: dict[DeviceMesh, int] = {}
    plans: dict[str, NodePlan] = {}
    cuts: dict[tuple[DimLayout, tuple[tuple[str, int], ...]], Cut] = {}
    graph, places = staged.folded.whole, staged.folded.places
    ends = staged.blocks.ends
    for index, stage in enumerate(staged.cut.stages):
        picks, mesh = staged.options[index].picks, meshes_of[index]
        first = ends[stage.start - 1] if stage.start else 0
        for position in range(first, ends[stage.stop - 1]):
            placed = picks[places[position]]
            group = mesh if placed.mesh.axes == mesh.axes or placed.mesh.axes else None
            target = mesh if placed.mesh.axes or not mesh.axes else None
            on = target or group or DeviceMesh.single(mesh.devices[0])
            own = {}
            for name, layout in placed.layouts.items():
                key = layout, mesh.axes
                if key not in cuts:
                    cuts[key] = _real(layout, mesh)
                own[name] = cuts[key]
            plans[graph.nodes[position].name] = NodePlan(used.setdefault(on, len(used)), own)
    return tuple(used), plans


def _real(layout: DimLayout, mesh: DeviceMesh) -> Cut:
    """A cut of the stand-in at the mesh's real size."""
    parts = mesh.size(layout.axes)
    rows = [(sum(cuts) // parts,) * parts for cuts in layout.segments]
    return Cut.of(DimLayout.cut(layout.axes, rows), mesh)


__all__ = [
    "Group",
    "Kind",
    "Layout",
    "PlacedNode",
    "Staged",
    "decisions",
    "groups",
    "layouts",
    "math",
    "search_levels",
]
