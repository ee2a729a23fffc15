"""One group of all devices: training, where all devices share every operator.

The forward and the backward pass share weights, so a training graph is not cut into stages. Its
memory is what decides: weights, their optimizer's state and what the forward pass keeps are shared
as far as they must be, so every mesh is searched with the memory of a device as the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from partitioner.cost_model.cluster import Cluster
from partitioner.ir.graph import Graph
from partitioner.problem.folding import fold
from partitioner.search.levels.axis_sharder import LEAST_GAIN, Axes, AxisSharder
from partitioner.search.levels.mesh_sharder import Sharded, Sharder
from partitioner.search.levels.meshes import Layout, split_from
from partitioner.search.levels.stages import JOINT_AXES, Option, Staged, work_bound
from partitioner.search.levels.stretches import Blocks
from partitioner.solver import Infeasible
from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.stages import Cut, Stage
from partitioner.strategies.derive import Rules

#: A mesh whose first plan costs so many times the best plan is left at that.
FAR = 1.25
#: Share of the time for first plans, once there is one.
FIRST_SHARE = 0.5
#: First plans end after so many in a row that are no better than the best.
IDLE = 2
#: Plans of least load that are counted anew.
RIVALS = 2


def search_whole(
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
    yields: bool = False,
    best_s: float = math.inf,
) -> tuple[Staged, ...]:
    """The best plans with one stage of all devices.

    Args:
        graph: The model.
        rules: Its rules.
        cluster: The devices.
        candidates: Meshes of all devices.
        deadline: Monotonic second after which no further mesh is begun.
        gap: Relative gap between load and bound at which to stop.
        progress: Called with a line of text before each mesh.
        seed: Of all random choices.
        engine: MILP solver.
        yields: Whether to stop where memory forbids a cheaper plan (`Staged.tight`), since another
            graph is planned there: the one with offers.
        best_s: Cost of a plan of another graph, which is to be beaten.

    Raises:
        Infeasible: No plan fits the devices' memory.
    """
    folded = fold(graph, rules)
    planned = best_s < math.inf
    sharder = AxisSharder(Sharder(folded, cluster, seed, engine), deadline, planned, yields)
    job = _Whole(sharder, ranked(candidates, cluster), deadline, gap, progress, best_s)
    return job.run()


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
class _Whole:
    sharder: AxisSharder
    layouts: tuple[Layout, ...]
    deadline: float
    gap: float
    progress: Callable[[str], None]
    other_s: float = math.inf
    free_s: float = math.inf
    found: dict[Layout, Sharded] = field(default_factory=dict)
    failed: dict[Layout, str] = field(default_factory=dict)
    refusals: list[Infeasible] = field(default_factory=list)
    in_time: bool = True

    def run(self) -> tuple[Staged, ...]:
        """First plans, then one mesh after the other, until one gains nothing or time is up.

        Then the best one's splits. Meshes of three axes are searched by themselves only if there
        are no others.
        """
        folded = self.sharder.sharder.folded
        bound = work_bound(self.sharder.sharder)
        jobs = self._begun()
        for at, (layout, job) in enumerate(jobs):
            if self._left_to_others():
                break
            if job.found is not None and job.best.cost_s > FAR * self._best_s:
                continue
            if self._best_s < math.inf and time.monotonic() > self.deadline:
                self.in_time = False
                if job.found is None:
                    self.failed[layout] = "not searched within the time limit"
                continue
            before, other = self._best_s, job.found is None or job.best.cost_s > self._best_s
            tried = self._try(layout, job)
            idle = tried and other and self._best_s > before * (1 - LEAST_GAIN)
            if idle or self._met(bound):
                left = (layout for layout, job in jobs[at + 1 :] if job.found is None)
                self.failed.update(dict.fromkeys(left, "not searched: others gained too little"))
                break
        if not self.found:
            raise self._refused()
        best, _ = self._ranked()[0]
        own = (job for layout, job in jobs if layout == best and job.found is not None)
        self._split(min(own, key=lambda job: job.best.cost_s), bound)
        blocks = Blocks((len(folded.whole.nodes),))
        searched = tuple(self.found)
        return tuple(
            Staged(
                folded,
                Cut((Stage(0, 1, 0, 0),), sharded.cost_s, bound, sharded.solution.status),
                blocks,
                (Option(layout, sharded, None),),
                bound,
                searched,
                self.failed,
                self.in_time,
                self._tight,
            )
            for layout, sharded in self._ranked()[:RIVALS]
        )

    @property
    def _best_s(self) -> float:
        return min((self.other_s, *(sharded.cost_s for sharded in self.found.values())))

    @property
    def _tight(self) -> bool:
        """Whether memory forbids a plan that costs less by more than the gap."""
        return self.free_s < (1 - self.gap) * self._best_s

    def _left_to_others(self) -> bool:
        """Whether the search ends here: where memory binds, or where only an unlikely plan is left.

        Without a plan of a known kind the search is long, and hardly beats one of another graph.
        """
        bound = self.sharder.yields and self._tight
        return bound or (not self.found and self.other_s < math.inf)

    def _refused(self) -> Infeasible:
        unlikely = Infeasible("no plan of a known kind fits", proven=False)
        refusals = [*self.refusals, *self.sharder.refusals]
        return min(refusals, key=lambda error: error.bytes_short, default=unlikely)

    def _met(self, bound: float) -> bool:
        """Whether the best plan is within the gap of the bound."""
        return self._best_s < math.inf and self._best_s - bound <= self.gap * self._best_s

    @cached_property
    def plain(self) -> tuple[Layout, ...]:
        """The meshes that are begun as known kinds of parallelism."""
        few = tuple(layout for layout in self.layouts if len(layout.mesh.axes) <= JOINT_AXES)
        return few or self.layouts

    def _split(self, coarse: Axes, bound: float) -> None:
        """Meshes that split an axis of the best one, if it has two: each begins with its plan."""
        for layout in self.layouts[len(self.plain) :]:
            best_s = self._best_s
            origins = split_from(layout.mesh, coarse.even.mesh)
            if len(set(origins)) < JOINT_AXES or coarse.best.cost_s > FAR * best_s:
                self.failed[layout] = "not searched: it splits no axis of the best mesh of two"
            elif self._met(bound) or self._left_to_others():
                self.failed[layout] = "not searched: others gained too little"
            elif time.monotonic() > self.deadline:
                self.in_time = False
                self.failed[layout] = "not searched within the time limit"
            else:
                self._try_split(layout, coarse)

    def _try_split(self, layout: Layout, coarse: Axes) -> None:
        """One step from the plan of the mesh that is split; more if that gains enough."""
        self.progress(f"splitting {coarse.even.mesh} into {layout}")
        before = self._best_s
        try:
            job = self.sharder.refined(coarse, layout.mesh)
        except Infeasible as error:
            self.failed[layout] = str(error)
            return
        if job is None:
            self.failed[layout] = "not searched: the cuts of the best mesh cannot be split"
            return
        self.found[layout] = job.best
        if job.best.cost_s < before * (1 - LEAST_GAIN):
            self._try(layout, job)

    def _begun(self) -> list[tuple[Layout, Axes]]:
        """Meshes with their first plans, the cheapest first, those without one at the end."""
        jobs: list[tuple[Layout, Axes]] = []
        begun, idle = time.monotonic(), 0
        until = begun + FIRST_SHARE * (self.deadline - begun)
        for layout in self.plain:
            if idle == IDLE:
                self.failed[layout] = "meshes before it were no better than the best"
                continue
            if self._best_s < math.inf and time.monotonic() > until:
                own: tuple[Axes, ...] = (self.sharder.unbegun(layout.mesh, self.gap / 2),)
            else:
                self.progress(f"first plan on {layout}")
                own = self.sharder.begin(layout.mesh, self.gap / 2)
            self.free_s = min(self.free_s, own[0].free_s)
            plans = [job.found for job in own if job.found is not None]
            if plans:
                first = min(plans, key=_cost_s)
                idle = idle + 1 if first.cost_s >= self._best_s else 0
                self.found[layout] = first
            elif self.sharder.yields and not self.found:
                idle += math.isfinite(self.free_s)
            jobs += [(layout, job) for job in own]
            if self.found and self._left_to_others():
                break
        return sorted(jobs, key=lambda pair: pair[1].found.cost_s if pair[1].found else math.inf)

    def _try(self, layout: Layout, job: Axes) -> bool:
        """Whether the mesh has a plan."""
        self.progress(f"sharding over {layout}")
        try:
            sharded = self.sharder.improve(job, self._best_s)
        except Infeasible as error:
            self.failed[layout] = str(error)
            self.refusals.append(error)
            return False
        finally:
            self.free_s = min(self.free_s, job.free_s)
        self.found[layout] = min(sharded, self.found.get(layout, sharded), key=_cost_s)
        return True

    def _ranked(self) -> list[tuple[Layout, Sharded]]:
        return sorted(self.found.items(), key=lambda found: found[1].cost_s)


def _cost_s(sharded: Sharded) -> float:
    return sharded.cost_s
