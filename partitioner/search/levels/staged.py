"""Large clusters: plans of stages whose devices execute identical work (see `search.levels`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan
from partitioner.problem.decode import planned_on
from partitioner.search.levels.decode import decisions, groups
from partitioner.search.levels.meshes import Layout, layouts
from partitioner.search.levels.one_mesh import search_whole
from partitioner.search.levels.stages import JOINT_AXES, Staged, search_levels
from partitioner.search.limits import EXPLICIT
from partitioner.search.outcome import Candidate, OutOfTime, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.solver import Infeasible, Solution
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.derive import Rules
from partitioner.strategies.kinds.parallel import check_even
from partitioner.strategies.spaces import Family, SearchError

#: Times that a search whose plans do not fit by the referee is repeated, within less memory.
_REPEATS = 3
SOLVER = "decomposition into stages of shardings / device seconds of the nodes"


@dataclass(frozen=True)
class StagedPlan:
    """The cheapest plan of a search by levels."""

    staged: Staged  #: Its stages.
    meshes: tuple[DeviceMesh, ...]  #: The devices of each stage.
    graph: Graph  #: The graph that the plan is for.
    plan: Plan
    evaluation: Evaluation  #: The plan's evaluation.


@dataclass(frozen=True)
class StagesSpace:
    """All plans of stages on equal meshes with even cuts.

    Attributes:
        graph: The graph.
        rules: Its rules.
        cluster: The devices.
        layouts: The meshes.
        micro_batches, lanes: As of `DeviceColumns`.
        constraints: Those on the graph, which are none of single devices.
    """

    graph: Graph
    rules: Rules
    cluster: Cluster
    layouts: tuple[Layout, ...]
    micro_batches: int = 1
    lanes: int = 1
    constraints: Constraints | None = None

    @classmethod
    def of(cls, graph: Graph, rules: Rules, cluster: Cluster, request: Request) -> StagesSpace:
        """The space that a request names.

        Raises:
            SearchError: The request names none.
            ConstraintError: A pin names no axis of its meshes, or devices share a batch unevenly.
        """
        meshes = layouts(cluster, request.strategy, request.mesh)
        constraints = request.constraints
        if constraints.bound:
            if request.mesh is None:  # pins name axes of one or two
                meshes = tuple(layout for layout in meshes if len(layout.mesh.axes) <= JOINT_AXES)
            constraints.check_axes(sorted({axis for one in meshes for axis in one.mesh.names}))
            check_even(request.parallel, graph, request.mesh or {})
        if graph.backward:
            meshes = tuple(layout for layout in meshes if layout.mesh.size() == len(cluster))
        if not meshes and graph.backward:
            raise SearchError(
                "training is planned on one group of all devices, and they must be alike: "
                f"--strategy {request.strategy} gives none"
            )
        if not meshes:
            option = "--mesh" if request.mesh is not None else f"--strategy {request.strategy}"
            raise SearchError(
                f"{option} on devices of several kinds is planned for up to "
                f"{EXPLICIT} devices; --strategy auto gives each kind stages of its own"
            )
        count = request.micro_batch_count or 1
        return cls(graph, rules, cluster, meshes, count, request.lanes, constraints)

    def search(self, budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        """The cheapest plan.

        Raises:
            Infeasible: No plan was found that fits.
        """
        best = cheapest_staged(
            self.graph,
            self.rules,
            self.cluster,
            self.layouts,
            budget,
            one_stage=bool(self.graph.backward),
            micro_batches=self.micro_batches,
            lanes=self.lanes,
            constraints=self.constraints,
        )
        staged = best.staged
        family = Family(best.plan.kind, best.meshes, best.meshes[:1], symmetric=False)
        cost_s = best.evaluation.step_s
        solution = Solution((), cost_s, min(staged.bound_s, cost_s), "feasible", None, SOLVER)
        sizes = sorted({layout.mesh.size() for layout in staged.searched})
        return SpaceResult(
            (Candidate(family, best.graph, best.plan, best.evaluation, solution),),
            searched=(
                "one group of all devices, even cuts"
                if self.graph.backward
                else f"stages of {', '.join(map(str, sizes))} devices, even cuts"
            ),
            failed=tuple(
                (Family("stages", (layout.mesh,), (), symmetric=False), OutOfTime(why))
                for layout, why in staged.failed.items()
            ),
            folded=str(staged.folded),
            memory_binds=staged.tight,
        )


def cheapest_staged(
    graph: Graph,
    rules: Rules,
    cluster: Cluster,
    meshes: Sequence[Layout],
    budget: Budget,
    *,
    one_stage: bool,
    micro_batches: int = 1,
    lanes: int = 1,
    constraints: Constraints | None = None,
) -> StagedPlan:
    """The cheapest plan by levels.

    Args:
        graph: The graph.
        rules: Its rules.
        cluster: The devices.
        meshes: Meshes of stages; each of all devices with `one_stage`.
        budget: The budget.
        one_stage: Whether all devices share every operator, as in training.
        micro_batches, lanes: As of `DeviceColumns`, with one stage.
        constraints: Those on the graph; None for none.

    Returns:
        If none fits by the referee, the one that is short of the fewest bytes on a device.

    Raises:
        Infeasible: No plan fits by what the solver counts.
    """
    plans: list[StagedPlan] = []
    within, steps, resharder = cluster, budget.work.left, Resharder(cluster)
    for again in range(1 + _REPEATS):
        try:
            if one_stage:
                rivals = search_whole(
                    graph, rules, within, meshes, budget, micro_batches, lanes, constraints
                )
            else:
                rivals = search_levels(graph, rules, within, meshes, budget, constraints)
        except Infeasible:
            if not plans:
                raise
            break
        if micro_batches > 1:  # counted anew, all that runs once a step would count fully
            rivals = rivals[:1]
        priced = [_priced(rival, graph, resharder) for rival in rivals]
        fitting = [plan for plan in priced if plan.evaluation.fits_exactly]
        if fitting:
            best = min(fitting, key=_step_s)
            return replace(best, staged=replace(best.staged, tight=True)) if again else best
        plans += priced
        if budget.work.late:
            break
        budget = replace(budget, work=budget.work.beyond(steps))
        within = _narrowed(within, min(priced, key=_most_short_bytes))
    return min(plans, key=_most_short_bytes)


def _priced(staged: Staged, graph: Graph, resharder: Resharder) -> StagedPlan:
    """A plan as the referee prices it."""
    cluster = resharder.cluster
    meshes = groups(staged, cluster)
    planned, plan = planned_on(graph, cluster, *decisions(staged, meshes))
    evaluation = evaluate(planned, plan, cluster, resharder=resharder)
    return StagedPlan(staged, meshes, planned, plan, evaluation)


def _step_s(plan: StagedPlan) -> float:
    return plan.evaluation.step_s


def _most_short_bytes(plan: StagedPlan) -> int:
    """Bytes that the fullest device of a plan is short of."""
    return max(plan.evaluation.short_bytes.values())


def _narrowed(cluster: Cluster, plan: StagedPlan) -> Cluster:
    """The cluster with so little memory that a search finds no such plan as one that does not fit.

    The referee counts more bytes of a plan than the search does, such as those of an executor. Of
    another plan it is taken to count as many more.
    """
    limit_bytes: dict[DeviceSpec, int] = {}
    for counted_bytes, mesh in zip(plan.staged.counted_bytes, plan.meshes, strict=True):
        spec, short = cluster.devices[mesh.devices[0]], plan.evaluation.short_bytes
        most = max(short.get(device, 0) for device in mesh.devices)
        if most:
            left = max(1, math.floor(counted_bytes - most))
            limit_bytes[spec] = min(left, limit_bytes.get(spec, spec.memory_bytes))
    devices = tuple(
        replace(spec, memory_bytes=limit_bytes.get(spec, spec.memory_bytes))
        for spec in cluster.devices
    )
    return replace(cluster, devices=devices)
