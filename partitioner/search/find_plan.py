"""The search: one loop over spaces of plans; the best plan of all spaces wins.

Small clusters: every space (all devices as a mesh, every device alone, equal sub-meshes) becomes
one joint problem (`search.explicit`), and meshes of three axes are searched one axis at a time
(`search.split_axes`). Large clusters: stages of equal meshes (`search.by_levels`). The certificate
has the least bound of the spaces, so that it covers them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.reshard import Resharder
from partitioner.ir.graph import Graph
from partitioner.no_gc import no_collection
from partitioner.search.by_levels import StagesSpace
from partitioner.search.exact_memory import SECOND_LOOK_S, second_look
from partitioner.search.explicit import JointSearch, JointSpace
from partitioner.search.limits import EXPLICIT, EXPLICIT_NODES, MOST_EXPLICIT
from partitioner.search.outcome import Outcome, SpaceResult, best_of, winner
from partitioner.search.request import Budget, Request
from partitioner.search.split_axes import SplitAxesSpace, axes_meshes
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import SearchError, check_space, families


class Space(Protocol):
    """A set of plans that is searched as a whole."""

    def search(self, budget: Budget, others: tuple[SpaceResult, ...]) -> SpaceResult:
        """Find its best plan.

        Args:
            budget: The budget of this space, with the cost of the best known plan.
            others: Results of the spaces searched before it.

        Raises:
            Infeasible: No plan fits, and exact liveness cannot change that.
        """
        ...


@no_collection()
def find_plan(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, rules: Rules | None = None
) -> Outcome:
    """Find the best plan.

    Args:
        graph: The graph.
        cluster: The devices.
        request: The request.
        budget: The budget of the whole search.
        rules: Rules of the graph's nodes, if they are known.

    Raises:
        Infeasible: No space has a plan within the memory limits.
        ConstraintError: The pins leave a node without a strategy in every space.
        SearchError: The request names no search space.
    """
    devices = len(cluster)
    check_space(request.strategy, devices, request.mesh)
    request.constraints.check(graph, devices)
    rules = rules or Rules.of(graph)
    large = devices > EXPLICIT or len(graph.nodes) * devices > EXPLICIT_NODES
    if devices > 1 and large and not _explicit_only(request):
        stages = StagesSpace.of(graph, rules, cluster, request)
        return winner(_searched([stages], request, cluster, budget), request, devices)
    return _explicit(graph, cluster, request, budget, rules)


def _explicit_only(request: Request) -> str:
    """The part of a request that needs a column for every device; "" if none does."""
    if request.objective != "throughput":
        return f"objective {request.objective}"
    return "constraints" if request.constraints.bound else ""


def _explicit(
    graph: Graph, cluster: Cluster, request: Request, budget: Budget, rules: Rules
) -> Outcome:
    if len(cluster) > MOST_EXPLICIT:
        raise SearchError(
            f"{_explicit_only(request)} on {len(cluster)} devices: this is planned for up to "
            f"{MOST_EXPLICIT} devices"
        )
    joint = families(request.strategy, len(cluster), request.mesh)
    if graph.backward:  # the plans of one group are found sooner, and rule out most others
        joint = tuple(sorted(joint, key=lambda family: len(family.groups) > 1))
    axes = {axis for family in joint for group in family.groups for axis in group.names}
    request.constraints.check_axes(sorted(axes))
    search = JointSearch(graph, cluster, request, rules, Resharder(cluster))
    meshes = axes_meshes(cluster, request)
    spaces: list[Space] = [JointSpace(search, family) for family in joint]
    if meshes:
        spaces.append(SplitAxesSpace(graph, rules, cluster, meshes))
    results = _searched(spaces, request, cluster, budget)
    refused = [result.refused for result in results if result.refused is not None]
    if any(result.plans for result in results):
        return winner(results, request, len(cluster))
    if not refused:
        pins = [e for r in results for _, e in r.failed if isinstance(e, ConstraintError)]
        raise max(pins, key=lambda error: error.position)
    budget.say("looking again at what does not fit")
    plan = second_look(
        refused,
        request,
        max(SECOND_LOOK_S, budget.left_s),
        search.candidate,
        search.holdings,
        complete=len(refused) == len(spaces),
    )
    return winner([*results, SpaceResult((plan,))], request, len(cluster))


def _searched(
    spaces: Sequence[Space], request: Request, cluster: Cluster, budget: Budget
) -> list[SpaceResult]:
    """The results of the spaces, each searched with its share of the time and the best cost."""
    results: list[SpaceResult] = []
    for index, space in enumerate(spaces):
        plans = [plan for result in results for plan in result.plans]
        best_s = math.inf
        if plans:
            best_s = best_of(plans, request.objective, len(cluster)).cost(request.objective)
        share = replace(budget.share(len(spaces) - index), best_s=min(budget.best_s, best_s))
        results.append(space.search(share, tuple(results)))
    return results
