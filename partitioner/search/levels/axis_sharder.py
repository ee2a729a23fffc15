"""Sharding over a mesh of several axes, one axis at a time.

Strategies multiply over axes: a problem of all of them at once has hundreds of thousands of items.
So one axis is searched while the cuts over the others stay, in turn, until no axis gains anything.
Each search has every strategy of one axis, and the plan so far among its choices. The first plan is
of a known kind of parallelism on each axis: of the strategies that honour the kind's constraints. A
mesh that splits an axis of another one starts with the plan of that mesh.
The nodes that lead from weights to the operators that read them (the stored value, its aliases and
views) and the updates are free on all axes at every step: a weight may be stored over one axis
along the very dim that another axis is to cut.
Offers to compute values again are searched like an axis, while all cuts stay. The first plan
computes everything again, since that takes the least memory; then as much is kept as pays. A node
that comes back is cut as the one that it is a copy of.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.cost_model.equal_devices.columns import GroupColumns
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, EvenResharder, stand_in
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, LayoutError
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.offers import alternatives, everything, originals
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode, place
from partitioner.problem.build import Built, build
from partitioner.search.levels.mesh_sharder import Sharded, Sharder, minimised, refused
from partitioner.search.levels.meshes import split_from
from partitioner.search.outcome import OutOfTime
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.derive import strategies
from partitioner.strategies.kinds.kind import Asked
from partitioner.strategies.kinds.parallel import KINDS as PARALLEL

Layouts = Mapping[str, DimLayout]  #: A cut over the axis of a line.
Pick = tuple[int, ...]  #: Index of the cut over each axis of a mesh.
Taken = tuple[Pick, int]  #: Cuts of a node, and which of its `ir.nodes.offers.alternatives`.

#: Kinds of parallelism of the first plan on the two innermost axes; the first that fits is taken.
#: A mesh of one axis has the first of the two, axes further out repeat it all: "dp".
KINDS = (("zero2", "tp"), ("zero3", "tp"))
#: Those that come first where a step has micro-batches: each of them would gather anew what is
#: stored in parts, and stages share what is stored already.
WHOLE = ("dp", "tp")
#: Kinds that are planned as they are, too, by the number of a mesh's axes.
USUAL = ("dp",)  #: What one does without a planner.
AS_THEY_ARE = {1: (USUAL, ("zero2",), ("zero3",), ("tp",)), 2: (WHOLE, KINDS[1])}
#: Passes over the axes after the first plan.
PASSES = 2
#: Passes end when the cost falls by less than this share.
LEAST_GAIN = 0.005
#: Rounds of bound and search of one problem, without and with memory.
ROUNDS, LIMITED_ROUNDS = 6, 4
#: Rounds in a row that gain next to nothing, at most: of a first plan, and later.
FIRST_PATIENCE, PATIENCE = 1, 2
#: Seconds that a search may take behind the time limit, as long as no mesh has a plan.
FIRST_S = 10.0
#: Steps of building a problem and searching it, for each item.
ITEM_STEPS = 100
#: The axis of the line that cuts are derived on.
LINE = "line"


@dataclass
class AxisSharder:
    """Shards one model over many meshes; cuts are derived once an axis length's stand-in."""

    sharder: Sharder
    work: Work  #: Pays for the searches; the clock that stops it ends them.
    defers_memory: bool = False  #: As of `Budget`: no plan is searched within memory.
    #: Groups that share the model: the memory of so many devices counts as one's.
    groups: float = 1.0
    refusals: list[Infeasible] = field(default_factory=list)  #: Why meshes have no first plan.
    #: Why no plan of a known kind, or of the constraints, is on a mesh.
    impossible: list[ConstraintError] = field(default_factory=list)
    #: Whether the plan of some mesh stands. Until then the clock stops no search of `FIRST_S`
    #: seconds.
    has_plan: bool = False
    _cuts: dict[int, Mapping[str, tuple[Layouts, ...]]] = field(default_factory=dict)
    _composed: dict[tuple[DeviceMesh, str, Pick], PlacedNode | None] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The folded graph."""
        return self.sharder.folded.graph

    @cached_property
    def weights(self) -> frozenset[str]:
        """See `weight_side`."""
        return frozenset(weight_side(self.graph))

    @cached_property
    def originals(self) -> Mapping[str, str]:
        """By the name of an offered node, the node that it is a copy of."""
        return originals(self.graph)

    def begin(self, mesh: DeviceMesh, gap: float) -> tuple[MeshPlan, ...]:
        """The first plan on a mesh of equal devices: of the first of the known kinds that fits.

        Where values may be computed again, there is one of each kind that fits, as long as memory
        forbids a cheaper plan: kinds that gather anew for each pass have room for more that is
        kept. In micro-batches they gather too often for that. If no kind suits the mesh, the one
        that is returned is empty.
        """
        plans: list[MeshPlan] = []
        free_s = math.inf
        in_parts = self.sharder.micro_batches > 1
        tried = self._kinds
        for kinds in tried:
            plan = self.unplanned(mesh, gap)
            try:
                self._follow(plan, kinds, tight=kinds == tried[-1] and not plans)
                plan.stand()
                plan.offer()
                plans.append(plan)
            except ConstraintError as error:
                self.impossible.append(error)
            except Infeasible as error:
                self.refusals.append(error)
            free_s = min(free_s, plan.free_s)
            if plans and (in_parts or self.work.late or not (self.graph.optional and plan.tight)):
                break
        plans = plans or [self.unplanned(mesh, gap)]
        for plan in plans:
            plan.free_s = free_s
        return tuple(plans)

    def as_it_is(self, mesh: DeviceMesh, kinds: Sequence[str], gap: float) -> Sharded | None:
        """The plan of kinds of parallelism, one for each axis; None if none is found that fits."""
        plan = self.unplanned(mesh, gap)
        with suppress(ConstraintError, Infeasible):
            self._follow(plan, kinds, tight=True)
            plan.stand()
            plan.offer()
            return plan.best
        return None

    @property
    def _kinds(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of parallelism of first plans, in turn; () for none but what is demanded."""
        usual = (WHOLE, *KINDS) if self.sharder.micro_batches > 1 else KINDS
        asked = self.sharder.constraints
        if asked.busy or asked.along:  # they say what each axis is for
            return ((),)
        return (*usual, ()) if asked.bound else usual

    def _follow(self, plan: MeshPlan, kinds: Sequence[str], *, tight: bool) -> None:
        """Plan by kinds of parallelism, one for each axis; see `MeshPlan.step`."""
        pins = Constraints()
        axes, words = plan.even.mesh.axes, (*("dp" for _ in plan.even.mesh.axes[2:]), *kinds)
        if not kinds:
            for axis in plan.even.mesh.names:
                plan.step(axis, plan.room(axis), pins, tight=tight)
            return
        for word, (axis, size) in zip(words, axes, strict=False):
            kind, asked = PARALLEL[word], Asked(self.graph, {axis: size}, alone=False)
            assert kind.constraints is not None
            if kind.cuts_batch and asked.batch.size(self.graph) % size:
                raise ConstraintError(f"parallel {word}: {size} devices have unequal parts")
            pins = pins.joined(kind.constraints(asked))
            plan.step(axis, plan.room(axis), pins, tight=tight)

    def unplanned(self, mesh: DeviceMesh, gap: float) -> MeshPlan:
        """An empty plan: no node is cut, and everything is computed again."""
        whole = (0,) * len(mesh.axes)
        picks = {node.name: (whole, everything(node)) for node in self.graph.nodes}
        return MeshPlan(self, EvenMesh(mesh, stand_in(mesh), self.sharder.cluster), gap, picks)

    def refined(self, coarse: MeshPlan, mesh: DeviceMesh) -> MeshPlan | None:
        """The plan of a mesh on one that splits an axis of it (`meshes.split_from`), improved.

        The improvement is one step, of the first axis that is a part of another. None if some cut
        of the plan cannot be split: cuts in segments are not.

        Raises:
            Infeasible: No plan was found that fits.
        """
        fine = self.unplanned(mesh, coarse.gap)
        origins = split_from(mesh, coarse.even.mesh)
        for node in self.graph.nodes:
            pick, form = coarse.picks[node.name]
            cuts = tuple(
                self._same_cut(node.name, coarse.lengths[origin], pick[origin], length)
                for origin, length in zip(origins, fine.lengths, strict=True)
            )
            if fine.placed(node, cuts) is None:
                return None
            fine.picks[node.name] = cuts, form
        part = next(a for a, o in zip(mesh.names, origins, strict=True) if origins.count(o) > 1)
        fine.step(part, fine.room(mesh.names[-1]))
        fine.stand()
        fine.offer()
        return fine

    def _same_cut(self, name: str, length: int, index: int, other: int) -> int:
        """Over a line of another length, the cut of the same factors; whole if there is none."""
        if length == other:
            return index
        cuts = self.cuts(length)[name]
        factors = set(cuts[index]) if cuts else set()
        equal = (i for i, cut in enumerate(self.cuts(other)[name]) if set(cut) == factors)
        return next(equal, 0)

    def improve(self, plan: MeshPlan, best_s: float = math.inf) -> Sharded:
        """A good plan on the mesh, from its first plan on.

        Each axis has one turn at least, unless the clock stops the search. It ends if the plan
        costs more after a pass than the best one of other meshes, `best_s`.

        Raises:
            Infeasible: No plan was found that fits the memory of a device.
        """
        names = plan.even.mesh.names
        known = plan.sharded is not None
        if not known:
            for axis in names:
                plan.step(axis, plan.room(axis))
            plan.stand()
            plan.offer()
        # Of one axis the second search is of the same problem, unless other values are kept.
        again = len(names) > 1 or (self.graph.optional and plan.tight)
        for turn in range(PASSES if again else int(known)):
            due = known and turn == 0
            if self.work.late or not (due or self.work.left):
                break
            before = plan.best.cost_s
            for axis in names:
                if due or self.work.left:
                    plan.step(axis, plan.room(names[-1]))
            plan.offer()
            if plan.best.cost_s > min(best_s, before * (1 - LEAST_GAIN)):
                break
        return plan.best

    def cuts(self, length: int) -> Mapping[str, tuple[Layouts, ...]]:
        """Cuts of every node over one axis of a stand-in, the empty one first."""
        if length not in self._cuts:
            options = strategies(self.graph, self.sharder.rules, DeviceMesh.of({LINE: length}))
            self._cuts[length] = {
                name: tuple(p.layouts for p in placed) for name, placed in options.items()
            }
        return self._cuts[length]

    def copied(self, name: str, original: str, pick: Pick, lengths: Sequence[int]) -> Pick:
        """The cuts of another node, of which this one is a copy; whole where it has none such."""

        def same(length: int, index: int) -> int:
            cuts, copy_cuts = self.cuts(length)[original], self.cuts(length)[name]
            known = index < len(cuts) and cuts[index] in copy_cuts
            return copy_cuts.index(cuts[index]) if known else 0

        return tuple(map(same, lengths, pick))

    def composed(self, node: Node, model: DeviceMesh, pick: Pick) -> PlacedNode | None:
        """A node with these cuts over the axes of a stand-in; None if they do not go together."""
        key, rule = (model, node.name, pick), self.sharder.rule(node)
        if key in self._composed:
            return self._composed[key]
        by_factor: dict[str, list[tuple[str, DimLayout]]] = {}
        for (axis, length), index in zip(model.axes, pick, strict=True) if rule is not None else ():
            for name, layout in self.cuts(length)[node.name][index].items():
                by_factor.setdefault(name, []).append((axis, layout))
        joined = {name: _joined(cuts, model) for name, cuts in by_factor.items()}
        layouts = {name: layout for name, layout in joined.items() if layout is not None}
        mesh = model if rule is not None else DeviceMesh.single(model.devices[0])
        self._composed[key] = None
        if len(layouts) == len(joined):
            with suppress(LayoutError):
                self._composed[key] = place(self.graph, node, mesh, layouts, rule)
        return self._composed[key]


