"""The search over stages and meshes of a large cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, EvenResharder
from partitioner.cost_model.prices.reshard import Hop, beside_compute
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.pieces.repeats import crossing
from partitioner.ir.plan import NodePlan
from partitioner.ir.rule import Cut as DimCut
from partitioner.problem.folding import Folded
from partitioner.search.levels.axis_sharder import AxisSharder
from partitioner.search.levels.mesh_sharder import Sharded, Sharder
from partitioner.search.levels.meshes import DevicePool, Layout, device_pools, split_from
from partitioner.search.request import Budget
from partitioner.solver.outcome import Infeasible
from partitioner.solver.placement.contiguous import Charges, Floats, Ints, Rectangle, summed
from partitioner.solver.stages.cut import cut_stages, find_cut
from partitioner.solver.stages.model import Cut, Pool, StageOption, StageProblem
from partitioner.solver.work import Work
from partitioner.strategies.constraints import ConstraintError

_Hops = dict[Placement, tuple[Hop, set[int]]]  #: By the placement after it: a hop, its readers.

#: Blocks that the order is cut into at most: stages begin and end between them.
MAX_BLOCKS = 480


def block_ends(graph: Graph) -> tuple[int, ...]:
    """The ends, exclusive, of blocks that stay whole: where the fewest bytes cross a window."""
    count = len(graph.nodes)
    crossing_bytes = crossing(graph, lambda value: graph.types[value].nbytes)
    windows = min(count, MAX_BLOCKS)
    edges = [round(index * count / windows) for index in range(windows + 1)]
    ends = {count}
    for first, last in pairwise(edges[1:]):
        ends.add(first + int(np.argmin(crossing_bytes[first:last])))
    return tuple(sorted(ends))


def stage_options(sharded: Sharded, ends: Sequence[int], stages: int, pool: int) -> StageOption:
    """All stretches of blocks as stages on the mesh, of which there may be so many at most.

    Beside its weights a stage holds what the model holds on the mesh at any one time. A value that
    leaves for readers far apart is charged for as many stages as they would be in if all stages had
    equal loads; one that is needed both inside and outside its stage may be charged for both. The
    referee counts the cuts of least load anew, with what stages send and receive.
    """
    sums, count = _stretch_sums(sharded, ends, stages), len(ends)
    between = np.zeros(
        (2, count + 1, count + 1)
    )  # of positions, where sums are of inclusive blocks
    between[:, :count, 1:] = np.maximum(sums, 0.0)  # sums and differences may leave -1e-20
    load, resident = between
    passing = np.zeros_like(load) + sharded.passing_bytes
    size = sharded.even.mesh.size()
    return StageOption(size, load[None], resident[None], passing[None], pool=pool)


def _stretch_sums(sharded: Sharded, ends: Sequence[int], stages: int) -> Floats:
    """Sum over a device that runs blocks i to j, (2, blocks, blocks): seconds, bytes of weights.

    Charges are in positions of nodes; those of one middle block are repeated for all of them.
    """
    folded = sharded.folded
    stretches, count = _Stretches.of(sharded, stages), len(folded.whole.nodes)
    run = folded.runs[0] if len(folded.runs) == 1 else None
    copies = range(run.block(2).start, run.block(run.count - 2).start) if run else range(0)
    sample = frozenset(run.block(1)) if run else frozenset()
    once = (i for i in range(count) if i not in copies and i not in sample)
    rectangles, parts = stretches.charges(once).arrays()
    if run:
        block, paid = stretches.charges(sample).arrays()
        shifts = np.array([index * run.period for index in range(run.count - 3)])
        stay = (block[:, 1:] == 0) | (block[:, 1:] == count)  # the ends of the order
        repeated = np.repeat(block[None], len(shifts), axis=0)
        repeated[:, :, 1:] += np.where(stay, 0, 1)[None] * shifts[:, None, None]
        rectangles = np.concatenate([rectangles, repeated.reshape(-1, 5)])
        parts = np.concatenate([parts, np.tile(paid, (len(shifts), 1))])
    last = np.array(ends) - 1
    first = np.concatenate([[0], last[:-1] + 1])
    in_blocks = rectangles.copy()
    in_blocks[:, 1:3] = np.searchsorted(first, rectangles[:, 1:3])
    in_blocks[:, 3:5] = np.searchsorted(last, rectangles[:, 3:5])
    return summed(in_blocks, parts, len(ends))


@dataclass(frozen=True)
class _Stretches:
    """Charges of the model on one mesh to the stretches that they are paid in."""

    sharded: Sharded  #: The model on the mesh.
    resharder: EvenResharder  #: Prices reshards within a stage, and to and from another stage.
    other: EvenMesh  #: The other stage: the farthest group of the same shape.
    stage: Ints  #: The stage of each node, if all stages had equal loads.
    #: Of values that were asked for; see `_readers`.
    _known_readers: dict[str, Mapping[Placement, list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, sharded: Sharded, stages: int) -> _Stretches:
        even = sharded.even
        # The other stage is over the outermost level, if the group is not alone: some stages have
        # their neighbours in another node, and the busiest stage counts.
        size, first = even.mesh.size(), even.device
        last = len(even.cluster) - size - first
        shift = last if last >= size else -min(first, first // size * size)
        mesh = replace(even.mesh, devices=tuple(device + shift for device in even.mesh.devices))
        other = away(replace(even, mesh=mesh), beyond=even.model)
        resharder = EvenResharder(even.cluster, even=even, other=other)
        loads = np.array([sharded.loads_s[place] for place in sharded.folded.places])
        share = (np.cumsum(loads) - loads / 2) / max(float(loads.sum()), 1e-300)
        return cls(sharded, resharder, other, (share * stages).astype(np.intp))

    @property
    def graph(self) -> Graph:
        return self.sharded.folded.whole

    @cached_property
    def beside(self) -> frozenset[str]:
        return beside_compute(self.graph)

    def charges(self, positions: Iterable[int]) -> Charges:
        """Charges of nodes, the values that they make, and weights that they are first to read."""
        charges = Charges(len(self.graph.nodes), 2)
        for position in positions:
            node, place = self.graph.nodes[position], self.sharded.folded.places[position]
            placed = self.sharded.picks[place]
            charges.add((self.sharded.loads_s[place], 0.0), charges.some_in([position]))
            for value, at in dict(_named((*node.inputs, *node.captures), placed.ins)).items():
                # a weight is resident, and so is an input as a sum with zeros
                stays = value in self.graph.constants or bool(at.sharding.partial)
                if value in self.graph.producers or not stays:
                    continue
                readers = self._readers(value)[at]
                if position == readers[0]:
                    resident = self._bytes(at, self.graph.types[value].dtype)
                    charges.add((0.0, resident), charges.some_in(readers))
            for value, home in _named(node.outputs, placed.outs):
                for part, where in self._communications(charges, value, home, position):
                    charges.add(part, where)
        return charges

    def _readers(self, value: str) -> Mapping[Placement, list[int]]:
        """Positions of the readers of a value, by the placement that they read it in."""
        if value in self._known_readers:
            return self._known_readers[value]
        picks, places = self.sharded.picks, self.sharded.folded.places
        readers: dict[Placement, list[int]] = {}
        for node in self.graph.consumers[value]:
            position = self.graph.order[node.name]
            named = _named((*node.inputs, *node.captures), picks[places[position]].ins)
            for at in (at for name, at in named if name == value):
                readers.setdefault(at, []).append(position)
        self._known_readers[value] = readers
        return readers

    def _communications(
        self, charges: Charges, value: str, home: Placement, position: int
    ) -> Iterator[tuple[tuple[float, float], Iterable[Rectangle]]]:
        """The charge of each hop of a value, and the stretches in which a device pays for it."""
        dtype, beside = self.graph.types[value].dtype, value in self.beside
        device = self.sharded.even.device
        readers = self._readers(value)
        inside: _Hops = {}
        leaving: _Hops = {}
        arriving: _Hops = {}
        if value in self.graph.outputs and home.sharding.partial and readers:
            # without readers it is in the node's own load
            _note(inside, self.resharder.hops(dtype, home, home.without_partial()), [position])
        for want, positions in readers.items():
            _note(inside, self.resharder.hops(dtype, home, want), positions)
            across = self.resharder.hops(dtype, home, moved(want, self.other))
            _note(leaving, across, positions)
            _note(arriving, across, positions)
        for after, (hop, near) in inside.items():
            both = leaving.pop(after, None)
            where = charges.some_in([position]) if both else charges.both_in(position, near)
            zeros = self._bytes(after, dtype) if hop.zeros else 0.0
            yield (_paid_s(hop, device, beside=beside), zeros), where
        for hop, far in leaving.values():
            stages = {int(self.stage[reader]) for reader in far} - {int(self.stage[position])}
            there = hop.after.mesh.devices[0] in self.other.model.devices
            times = max(1, len(stages)) if there else 1
            seconds = times * _paid_s(hop, device, beside=beside)
            yield (seconds, 0.0), charges.leaf_out(position, far)
        for hop, far in arriving.values():
            seconds = _paid_s(hop, self.other.device, beside=beside)
            yield (seconds, 0.0), charges.leaf_in(position, far)

    def _bytes(self, at: Placement, dtype: str) -> float:
        return float(self.sharded.even.local_bytes(at, dtype))


def away(even: EvenMesh, beyond: DeviceMesh) -> EvenMesh:
    """The same group on a stand-in of devices beyond those of another stand-in."""
    shift = max(beyond.devices) + 1
    model = replace(even.model, devices=tuple(d + shift for d in even.model.devices))
    return replace(even, model=model)


def moved(at: Placement, other: EvenMesh) -> Placement:
    """The same placement on another group; of a single device, on the group's first."""
    mesh = other.model if at.mesh.axes else DeviceMesh.single(other.model.devices[0])
    return Placement(mesh, at.sharding)


