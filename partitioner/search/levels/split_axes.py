"""Meshes of three axes, up to 16 devices: searched one axis at a time.

Their joint problems are too large: strategies multiply over axes. So where the joint problems of
simpler meshes leave something to gain, all meshes of several axes are searched as those of a large
cluster are (`one_mesh.search_whole`), and the resulting plan competes with the others. The only
bound over a mesh that follows is the least device seconds of all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.graph import Graph
from partitioner.search.levels.meshes import Layout, layouts
from partitioner.search.levels.staged import cheapest_staged
from partitioner.search.outcome import Candidate, OutOfTime, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.solver import Infeasible, Solution
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import Family

#: Most axes of the meshes that joint problems search.
JOINT_AXES = 2
#: About the seconds until a first plan is found, whatever the clock says, for each node.
FIRST_S = 3e-3
SOLVER = "decomposition into mesh axes / device seconds of the nodes"


def axes_meshes(cluster: Cluster, request: Request) -> tuple[Layout, ...]:
    """The meshes of several axes; none if none has three, or the request needs joint problems.

    Devices must be equal, the objective throughput, and nothing pinned.
    """
    joint = request.objective != "throughput" or request.constraints.bound
    if joint or request.strategy == "inter":
        return ()
    meshes = layouts(cluster, "intra", request.mesh)
    several = tuple(layout for layout in meshes if len(layout.mesh.axes) >= JOINT_AXES)
    return several if any(len(layout.mesh.axes) > JOINT_AXES for layout in several) else ()


@dataclass(frozen=True)
class SplitAxesSpace:
    """All plans on one of several meshes, each mesh searched axis by axis."""

    graph: Graph
    rules: Rules
    cluster: Cluster
    meshes: tuple[Layout, ...]

    def search(self, budget: Budget, others: tuple[SpaceResult, ...]) -> SpaceResult:
        """The best plan; none if none is found to fit, or nothing is left to gain or no time."""
        if budget.work.late or not may_gain(others):
            return SpaceResult()
        is_known = budget.best_s < math.inf or any(result.plans for result in others)
        if is_known and budget.work.left_s < FIRST_S * len(self.graph.nodes):
            budget.work.stop()
            return SpaceResult()
        try:
            best = cheapest_staged(
                self.graph, self.rules, self.cluster, self.meshes, budget, one_stage=True
            )
        except Infeasible:
            return SpaceResult()
        if not best.evaluation.fits:
            return SpaceResult()
        family = Family("intra", (best.staged.options[0].layout.mesh,), (), symmetric=False)
        cost_s = best.evaluation.step_s
        bound_s = min(best.staged.bound_s, cost_s)
        solution = Solution((), cost_s, bound_s, "feasible", None, SOLVER)
        plan = Candidate(
            family, best.graph, best.plan, best.evaluation, solution, bounds_space=False
        )
        return SpaceResult((plan,))


def may_gain(others: Sequence[SpaceResult]) -> bool:
    """Whether to search the meshes of several axes axis by axis.

    They are if no plan is known, if the best plan is on one of them, or if the joint problem of
    one is not solved. Where one axis is best, three are no better.
    """
    plans = [plan for result in others for plan in result.plans]
    if not plans:
        return True
    best = min(plans, key=lambda plan: plan.evaluation.step_s)
    open_spaces = [plan.space for plan in plans if plan.solution.status != "optimal"]
    for result in others:
        open_spaces += [space for space, error in result.failed if isinstance(error, OutOfTime)]
        if result.refused is not None and not result.refused.error.proven:
            open_spaces.append(result.refused.space)
    return any(len(space.groups[0].axes) >= JOINT_AXES for space in (best.space, *open_spaces))
