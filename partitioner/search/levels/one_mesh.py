"""A single group of all devices: training, where all devices share every operator.

The forward and the backward pass share weights, so a training graph is not cut into stages. Its
memory is what decides: weights, their optimizer's state and what the forward pass keeps are shared
as far as they must be, so every mesh is searched with the memory of a device as the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.search.levels.axis_sharder import (
    AS_THEY_ARE,
    LEAST_GAIN,
    USUAL,
    AxisSharder,
    MeshPlan,
)
from partitioner.search.levels.mesh_sharder import Sharded, Sharder
from partitioner.search.levels.meshes import Layout, split_from
from partitioner.search.levels.stages import JOINT_AXES, Option, Staged, unsearched
from partitioner.search.request import Budget
from partitioner.solver.outcome import Infeasible
from partitioner.solver.stages.model import Cut, Stage
from partitioner.strategies.constraints import ConstraintError

#: A mesh whose first plan costs so many times the best plan is left at that.
FAR = 1.25
#: First plans may take one such part of the steps, once there is one.
FIRST_PART = 2
#: First plans end after so many in a row that are no better than the best.
IDLE = 2
#: Plans of least load that are counted anew.
RIVALS = 2


def ranked(candidates: Sequence[Layout], cluster: Cluster) -> tuple[Layout, ...]:
    """Meshes in the order in which they are searched.

    One axis first: it is by far the quickest, and where the batch is long enough its plan is hard
    to beat. Then two, the one within a node about half as long as a node. Then three: they split
    the best of these.
    """
    node = cluster.levels[0].size

    def rank(layout: Layout) -> tuple[int, int]:
        sizes = [size for _, size in layout.mesh.axes]
        return len(sizes), abs(node // 2 - sizes[-1])

    return tuple(sorted(candidates, key=rank))


@dataclass
class MeshSearch:
    """The search of plans of one stage of all devices.

    With a budget that defers memory, it stops where memory forbids a cheaper plan
    (`Staged.tight`): the graph with offers is planned there.
    """

    whole: Sharder
    candidates: Sequence[Layout]  #: The meshes.
    budget: Budget
    #: Whether kinds of parallelism are planned as they are beside the plans that improve on them:
    #: what small messages take together is known to the referee alone.
    weighs_kinds: bool = False
    #: Least cost of the plans seen that do not fit the memory of a device.
    free_s: float = math.inf
    best: dict[Layout, Sharded] = field(default_factory=dict)  #: The best plan on each mesh.
    of_kinds: list[tuple[Layout, Sharded]] = field(default_factory=list)  #: Those of kinds.
    usual: tuple[Layout, Sharded] | None = None  #: That of the kind `USUAL`.
    failed: dict[Layout, str] = field(default_factory=dict)
    refusals: list[Infeasible] = field(default_factory=list)

    @cached_property
    def sharder(self) -> AxisSharder:
        """Shards over one axis at a time."""
        return AxisSharder(self.whole, self.budget.work, defers_memory=self.budget.defers_memory)

    def run(self) -> tuple[Staged, ...]:
        """The plans that are to be counted anew, those of kinds at the end, of least load first.

        First plans, then one mesh after the other, until one gains nothing or the work is done.
        Then the best one's splits. Meshes of three axes are searched by themselves only if there
        are no others.

        Raises:
            Infeasible: No plan fits the devices' memory.
            ConstraintError: The constraints leave no plan.
        """
        layouts = ranked(self.candidates, self.whole.cluster)
        few = tuple(layout for layout in layouts if len(layout.mesh.axes) <= JOINT_AXES)
        first_meshes = few or layouts
        plans = self._first_plans(first_meshes)
        for at, (layout, plan) in enumerate(plans):
            if self._left_to_others():
                break
            if plan.sharded is not None and plan.best.cost_s > FAR * self._best_s:
                continue
            if self._best_s < math.inf and self.budget.work.over:
                if plan.sharded is None:
                    self.failed[layout] = unsearched(self.budget.work)
                continue
            before = self._best_s
            other = plan.sharded is None or plan.best.cost_s > before
            improved = self._improve(layout, plan)
            idle = improved and other and self._best_s > before * (1 - LEAST_GAIN)
            if idle or self._met():
                left = (layout for layout, plan in plans[at + 1 :] if plan.sharded is None)
                self.failed.update(dict.fromkeys(left, "not searched: others gained too little"))
                break
        if self.weighs_kinds:
            self._weigh_kinds(first_meshes)
        if not self.best and not self.of_kinds:
            raise self._refusal
        if self.best:
            self._split_best(plans, layouts[len(first_meshes) :])
        kinds = sorted(self.of_kinds, key=lambda entry: entry[1].cost_s)
        usual = None if self.usual is None else self._staged(self.usual)
        rivals = map(self._staged, (*self._ranked()[:RIVALS], *kinds))
        return tuple(replace(rival, usual=usual) for rival in rivals)

    @property
    def _refusal(self) -> Infeasible | ConstraintError:
        """Why there is no plan: the one that is short of the fewest bytes, if memory is."""
        why = "was found within the time limit" if self.budget.work.late else "of a known kind fits"
        unlikely = Infeasible(f"no plan {why}", proven=False)
        refusals = [*self.refusals, *self.sharder.refusals]
        if not refusals and self.whole.constraints.bound and self.sharder.impossible:
            return self.sharder.impossible[-1]
        return min(refusals, key=lambda error: error.bytes_short, default=unlikely)

    def _weigh_kinds(self, layouts: Sequence[Layout]) -> None:
        """Plan kinds as they are: those of one axis while there is time, others with steps left."""
        work, gap = self.budget.work, self.budget.gap / 2
        for layout in layouts:
            for kinds in AS_THEY_ARE.get(len(layout.mesh.axes), ()):
                is_small = len(kinds) == 1 and not work.late
                if self.best and not is_small and work.over:
                    return
                self.budget.say(f"{'+'.join(kinds)} on {layout}")
                sharded = self.sharder.as_it_is(layout.mesh, kinds, gap)
                if sharded is not None and kinds == USUAL:
                    self.usual = layout, sharded
                if sharded is not None and sharded.cost_s < self.budget.best_s:
                    self.of_kinds.append((layout, sharded))

    def _split_best(
        self, plans: Sequence[tuple[Layout, MeshPlan]], layouts: Sequence[Layout]
    ) -> None:
        best, _ = self._ranked()[0]
        coarse = (plan for layout, plan in plans if layout == best and plan.sharded is not None)
        self._split(min(coarse, key=lambda plan: plan.best.cost_s), layouts)

    def _staged(self, entry: tuple[Layout, Sharded]) -> Staged:
        layout, sharded = entry
        folded = sharded.folded
        return Staged(
            folded,
            Cut((Stage(0, 1, 0, 0),), sharded.cost_s, self.whole.bound_s, sharded.solution.status),
            (len(folded.whole.nodes),),
            (Option(layout, sharded),),
            sharded.cost_s,
            self.whole.bound_s,
            tuple(self.best),
            self.failed,
            self._tight,
        )

    @property
    def _best_s(self) -> float:
        return min((self.budget.best_s, *(sharded.cost_s for sharded in self.best.values())))

    @property
    def _tight(self) -> bool:
        """Tell whether memory forbids a plan that costs less by more than the gap."""
        return self.free_s < (1 - self.budget.gap) * self._best_s

    def _left_to_others(self) -> bool:
        """Tell whether the search ends: where memory binds, or only an unlikely plan is left.

        Without a plan of a known kind the search is long, and hardly beats one of another graph.
        """
        bound = self.budget.defers_memory and self._tight
        return bound or (not self.best and self.budget.best_s < math.inf)

    def _met(self) -> bool:
        """Tell whether the best plan is within the gap of the bound."""
        best_s = self._best_s
        return best_s < math.inf and best_s - self.whole.bound_s <= self.budget.gap * best_s

    def _first_plans(self, layouts: Sequence[Layout]) -> list[tuple[Layout, MeshPlan]]:
        """First plans of meshes, the cheapest first; the meshes without one at the end."""
        pairs: list[tuple[Layout, MeshPlan]] = []
        idle, gap, work = 0, self.budget.gap / 2, self.budget.work
        least = work.left / FIRST_PART
        for layout in layouts:
            if idle == IDLE:
                self.failed[layout] = "meshes before it were no better than the best"
                continue
            known = self._best_s < math.inf
            if (work.late and (known or pairs)) or (known and work.left <= least):
                plans: tuple[MeshPlan, ...] = (self.sharder.unplanned(layout.mesh, gap),)
            else:
                self.budget.say(f"first plan on {layout}")
                plans = self.sharder.begin(layout.mesh, gap)
            self.free_s = min(self.free_s, plans[0].free_s)
            first = min(
                (p.best for p in plans if p.sharded), key=attrgetter("cost_s"), default=None
            )
            if first is not None:
                idle = idle + 1 if first.cost_s >= self._best_s else 0
                self.best[layout] = first
            elif self.budget.defers_memory and not self.best:
                idle += math.isfinite(self.free_s)
            pairs += [(layout, plan) for plan in plans]
            if self.best and self._left_to_others():
                break
        return sorted(pairs, key=lambda p: p[1].sharded.cost_s if p[1].sharded else math.inf)

    def _improve(self, layout: Layout, plan: MeshPlan) -> bool:
        """Improve the plan on a mesh; whether the mesh has a plan then."""
        self.budget.say(f"sharding over {layout}")
        try:
            sharded = self.sharder.improve(plan, self._best_s)
        except ConstraintError as error:
            self.failed[layout] = str(error)
            self.sharder.impossible.append(error)
            return False
        except Infeasible as error:
            self.failed[layout] = str(error)
            self.refusals.append(error)
            return False
        finally:
            self.free_s = min(self.free_s, plan.free_s)
        self.best[layout] = min(sharded, self.best.get(layout, sharded), key=attrgetter("cost_s"))
        return True

    def _split(self, coarse: MeshPlan, layouts: Sequence[Layout]) -> None:
        """Meshes that split an axis of the best one, if it has two: each begins with its plan."""
        for layout in layouts:
            origins = split_from(layout.mesh, coarse.even.mesh)
            if len(set(origins)) < JOINT_AXES or coarse.best.cost_s > FAR * self._best_s:
                self.failed[layout] = "not searched: it splits no axis of the best mesh of two"
            elif self._met() or self._left_to_others():
                self.failed[layout] = "not searched: others gained too little"
            elif self.budget.work.over:
                self.failed[layout] = unsearched(self.budget.work)
            else:
                self._try_split(layout, coarse)

    def _try_split(self, layout: Layout, coarse: MeshPlan) -> None:
        """Take one step from the plan of the mesh that is split; more if that gains enough."""
        self.budget.say(f"splitting {coarse.even.mesh} into {layout}")
        before = self._best_s
        try:
            plan = self.sharder.refined(coarse, layout.mesh)
        except Infeasible as error:
            self.failed[layout] = str(error)
            return
        if plan is None:
            self.failed[layout] = "not searched: the cuts of the best mesh cannot be split"
            return
        self.best[layout] = plan.best
        if plan.best.cost_s < before * (1 - LEAST_GAIN):
            self._improve(layout, plan)

    def _ranked(self) -> list[tuple[Layout, Sharded]]:
        return sorted(self.best.items(), key=lambda entry: entry[1].cost_s)
