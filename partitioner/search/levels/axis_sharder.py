"""Sharding over a mesh of several axes, one axis at a time.

Strategies multiply over axes: a problem of all of them at once has hundreds of thousands of items.
So one axis is searched while the cuts over the others stay, in turn, until nothing gets better.
Each search has every strategy of one axis, and is warm: the plan so far is among its choices. The
first plan is of a known kind of parallelism on each axis: it is searched in the same way, among the
strategies that honour the kind's constraints. A mesh that splits an axis of another one starts with
the plan found there.
What leads from weights to the operators that read them (the stored value, its aliases and views)
and the updates are free on all axes at every step: a weight may be stored over one axis along the
very dim that another axis wants to cut.
What a graph offers to compute again is searched like an axis: a step of its own, in which all cuts
stay. The first plan computes everything again, since that takes the least memory; then as much is
kept as pays. A node that comes back is cut as the one that it is a copy of.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.columns import GroupColumns
from partitioner.cost_model.even_mesh import EvenMesh, EvenResharder, stand_in
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, LayoutError
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.offers import alternatives, everything, originals
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode, place
from partitioner.problem.build import Built, build
from partitioner.search.levels.mesh_sharder import Sharded, Sharder
from partitioner.search.levels.meshes import split_from
from partitioner.search.levels.one_column import minimised
from partitioner.search.levels.refusal import refused
from partitioner.solver import Infeasible, Solution, evaluate_choices
from partitioner.solver.problem import Problem
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.derive import strategies
from partitioner.strategies.parallel import axis_constraints, batch_inputs

Layouts = Mapping[str, DimLayout]  #: A cut over the axis of a line.
Pick = tuple[int, ...]  #: Index of the cut over each axis of a mesh.
Taken = tuple[Pick, int]  #: Cuts of a node, and which of its `ir.offers.alternatives`.

#: Kinds of parallelism of the first plan on the two innermost axes; the first that fits is taken.
#: A mesh of one axis has the first of the two, axes further out repeat it all: "dp".
KINDS = (("zero2", "tp"), ("zero3", "tp"))
#: Passes over the axes after the first plan.
PASSES = 2
#: Passes end when the cost falls by less than this share.
LEAST_GAIN = 0.005
#: Rounds of bound and search of one problem, without and with memory.
ROUNDS, LIMITED_ROUNDS = 6, 4
#: Rounds in a row that gain next to nothing, at most: of a first plan, and later.
FIRST_PATIENCE, PATIENCE = 1, 2
#: The least time that one search has, in seconds, while no plan is known; else a 15th of it.
LEAST_S = 30.0
#: The axis of the line that cuts are derived on.
LINE = "line"


@dataclass
class AxisSharder:
    """Shards one model over many meshes; cuts are derived once an axis length's stand-in."""

    sharder: Sharder
    deadline: float
    planned: bool = False  # whether a mesh has a plan
    yields: bool = False  # whether nothing is searched within memory: see `search_whole`
    groups: float = 1.0  # that share the model: the memory of so many devices counts as one's
    refusals: list[Infeasible] = field(default_factory=list)  # of first plans
    _cuts: dict[int, Mapping[str, tuple[Layouts, ...]]] = field(default_factory=dict)
    _composed: dict[tuple[DeviceMesh, str, Pick], PlacedNode | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.sharder.folded.graph
        self.weights = frozenset(weight_side(self.graph))
        self.batch = batch_inputs(self.graph, self.graph.inputs)
        self.originals = originals(self.graph)

    def begin(self, mesh: DeviceMesh, gap: float) -> tuple[Axes, ...]:
        """The first plan on a mesh of equal devices: of the first of the known kinds that fits.

        Where values may be computed again, there is one of each kind that fits, as long as memory
        forbids a cheaper plan: kinds that gather anew for each pass have room for more that is
        kept. If no kind suits the mesh, it is without a plan.

        Args:
            mesh: The devices.
            gap: Relative gap at which each search may stop.
        """
        jobs: list[Axes] = []
        unfit = self.unbegun(mesh, gap)
        for kinds in KINDS:
            job = self.unbegun(mesh, gap)
            try:
                self._follow(job, kinds, tight=kinds == KINDS[-1] and not jobs)
                job.offer()
                jobs.append(job)
                self.planned = True
            except ConstraintError:
                pass
            except Infeasible as error:
                self.refusals.append(error)
            unfit.free_s = min(unfit.free_s, job.free_s)
            if jobs and not (self.graph.optional and job.tight):
                break
        for job in jobs:
            job.free_s = unfit.free_s
        return tuple(jobs) or (unfit,)

    def _follow(self, job: Axes, kinds: Sequence[str], *, tight: bool) -> None:
        """Plan by kinds of parallelism, one for each axis; see `Axes.step`."""
        pins = Constraints()
        axes = job.even.mesh.axes
        words = (*("dp" for _ in axes[2:]), *kinds)
        for word, (axis, size) in zip(words, axes, strict=False):
            more = axis_constraints(word, self.graph, self.batch, axis, size)
            pins = Constraints((*pins.pins, *more.pins), busy={**pins.busy, **more.busy})
            job.step(axis, job.room(axis), pins, tight=tight)

    def unbegun(self, mesh: DeviceMesh, gap: float) -> Axes:
        """A mesh without a plan."""
        return Axes(self, EvenMesh(mesh, stand_in(mesh), self.sharder.cluster), gap)

    def refined(self, job: Axes, mesh: DeviceMesh) -> Axes | None:
        """A mesh that splits an axis of another one: the plan there, one step better.

        The step is that of the first axis that is a part of one.

        Args:
            job: The other mesh, with a plan.
            mesh: Its split; see `layouts.split_from`.

        Returns:
            None if some cut of the plan cannot be split: cuts in segments are not.

        Raises:
            Infeasible: No plan was found that fits.
        """
        fine = self.unbegun(mesh, job.gap)
        origins = split_from(mesh, job.even.mesh)
        for node in self.graph.nodes:
            pick, form = job.picks[node.name]
            cuts = tuple(
                self._same_cut(node.name, job.lengths[origin], pick[origin], length)
                for origin, length in zip(origins, fine.lengths, strict=True)
            )
            if not fine.places(node, cuts):
                return None
            fine.picks[node.name] = cuts, form
        part = next(a for a, o in zip(mesh.names, origins, strict=True) if origins.count(o) > 1)
        fine.step(part, fine.room(mesh.names[-1]))
        fine.offer()
        return fine

    def _same_cut(self, name: str, length: int, index: int, other: int) -> int:
        """Over a line of another length, the cut of the same factors; whole if there is none."""
        cuts = self.cuts(length)[name]
        wanted = set(cuts[index]) if cuts else set()
        found = (i for i, cut in enumerate(self.cuts(other)[name]) if set(cut) == wanted)
        return index if length == other else next(found, 0)

    def improve(self, job: Axes, best_s: float = math.inf) -> Sharded:
        """A good plan on the mesh, from its first plan on; each axis has one turn at least.

        Args:
            job: The mesh.
            best_s: Of the best plan of other meshes: one that is behind after a pass is left.

        Raises:
            Infeasible: No plan was found that fits the memory of a device.
        """
        names = job.even.mesh.names
        known = job.found is not None
        for axis in names if not known else ():
            job.step(axis, job.room(axis))
        if not known:
            job.offer()
        for done in range(self._passes(job, known=known)):
            due = known and done == 0
            if not due and time.monotonic() > self.deadline:
                break
            before = job.best.cost_s
            for axis in names:
                if due or time.monotonic() < self.deadline:
                    job.step(axis, job.room(names[-1]))
            job.offer()
            if job.best.cost_s > min(best_s, before * (1 - LEAST_GAIN)):
                break
        self.planned = True
        return job.best

    def _passes(self, job: Axes, *, known: bool) -> int:
        """Of one axis the second search is of the same problem, unless other values are kept."""
        again = bool(self.graph.optional) and job.tight
        return PASSES if len(job.even.mesh.axes) > 1 or again else int(known)

    def cuts(self, length: int) -> Mapping[str, tuple[Layouts, ...]]:
        """Cuts of every node over one axis of a stand-in, the empty one first."""
        if length not in self._cuts:
            line = DeviceMesh.of({LINE: length})
            found = strategies(self.graph, self.sharder.rules, line)
            self._cuts[length] = {
                name: tuple(placed.layouts for placed in own) for name, own in found.items()
            }
        return self._cuts[length]

    def copied(self, name: str, original: str, pick: Pick, lengths: Sequence[int]) -> Pick:
        """The cuts of another node, of which this one is a copy; whole where it has none such."""

        def same(length: int, index: int) -> int:
            wanted = self.cuts(length)[original][index : index + 1]
            own = self.cuts(length)[name]
            return own.index(wanted[0]) if wanted and wanted[0] in own else 0

        return tuple(map(same, lengths, pick))

    def composed(self, node: Node, model: DeviceMesh, pick: Pick) -> PlacedNode | None:
        """A node with these cuts over the axes of a stand-in; None if they do not go together."""
        key = model, node.name, pick
        if key not in self._composed:
            self._composed[key] = self._compose(node, model, pick)
        return self._composed[key]

    def _compose(self, node: Node, model: DeviceMesh, pick: Pick) -> PlacedNode | None:
        rule = self.sharder.rule(node)
        if rule is None:
            home = DeviceMesh.single(model.devices[0])
            return place(self.graph, node, home, {}, None)
        by_factor: dict[str, list[tuple[str, DimLayout]]] = {}
        for (axis, length), index in zip(model.axes, pick, strict=True):
            for name, layout in self.cuts(length)[node.name][index].items():
                by_factor.setdefault(name, []).append((axis, layout))
        layouts = {name: _joined(cuts, model) for name, cuts in by_factor.items()}
        known = {name: layout for name, layout in layouts.items() if layout is not None}
        if len(known) < len(layouts):
            return None
        try:
            return place(self.graph, node, model, known, rule)
        except LayoutError:
            return None


def weight_side(graph: Graph) -> Iterator[str]:
    """Nodes that lead from stored values to the operators that use them, and the updates."""
    found: set[str] = set()
    for node in graph.nodes:
        row = row_of(node)
        if row is None:
            continue
        led = row.view and row.in_place is None and node.reads and found.issuperset(node.reads)
        if row.stored or led:
            found.update(node.writes)
            yield node.name
        elif row.in_place is not None:
            yield node.name


@dataclass
class Axes:
    """The plan on one mesh so far.

    Attributes:
        owner: Of all meshes.
        even: The mesh.
        gap: Relative gap at which a search may stop.
        picks: What is done with each node.
        found: The plan; None if there is none yet.
        free_s: Least cost of the plans seen that do not fit the memory of a device.
    """

    owner: AxisSharder
    even: EvenMesh
    gap: float
    picks: dict[str, Taken] = field(default_factory=dict)
    found: Sharded | None = None
    free_s: float = math.inf
    _admitted: dict[tuple[str, Pick], PlacedNode | None] = field(default_factory=dict)
    #: By axis: bytes and plan when its search ended. The same problem would give the same plan.
    _searched: dict[str, tuple[float, dict[str, Taken]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.owner.graph
        model = self.even.model
        self.lengths = [size for _, size in model.axes]
        self.home = DeviceMesh.single(model.devices[0])
        whole = (0,) * len(self.lengths)
        self.picks = {node.name: (whole, everything(node)) for node in self.graph.nodes}
        resharder = EvenResharder(self.even.cluster, even=self.even)
        self.prices = GroupColumns(self.graph, resharder)

    @property
    def best(self) -> Sharded:
        """The plan so far."""
        assert self.found is not None
        return self.found

    @property
    def tight(self) -> bool:
        """Whether memory forbids a plan that costs less by more than the gap."""
        return self.free_s < (1 - self.gap) * (self.found.cost_s if self.found else math.inf)

    def room(self, axis: str) -> float:
        """Bytes that a device counts as having while the axes after this one have had no turn."""
        device = self.owner.sharder.cluster.devices[self.even.device]
        limit = device.memory_bytes * self.owner.groups
        after = self.even.mesh.names.index(axis) + 1
        return limit * math.prod(size for _, size in self.even.mesh.axes[after:])

    def step(
        self, axis: str, room: float, pins: Constraints | None = None, *, tight: bool = True
    ) -> None:
        """Choose the cuts over one axis anew, unless nothing has changed since that was last done.

        Args:
            axis: The axis.
            room: Bytes of a device.
            pins: What the plan has to honour.
            tight: Whether to search within the memory if the cheapest plan does not fit.

        Raises:
            Infeasible: No plan was found within so many bytes a device.
            ConstraintError: The pins leave a node without a strategy.
        """
        if pins is None and self._searched.get(axis) == (room, self.picks):
            return
        index = self.even.mesh.names.index(axis)
        options = {node.name: self._options(node, index, pins) for node in self.graph.nodes}
        self._choose(options, room, warm=pins is None, tight=tight)
        if pins is None:
            self._searched[axis] = room, self.picks

    def offer(self) -> None:
        """Choose anew what is computed again, if anything may be; all is cut as it is."""
        if not self.graph.optional:
            return
        options = {node.name: self._offered(node) for node in self.graph.nodes}
        self._choose(options, self.room(self.even.mesh.names[-1]), warm=True, tight=True)

    def _choose(
        self,
        options: Mapping[str, Mapping[Taken, PlacedNode]],
        room: float,
        *,
        warm: bool,
        tight: bool,
    ) -> None:
        candidates = {name: tuple(own.values()) for name, own in options.items()}
        groups = tuple(dict.fromkeys((self.even.model, self.home)))
        built = build(self.graph, groups, candidates, self.prices)
        solution, tied = self._solve(built, room, warm=warm, tight=tight)
        self.picks = {
            name: list(own)[pick]
            for (name, own), pick in zip(options.items(), solution.chosen, strict=True)
        }
        folded = self.owner.sharder.folded
        self.found = Sharded(folded, self.even, built, tied, solution)

    def _offered(self, node: Node) -> dict[Taken, PlacedNode]:
        """Alternatives of a node as it is cut, the one of the plan so far first."""
        now = self.picks[node.name]
        found = {now: self._taken(node, now)}
        original = self.owner.originals.get(node.name)
        pick = now[0]
        if found[now].absent and original is not None:
            pick = self.owner.copied(node.name, original, self.picks[original][0], self.lengths)
        placed = self._place(node, pick)
        others = alternatives(self.graph, node, (placed,)) if placed is not None else ()
        found.update({(pick, form): p for form, p in enumerate(others) if form != now[1]})
        return found

    def _taken(self, node: Node, taken: Taken) -> PlacedNode:
        """What the plan does with a node."""
        placed = self._place(node, taken[0])
        assert placed is not None
        return tuple(alternatives(self.graph, node, (placed,)))[taken[1]]

    def _options(self, node: Node, axis: int, pins: Constraints | None) -> dict[Taken, PlacedNode]:
        """Strategies of a node by their cuts, the one of the plan so far first.

        Raises:
            ConstraintError: No strategy honours the pins.
        """
        now, form = self.picks[node.name]
        if (planned := self._taken(node, (now, form))).absent:
            return {(now, form): planned}
        counts = [max(1, len(self.owner.cuts(size)[node.name])) for size in self.lengths]
        free = range(len(now)) if node.name in self.owner.weights else (axis,)
        ranges = [range(counts[a]) if a in free else (now[a],) for a in range(len(now))]
        found: dict[Pick, PlacedNode] = {}
        seen: set[object] = set()
        for pick in (now, *itertools.product(*ranges)):
            placed = self._place(node, pick)
            if placed is not None and (placed.ins, placed.outs) not in seen:
                seen.add((placed.ins, placed.outs))
                found[pick] = placed
        if pins is not None:
            kept = set(map(id, pins.keep(node, tuple(found.values()))))
            if not kept:
                raise ConstraintError(f"no strategy of {node.name!r} is of the kind")
            found = {pick: placed for pick, placed in found.items() if id(placed) in kept}
        return {(pick, form): self._taken(node, (pick, form)) for pick in found}

    def places(self, node: Node, pick: Pick) -> bool:
        """Whether a node can be cut so."""
        return self._place(node, pick) is not None

    def _place(self, node: Node, pick: Pick) -> PlacedNode | None:
        """A node with these cuts; None if they do not go together or are not even."""
        key = node.name, pick
        if key not in self._admitted:
            placed = self.owner.composed(node, self.even.model, pick)
            even = placed is not None and (placed.rule is None or self.even.admits(placed))
            self._admitted[key] = placed if even else None
        return self._admitted[key]

    def _solve(
        self, built: Built, room: float, *, warm: bool, tight: bool
    ) -> tuple[Solution, Problem]:
        """A plan of little cost; memory is minded only if the cheapest plan does not fit."""
        whole = self.owner.sharder.folded.tie(built)
        tied = whole.problem
        engine = self.owner.sharder.engine
        left = self._left_s()
        start = self._start(tied, room) if warm else None
        free = replace(tied, limit_bytes=(math.inf,))
        patience = PATIENCE if warm else FIRST_PATIENCE
        known = start.chosen if start is not None else None
        first = minimised(free, left, self.gap, ROUNDS, engine, patience, known)
        if first is None and not warm:
            raise ConstraintError("no plan of the kind was found")
        nearest = first.chosen if first is not None else (0,) * len(tied.nodes)
        if first is not None and evaluate_choices(tied, first.chosen).peak_bytes[0] > room:
            self.free_s = min(self.free_s, first.cost)
            within = tight and not self.owner.yields
            first = self._within(tied, room, patience, known) if within else None
        plans = [plan for plan in (start, first) if plan is not None]
        if not plans:
            raise refused(self.graph, self.even, whole, nearest, room)
        return min(plans, key=lambda plan: plan.cost), tied

    def _within(
        self, tied: Problem, room: float, patience: int, known: Sequence[int] | None
    ) -> Solution | None:
        """A plan that fits."""
        limited, engine = replace(tied, limit_bytes=(room,)), self.owner.sharder.engine
        left = self._left_s()
        return minimised(limited, left, self.gap, LIMITED_ROUNDS, engine, patience, known)

    def _left_s(self) -> float:
        """Seconds that a search may take: more than are left if no mesh has a plan yet."""
        least = LEAST_S / 15 if self.owner.planned else LEAST_S
        return max(least, self.owner.deadline - time.monotonic())

    def _start(self, tied: Problem, room: float) -> Solution | None:
        """The plan so far, or nothing cut, if it fits: it is the first choice of every node."""
        chosen = (0,) * len(tied.nodes)
        outcome = evaluate_choices(tied, chosen)
        if outcome.peak_bytes[0] > room:
            return None
        return Solution(chosen, outcome.load_s[0], 0.0, "feasible", None, "plan so far")


def _joined(cuts: Sequence[tuple[str, DimLayout]], model: DeviceMesh) -> DimLayout | None:
    """One factor's cuts over several axes as one; None unless they are plain."""
    axes = tuple(axis for axis, _ in cuts)
    if len(cuts) == 1:
        return DimLayout.cut(axes, cuts[0][1].segments)
    if any(len(layout.segments) > 1 for _, layout in cuts):
        return None
    return DimLayout.even(cuts[0][1].size, axes, model)
