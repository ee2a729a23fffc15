"""Meshes of three axes, up to 16 devices: searched one axis at a time.

Their joint problems are too large: strategies multiply over axes. So where the joint problems of
simpler meshes leave something to gain, all meshes of several axes are searched as those of a large
cluster are (`levels.search_whole`), and the plan that comes out competes with the
others. No bound over a mesh follows from it but the least device seconds of all nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan
from partitioner.problem.decode import planned_on
from partitioner.search.exact_memory import Found
from partitioner.search.levels import Layout, Staged, cheapest, decisions, layouts, search_whole
from partitioner.search.limits import MOST_EXPLICIT
from partitioner.solver import Infeasible, Solution
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import Family

if TYPE_CHECKING:
    from partitioner.search.explicit import Request

#: The joint search takes meshes of so many axes, if no other is asked for.
JOINT_AXES = 2
SOLVER = "search of one axis at a time / device seconds of the nodes"


def axes_meshes(cluster: Cluster, request: Request) -> tuple[Layout, ...]:
    """The meshes of several axes; none if there is none of three, or they cannot be searched so.

    All devices must be alike and nothing pinned, and the objective is throughput.
    """
    free = request.objective == "throughput" and not request.constraints.bound
    if not free or request.strategy == "inter":
        return ()
    found = layouts(cluster, "intra", request.mesh)
    several = tuple(layout for layout in found if len(layout.mesh.axes) >= JOINT_AXES)
    return several if any(len(layout.mesh.axes) > JOINT_AXES for layout in several) else ()


def may_gain(found: Sequence[Found], late: Sequence[Family]) -> bool:
    """Whether to search the meshes of several axes anew.

    They are if nothing was found, if the best plan is on one of them, or if the joint search of
    one was not through. Where one axis is best, three are no better.

    Args:
        found: Plans of the joint search.
        late: Families whose search was not through, without a plan.
    """
    if not found:
        return True
    best = min(found, key=lambda entry: entry.evaluation.step_s)
    begun = [entry.family for entry in found if entry.solution.status != "optimal"]
    return any(len(space.groups[0].axes) >= JOINT_AXES for space in (best.family, *late, *begun))


def by_levels(
    find: Callable[..., tuple[Staged, ...]],
    graph: Graph,
    rules: Rules,
    cluster: Cluster,
    space: Sequence[Layout],
    request: Request,
    deadline: float,
    progress: Callable[[str], None],
) -> tuple[Staged, tuple[DeviceMesh, ...], Graph, Plan, Evaluation]:
    """The cheapest plan of a search by levels, its meshes, the graph that it is for, its figures.

    Args:
        find: `search_levels` or `search_whole`.
        graph: The model.
        rules: Its rules.
        cluster: The devices.
        space: Meshes of stages.
        request: Its gap, seed and engine.
        deadline: Monotonic second after which no further mesh is begun.
        progress: Called with a line of text before each mesh.

    Raises:
        Infeasible: No plan was found that fits.
    """
    rivals = find(
        graph,
        rules,
        cluster,
        space,
        deadline=deadline,
        gap=request.gap,
        progress=progress,
        seed=request.seed,
        engine=request.engine,
    )
    staged, meshes, figures = cheapest(rivals, cluster)
    left, plan = planned_on(graph, cluster, *decisions(staged, meshes))
    if len(cluster) <= MOST_EXPLICIT:
        figures = evaluate(left, plan, cluster, rules.by_node if left is graph else None)
    return staged, meshes, left, plan, figures


def search_axes(
    graph: Graph,
    rules: Rules,
    cluster: Cluster,
    space: Sequence[Layout],
    request: Request,
    deadline: float,
    known_s: float,
    progress: Callable[[str], None],
) -> tuple[Found, ...]:
    """The best plan on one of these meshes; empty if none was found that fits.

    Args:
        graph: The model.
        rules: Its rules.
        cluster: Equal devices.
        space: Meshes of all of them.
        request: Its gap, seed and solver count.
        deadline: Monotonic second after which no further mesh is begun.
        known_s: Cost of the best plan of the joint search.
        progress: Called with a line of text before each mesh.
    """
    find = partial(search_whole, best_s=known_s)
    try:
        staged, _, left, plan, figures = by_levels(
            find, graph, rules, cluster, space, request, deadline, progress
        )
    except Infeasible:
        return ()
    if not figures.fits:
        return ()
    family = Family("intra", (staged.options[0].layout.mesh,), (), symmetric=False)
    bound = min(staged.bound_s, figures.step_s)
    solution = Solution((), figures.step_s, bound, "feasible", None, SOLVER)
    return (Found(family, left, plan, figures, solution),)