def _paid_s(hop: Hop, device: int, *, beside: bool) -> float:
    """Seconds that a hop takes of a device, `beside` compute or before it."""
    comms = (priced for priced in hop.comms if device in priced.seconds)
    return sum(priced.busy_seconds(beside=beside)[device] for priced in comms)


def _named(
    values: Iterable[str], places: Iterable[Placement | None]
) -> Iterator[tuple[str, Placement]]:
    return ((v, at) for v, at in zip(values, places, strict=True) if at is not None)


def _note(readers: _Hops, hops: Iterable[Hop], positions: Sequence[int]) -> None:
    for hop in hops:
        readers.setdefault(hop.after, (hop, set()))[1].update(positions)


#: Meshes of more axes are sharded one axis at a time.
JOINT_AXES = 2
#: Assumed ratio of the steps of a layout and one with an axis less, before one is measured.
MORE_AXES = 12.0
#: Cuts of least estimated load that are counted anew, of those that fit by an estimate of memory,
#: and of those that fit by an upper one.
RIVALS = 3
#: The solver may take one such part of the steps left for one layout.
PART = 5


@dataclass(frozen=True)
class Option:
    """A mesh with the model sharded over it."""

    layout: Layout
    sharded: Sharded
    #: The costs of stretches of blocks on it; None if it runs the whole model.
    stage: StageOption | None = None