def weight_side(graph: Graph) -> Iterator[str]:
    """Nodes that lead from stored values to the operators that use them, and the updates."""
    weights: set[str] = set()
    for node in graph.nodes:
        row = row_of(node)
        led = row.view and row.in_place is None and node.reads and weights.issuperset(node.reads)
        if row.stored or led:
            weights.update(node.writes)
            yield node.name
        elif row.in_place is not None:
            yield node.name


def _joined(cuts: Sequence[tuple[str, DimLayout]], model: DeviceMesh) -> DimLayout | None:
    """Join one factor's cuts over several axes into one; None unless they are plain."""
    axes = tuple(axis for axis, _ in cuts)
    if any(layout.windows for _, layout in cuts):
        return None
    if len(cuts) == 1:
        return DimLayout.cut(axes, cuts[0][1].segments)
    if any(len(layout.segments) > 1 for _, layout in cuts):
        return None
    return DimLayout.even(cuts[0][1].size, axes, model)


@dataclass
class MeshPlan:
    """The plan on one mesh so far."""

    owner: AxisSharder
    even: EvenMesh
    gap: float  #: Relative gap at which a search may stop.
    picks: dict[str, Taken]  #: The cuts and the alternative of each node.
    sharded: Sharded | None = None  #: The plan; None if there is none yet.
    #: Least cost of the plans seen that do not fit the memory of a device.
    free_s: float = math.inf
    #: Whether all axes have had a turn: before that, memory counts as if those to come cut
    #: everything.
    stands: bool = False
    #: The axes that had a turn: constraints on the others are honoured in theirs.
    turns: frozenset[str] = frozenset()
    _admitted: dict[tuple[str, Pick], PlacedNode | None] = field(default_factory=dict)
    #: By axis: bytes and plan when its search ended. The same problem would give the same plan.
    _searched: dict[str, tuple[float, dict[str, Taken]]] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The folded graph."""
        return self.owner.graph

    @cached_property
    def lengths(self) -> Sequence[int]:
        """Sizes of the stand-in's axes."""
        return [size for _, size in self.even.model.axes]

    @cached_property
    def _prices(self) -> GroupColumns:
        resharder = EvenResharder(self.even.cluster, even=self.even)
        sharder = self.owner.sharder
        return GroupColumns(self.graph, resharder, sharder.micro_batches, sharder.lanes)

    @property
    def best(self) -> Sharded:
        """The plan so far."""
        assert self.sharded is not None
        return self.sharded

    def stand(self) -> None:
        """Note that all axes have had a turn."""
        self.stands = self.owner.has_plan = True

    @property
    def tight(self) -> bool:
        """Tell whether memory forbids a plan that costs less by more than the gap."""
        return self.free_s < (1 - self.gap) * (self.sharded.cost_s if self.sharded else math.inf)

    def room(self, axis: str) -> float:
        """Memory limit of a device in bytes, if later axes cut all evenly."""
        device = self.owner.sharder.cluster.devices[self.even.device]
        limit = device.memory_bytes * self.owner.groups
        after = self.even.mesh.names.index(axis) + 1
        return limit * math.prod(size for _, size in self.even.mesh.axes[after:])

    def step(
        self, axis: str, room: float, pins: Constraints | None = None, *, tight: bool = True
    ) -> None:
        """Choose the cuts over one axis anew, unless nothing has changed since that was last done.

        Where the clock stops the search, a plan that stands stays as it is. If the cheapest plan
        does not fit the `room` of a device in bytes, `tight` has it searched within that.

        Raises:
            Infeasible: No plan was found within so many bytes a device.
            ConstraintError: The pins leave a node without a strategy.
        """
        if pins is None and self._searched.get(axis) == (room, self.picks):
            return
        names = self.even.mesh.names
        index, self.turns = names.index(axis), self.turns | {axis}
        own = self.owner.sharder.constraints.over(self.turns, every=len(self.turns) == len(names))
        honoured = own if pins is None else own.joined(pins)
        with suppress(OutOfTime):
            options = {}
            for node in self.graph.nodes:
                self._check_clock()
                options[node.name] = self._options(node, index, honoured)
            self._choose(options, room, warm=pins is None, tight=tight)
            if pins is None:
                self._searched[axis] = room, self.picks

    def offer(self) -> None:
        """Search which offered values are computed again, if there is time; all cuts stay."""
        if not self.graph.optional:
            return
        with suppress(OutOfTime):
            self._check_clock()
            options = {node.name: self._offered(node) for node in self.graph.nodes}
            self._choose(options, self.room(self.even.mesh.names[-1]), warm=True, tight=True)

    def _check_clock(self) -> None:
        """End the step of a plan that stands, if the clock stops the search.

        Raises:
            OutOfTime: It does.
        """
        if self.stands and self.owner.work.late:
            raise OutOfTime("the time limit stopped the search")

    def _choose(
        self,
        options: Mapping[str, Mapping[Taken, PlacedNode]],
        room: float,
        *,
        warm: bool,
        tight: bool,
    ) -> None:
        candidates = {name: tuple(choices.values()) for name, choices in options.items()}
        home = DeviceMesh.single(self.even.model.devices[0])
        groups = tuple(dict.fromkeys((self.even.model, home)))
        built = build(self.graph, groups, candidates, self._prices, check=self._check_clock)
        # constraints may leave out what the plan so far has, or would have if nothing were cut
        stands = warm and all(next(iter(options[name])) == self.picks[name] for name in options)
        solution, tied = self._solve(built, room, warm=warm, stands=stands, tight=tight)
        self.picks = {
            name: list(choices)[pick]
            for (name, choices), pick in zip(options.items(), solution.chosen, strict=True)
        }
        self.sharded = Sharded(self.owner.sharder.folded, self.even, built, tied, solution)

    def _offered(self, node: Node) -> dict[Taken, PlacedNode]:
        """Alternatives of a node as it is cut, the one of the plan so far first."""
        now = self.picks[node.name]
        options = {now: self._taken(node, now)}
        original = self.owner.originals.get(node.name)
        pick = now[0]
        if options[now].absent and original is not None:
            pick = self.owner.copied(node.name, original, self.picks[original][0], self.lengths)
        placed = self.placed(node, pick)
        others = alternatives(self.graph, node, (placed,)) if placed is not None else ()
        options.update({(pick, form): p for form, p in enumerate(others) if form != now[1]})
        return options

    def _taken(self, node: Node, taken: Taken) -> PlacedNode:
        placed = self.placed(node, taken[0])
        assert placed is not None
        return tuple(alternatives(self.graph, node, (placed,)))[taken[1]]

    def _options(self, node: Node, axis: int, pins: Constraints) -> dict[Taken, PlacedNode]:
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
        options: dict[Pick, PlacedNode] = {}
        seen: set[object] = set()
        for pick in (now, *itertools.product(*ranges)):
            placed = self.placed(node, pick)
            if placed is not None and (placed.ins, placed.outs) not in seen:
                seen.add((placed.ins, placed.outs))
                options[pick] = placed
        if pins.bound:
            sharder, mesh = self.owner.sharder, self.even.mesh
            placed_all = tuple(options.values())
            kept = set(map(id, sharder.kept(node.name, placed_all, pins, mesh)))
            options = {pick: placed for pick, placed in options.items() if id(placed) in kept}
        return {(pick, form): self._taken(node, (pick, form)) for pick in options}

    def placed(self, node: Node, pick: Pick) -> PlacedNode | None:
        """A node with these cuts; None if they do not go together or are not even."""
        key = node.name, pick
        if key not in self._admitted:
            placed = self.owner.composed(node, self.even.model, pick)
            even = placed is not None and (placed.rule is None or self.even.admits(placed))
            self._admitted[key] = placed if even else None
        return self._admitted[key]

    def _solve(
        self, built: Built, room: float, *, warm: bool, stands: bool, tight: bool
    ) -> tuple[Solution, Problem]:
        """A plan of little cost; memory is minded only if the cheapest plan does not fit.

        The plan so far, or nothing cut, is the first choice of every node if it `stands`.

        Raises:
            Infeasible: None was found that fits.
            ConstraintError: None was found at all.
        """
        sharder = self.owner.sharder
        whole = sharder.folded.tie(built)
        tied, nothing = whole.problem, (0,) * len(whole.problem.nodes)
        start = None
        if stands:
            outcome = evaluate_choices(tied, nothing)
            if outcome.peak_bytes[0] <= room:
                load_s = outcome.load_s[0]
                start = Solution(nothing, load_s, 0.0, "feasible", None, "plan so far")
        patience = PATIENCE if warm else FIRST_PATIENCE
        known = start.chosen if start is not None else None

        def solved(limit: float, rounds: int) -> Solution | None:
            work, least_s = self.owner.work, 0.0 if self.owner.has_plan else FIRST_S
            if work.late and not least_s:
                return None
            work.spend(ITEM_STEPS * len(tied.items))
            limited = replace(tied, limit_bytes=(limit,))
            settings = self.gap, rounds, sharder.engine, patience, known
            return minimised(limited, work, *settings, least_s=least_s)

        best = solved(math.inf, ROUNDS)
        if best is None and not stands:
            raise ConstraintError(f"no plan of the kind was found{self._unpriced(built)}")
        nearest = best.chosen if best is not None else nothing
        if best is not None and evaluate_choices(tied, best.chosen).peak_bytes[0] > room:
            self.free_s = min(self.free_s, best.cost)
            best = solved(room, LIMITED_ROUNDS) if tight and not self.owner.defers_memory else None
        plans = [plan for plan in (start, best) if plan is not None]
        if not plans:
            raise refused(self.graph, self.even, whole, nearest, room)
        return min(plans, key=lambda plan: plan.cost), tied

    def _unpriced(self, built: Built) -> str:
        """Name a value that no two strategies of its maker and a reader agree on; "" for none."""
        problem = built.problem
        for edge in problem.edges:
            pairs = itertools.product({*edge.out_class}, {*edge.in_class})
            if edge.forbidden.issuperset(pairs):
                maker, reader = problem.names[edge.u], problem.names[edge.v]
                homes = dict(built.candidates[maker][0].results())
                reads = dict(built.candidates[reader][0].operands())
                value = next(name for name in homes if name in reads)
                return (
                    f": {value!r} is made as {homes[value].sharding} and {reader!r} reads "
                    f"{reads[value].sharding}, which has no price on {self.even.mesh}; try the "
                    "kinds in another order, or another mesh"
                )
        return ""
