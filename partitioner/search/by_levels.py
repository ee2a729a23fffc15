"""Large clusters: plans of stages whose devices execute identical work (see `search.levels`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan
from partitioner.problem.decode import planned_on
from partitioner.search.levels import (
    Layout,
    Staged,
    counted,
    decisions,
    layouts,
    search_levels,
    search_whole,
)
from partitioner.search.limits import EXPLICIT, MOST_EXPLICIT
from partitioner.search.outcome import Candidate, OutOfTime, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.solver import Solution
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import Family, SearchError

SOLVER = "stages over shardings / device seconds of the nodes"


@dataclass(frozen=True)
class StagedPlan:
    """The cheapest plan of a search by levels.

    Attributes:
        staged: Its stages.
        meshes: The devices of each stage.
        graph: The graph that the plan is for.
        plan: The plan.
        evaluation: The plan's evaluation.
    """

    staged: Staged
    meshes: tuple[DeviceMesh, ...]
    graph: Graph
    plan: Plan
    evaluation: Evaluation


@dataclass(frozen=True)
class StagesSpace:
    """All plans of stages on equal meshes with even cuts.

    Attributes:
        graph: The graph.
        rules: Its rules.
        cluster: The devices.
        layouts: The meshes.
        micro_batches, lanes: As of `DeviceColumns`.
    """

    graph: Graph
    rules: Rules
    cluster: Cluster
    layouts: tuple[Layout, ...]
    micro_batches: int = 1
    lanes: int = 1

    @classmethod
    def of(cls, graph: Graph, rules: Rules, cluster: Cluster, request: Request) -> StagesSpace:
        """The space that a request names.

        Raises:
            SearchError: The request names none.
        """
        meshes = layouts(cluster, request.strategy, request.mesh)
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
        return cls(graph, rules, cluster, meshes, count, request.lanes)

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

    Returns:
        If none fits by the referee, the one that is short of the fewest bytes on a device.

    Raises:
        Infeasible: No plan fits by what the solver counts.
    """
    if one_stage:
        rivals = search_whole(graph, rules, cluster, meshes, budget, micro_batches, lanes)
    else:
        rivals = search_levels(graph, rules, cluster, meshes, budget)
    if micro_batches > 1:  # counted anew, all that runs once a step would count fully
        rivals = rivals[:1]
    is_explicit = len(cluster) <= MOST_EXPLICIT and micro_batches == lanes == 1
    plans: list[StagedPlan] = []
    for rival in counted(rivals, cluster):
        plan = _planned(graph, cluster, *rival)
        plans.append(_evaluated(plan, cluster) if is_explicit else plan)  # else a cut is evaluated
        if plans[-1].evaluation.fits_exactly:
            return plans[-1]
    return min(plans, key=lambda plan: max(plan.evaluation.short_bytes.values()))


def _evaluated(plan: StagedPlan, cluster: Cluster) -> StagedPlan:
    return replace(plan, evaluation=evaluate(plan.graph, plan.plan, cluster))


def _planned(
    graph: Graph,
    cluster: Cluster,
    staged: Staged,
    meshes: tuple[DeviceMesh, ...],
    evaluation: Evaluation,
) -> StagedPlan:
    planned, plan = planned_on(graph, cluster, *decisions(staged, meshes))
    return StagedPlan(staged, meshes, planned, plan, evaluation)