@dataclass(frozen=True)
class Staged:
    """A cut of the model into stages."""

    folded: Folded
    cut: Cut  #: The stages: stretches of blocks.
    block_ends: tuple[int, ...]  #: Positions at which blocks end, exclusive.
    options: tuple[Option, ...]  #: The layout of each stage.
    #: What the search takes its cost for, of a request: the referee may count a little more.
    seconds: float
    bound_s: float  #: No plan of stages on these devices has a lower largest load.
    searched: tuple[Layout, ...]  #: Layouts that the model was sharded over.
    failed: dict[Layout, str]  #: The others, and why not.
    tight: bool = False  #: Whether memory forbids a plan that costs less by more than the gap.
    usual: Staged | None = None  #: Data parallelism, to compare with; None if that was not planned.

    @property
    def counted_bytes(self) -> tuple[float, ...]:
        """Bytes of a device of each stage, as the search counts them at least."""
        return tuple(
            option.sharded.peak_bytes
            if option.stage is None
            else option.stage.held_bytes(stage.way, stage.start, stage.stop)
            for option, stage in zip(self.options, self.cut.stages, strict=True)
        )

    def groups(self, cluster: Cluster) -> tuple[DeviceMesh, ...]:
        """The devices of each stage; larger ones take theirs first, so that all lie aligned."""
        free = {index: pool.first for index, pool in enumerate(device_pools(cluster))}
        layouts = [option.layout for option in self.options]
        meshes: dict[int, DeviceMesh] = {}
        for stage in sorted(range(len(layouts)), key=lambda k: (-layouts[k].mesh.size(), k)):
            layout = layouts[stage]
            first, size = free[layout.pool], layout.mesh.size()
            meshes[stage] = DeviceMesh(layout.mesh.axes, tuple(range(first, first + size)))
            free[layout.pool] = first + size
        return tuple(meshes[stage] for stage in range(len(layouts)))

    def decisions(
        self, meshes: Sequence[DeviceMesh]
    ) -> tuple[tuple[DeviceMesh, ...], dict[str, NodePlan]]:
        """Groups and decisions on meshes of stages; whole operators are on the first device."""
        indices: dict[DeviceMesh, int] = {}
        plans: dict[str, NodePlan] = {}
        ends, graph, places = (0, *self.block_ends), self.folded.whole, self.folded.places
        for option, mesh, stage in zip(self.options, meshes, self.cut.stages, strict=True):
            home = DeviceMesh.single(mesh.devices[0])
            for position in range(ends[stage.start], ends[stage.stop]):
                placed = option.sharded.picks[places[position]]
                if placed.absent:
                    continue
                group = mesh if placed.mesh.axes or not mesh.axes else home
                cuts = {name: _real(layout, mesh) for name, layout in placed.layouts.items()}
                index = indices.setdefault(group, len(indices))
                plans[graph.nodes[position].name] = NodePlan(index, cuts)
        return tuple(indices), plans


@lru_cache(maxsize=65536)
def _real(layout: DimLayout, mesh: DeviceMesh) -> DimCut:
    """A cut of a stand-in at the mesh's real size."""
    parts = mesh.size(layout.axes)
    rows = [(sum(cuts) // parts,) * parts for cuts in layout.segments]
    return DimCut.of(DimLayout.cut(layout.axes, rows), mesh)


@dataclass
class StageSearch:
    """The search of plans of stages, each on one of the layouts."""

    sharder: Sharder
    layouts: Sequence[Layout]  #: Layouts to choose from, the most promising first.
    #: Its gap is between load and bound; no layout is begun once its work is done.
    budget: Budget
    #: Whether the seconds of all stages count, as of one request, and not those of the busiest.
    waits: bool = False
    options: list[Option] = field(default_factory=list)
    failed: dict[Layout, str] = field(default_factory=dict)
    sharded: list[Layout] = field(default_factory=list)
    #: Cuts into stages, each with the options of its stages.
    cuts: list[tuple[Cut, tuple[Option, ...]]] = field(default_factory=list)
    #: Layouts on which nothing fits, and why.
    refusals: list[tuple[Infeasible, Layout]] = field(default_factory=list)
    #: Why layouts have no plan that honours the constraints.
    impossible: list[ConstraintError] = field(default_factory=list)

    @cached_property
    def pools(self) -> tuple[DevicePool, ...]:
        """The runs of equal devices."""
        return device_pools(self.sharder.cluster)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Positions at which blocks end."""
        return block_ends(self.sharder.folded.whole)

    @property
    def best(self) -> tuple[Cut, tuple[Option, ...]] | None:
        """The cut of least seconds; None if there is none yet."""
        return min(self.cuts, key=self._seconds, default=None)

    def _seconds(self, entry: tuple[Cut, tuple[Option, ...]]) -> float:
        """Estimated seconds of a cut, by which cuts are compared."""
        cut, options = entry
        if not self.waits:
            return cut.load_s
        stages = zip(cut.stages, (option.stage for option in options), strict=True)
        return sum(float(on.load_s[s.way, s.start, s.stop]) for s, on in stages if on is not None)

    def run(self) -> tuple[Staged, ...]:
        """The best plans by estimated load: layouts are sharded until the gap is met.

        Raises:
            Infeasible: No cut into stages fits the devices' memory.
            ConstraintError: The constraints leave no layout a plan.
        """
        self._shard_all()
        if self.best is None and self.impossible and not self.refusals:
            raise self.impossible[-1]
        near = [(e, layout) for e, layout in self.refusals if e.bytes_short and e.device is None]
        if self.best is None and near:  # bytes of the solver are of all stages, not of a device
            error, layout = min(near, key=lambda refusal: refusal[0].bytes_short)
            first, short = self.pools[layout.pool].first, error.bytes_short
            raise Infeasible(str(error), device=first, bytes_short=short, proven=False)
        if self.best is None:
            errors = [error for error, _ in self.refusals]
            raise errors[0] if errors else Infeasible("no layout was searched", proven=False)
        if len(self.pools) == 1 and len(self.options) > 1 and not self._met():
            self._cut(self.options)
        return tuple(
            Staged(
                self.sharder.folded,
                cut,
                self.ends,
                options,
                self._seconds((cut, options)),
                self.sharder.bound_s,
                tuple(dict.fromkeys(self.sharded)),
                self.failed,
            )
            for cut, options in sorted(self.cuts, key=self._seconds)[:RIVALS]
        )

    def _shard_all(self) -> None:
        work = self.budget.work
        took: dict[int, float] = {}  # steps of the longest layout, by number of axes
        for layout in self._ranked():
            if self._met():
                return
            axes, before = len(layout.mesh.axes), work.spent
            more = MORE_AXES if axes <= JOINT_AXES else 1.0
            expected = took.get(axes, max(took.values(), default=0.0) * more)
            if (expected > work.left or work.late) and (self.best is not None or axes > 1):
                self.failed[layout] = unsearched(work)
                continue
            self.budget.say(f"planning stages of {layout.mesh.size()} devices ({layout})")
            self._try(layout)
            took[axes] = max(took.get(axes, 0.0), work.spent - before)

    def _ranked(self) -> Iterator[Layout]:
        """Layouts of one axis, then those of two that add a second one to the best of these.

        Those about as large as the innermost level come first: their links are fast, and there
        are enough stages to choose from. Then those of three that split a mesh of the best cut.
        """
        near = math.log2(self.sharder.cluster.levels[0].size)
        simple = [layout for layout in self.layouts if len(layout.mesh.axes) < 2]
        yield from sorted(simple, key=lambda layout: abs(math.log2(layout.mesh.size()) - near))
        sizes = {mesh.size() for mesh in self._best_meshes()}
        joint = [layout for layout in self.layouts if len(layout.mesh.axes) == JOINT_AXES]
        yield from sorted(
            joint, key=lambda layout: (layout.mesh.axes[0][1] not in sizes, layout.mesh.axes[1][1])
        )
        for layout in self.layouts:
            # it splits a mesh of several axes of the best cut, if there is a cut
            meshes = self._best_meshes()
            origins = (split_from(layout.mesh, mesh) for mesh in meshes)
            splits = not meshes or any(len(set(origin)) >= JOINT_AXES for origin in origins)
            if len(layout.mesh.axes) > JOINT_AXES and splits:
                yield layout

    def _best_meshes(self) -> tuple[DeviceMesh, ...]:
        return tuple(option.layout.mesh for option in self.best[1]) if self.best else ()

    def _met(self) -> bool:
        """Tell whether the best cut is within the gap."""
        load = self._least_s
        return load < math.inf and load - self.sharder.bound_s <= self.budget.gap * load

    @property
    def _least_s(self) -> float:
        """The least seconds of cuts; infinite if there are none."""
        return min(map(self._seconds, self.cuts), default=math.inf)

    def _try(self, layout: Layout) -> None:
        """Plan with a layout: first without regard to memory, then within it.

        The second plan is searched if the first exceeds the memory of all stages, and if plans on
        the layout may cost less than the best cut.
        """
        stages = self.pools[layout.pool].count // layout.mesh.size()
        room = self._pools[layout.pool].limit_bytes * stages
        sharded: Sharded | None = None
        errors: list[Infeasible] = []
        for limited in (False, True):
            work = self.budget.work.share(PART)
            try:
                sharded = self._sharded(layout, stages, work, limited=limited)
                self.sharded.append(layout)
                if not self._is_beaten(sharded, stages):
                    of_stage = stage_options(sharded, self.ends, stages, layout.pool)
                    self.options.append(Option(layout, sharded, of_stage))
                    if len(self.pools) == 1:
                        self._cut(self.options[-1:])
                    elif len({option.layout.pool for option in self.options}) == len(self.pools):
                        self._cut(self.options)
            except ConstraintError as error:
                self.impossible.append(error)
                self.failed[layout] = str(error)
                return
            except Infeasible as error:
                errors.append(error)
            if sharded is None or sharded.peak_bytes <= room or self._is_beaten(sharded, stages):
                break
        self.refusals += ((error, layout) for error in errors)
        if len(errors) == 1 + limited:
            self.failed[layout] = str(errors[-1])

    def _is_beaten(self, sharded: Sharded, stages: int) -> bool:
        """Tell whether no plan with a sharding costs less than a known cut."""
        alone, parts = len(self.pools) == 1, 1 if self.waits else stages
        return alone and sharded.solution.bound / parts >= self._least_s

    def _sharded(self, layout: Layout, stages: int, work: Work, *, limited: bool) -> Sharded:
        """The best sharding over all axes at once; over more than two, axis by axis."""
        gap = self.budget.gap / 2
        if len(layout.mesh.axes) <= JOINT_AXES:
            return self.sharder.shard(layout.mesh, stages, work, limited=limited, gap=gap)
        groups = float(stages) if limited else math.inf
        sharder = AxisSharder(self.sharder, work, groups=groups)
        first, *_ = sharder.begin(layout.mesh, gap)
        sharded = sharder.improve(first)
        return replace(sharded, solution=replace(sharded.solution, bound=0.0))

    def _cut(self, options: Sequence[Option]) -> None:
        stages = tuple(option.stage for option in options if option.stage is not None)
        problem = StageProblem(stages, self._pools, in_flight=False)
        cut = self._of_fewest(problem) if self.waits else None
        cut = cut or cut_stages(problem, gap=self.budget.gap / 4)
        self.cuts.append((cut, tuple(options[stage.option] for stage in cut.stages)))

    def _of_fewest(self, problem: StageProblem) -> Cut | None:
        """A cut into about the fewest stages that fit; None if only all that there may be do."""
        most, count = sum(pool.devices for pool in problem.pools), 1
        while count < most:
            cut = find_cut(replace(problem, most_degrees=count), gap=self.budget.gap / 4)
            if cut is not None:
                return cut
            count *= 2
        return None

    @cached_property
    def _pools(self) -> tuple[Pool, ...]:
        devices = self.sharder.cluster.devices
        return tuple(Pool(p.count, float(devices[p.first].memory_bytes)) for p in self.pools)


def unsearched(work: Work) -> str:
    """Why a layout was not searched."""
    if work.late:
        return "not searched within the time limit"
    return "not searched: the steps of the search were done; a longer time limit has more"
