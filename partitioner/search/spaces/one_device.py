"""The whole graph on one device, where a device that is busy alone is faster than one of several.

Joint problems price every operator as it is while all processes of a machine are busy. A plan that
keeps one of them busy costs less (see `Cluster.beside`), so it competes under its own price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import best_single
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan
from partitioner.problem.build import planned_on
from partitioner.rewrites.graph_writer import chosen
from partitioner.search.outcome import Candidate, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.solver.outcome import Solution
from partitioner.strategies.spaces import Family


def alone_is_faster(graph: Graph, cluster: Cluster, request: Request) -> bool:
    """Tell whether the space of one device is to be searched beside the joint ones."""
    is_asked = request.objective == "latency" and is_free(graph, request)
    return is_asked and _is_priced_apart(cluster)


def least_alone(graph: Graph, cluster: Cluster, request: Request) -> float:
    """No plan on one device costs less; infinite where the bounds of joint problems cover them."""
    is_timed = request.objective != "memory"
    if not is_timed or _is_on_a_mesh(request) or not _is_priced_apart(cluster):
        return math.inf
    _, evaluation = best_single(chosen(graph, frozenset()), cluster, request.objective)
    # what optional nodes compute again need not be held
    may_fit = evaluation.fits_exactly or graph.optional
    return evaluation.cost(request.objective) if may_fit else math.inf


def shortage(graph: Graph, cluster: Cluster) -> tuple[bool, bool]:
    """Tell whether one device, and all of them together, have too little memory for a graph.

    If all have, no plan fits: at each node all values that live are somewhere, and one device holds
    each of them once.
    """
    device, alone = best_single(graph, cluster, "memory")
    held = alone.exact_bytes[device]
    together = sum(spec.memory_bytes for spec in cluster.devices)
    return not alone.fits_exactly, held - len(cluster) > together


def is_to_run(graph: Graph, request: Request) -> bool:
    """Tell whether one device is to be run beside other plans.

    Then it is known if splitting pays.
    """
    return request.tune is not None and is_free(graph, request)


def is_free(graph: Graph, request: Request) -> bool:
    """Tell whether the request and the graph allow a plan of one device as it is."""
    return not (_is_on_a_mesh(request) or request.constraints.bound or graph.optional)


def _is_on_a_mesh(request: Request) -> bool:
    """Tell whether all plans of a request have every device in one mesh."""
    return request.strategy == "intra" or request.mesh is not None or request.parallel is not None


def _is_priced_apart(cluster: Cluster) -> bool:
    """Tell whether a device that is busy alone has seconds of its own."""
    return cluster.beside((0,)) != cluster


@dataclass(frozen=True)
class OneDeviceSpace:
    """The plans that run the whole graph on one device."""

    graph: Graph
    cluster: Cluster
    request: Request

    def search(self, _budget: Budget, _others: Sequence[SpaceResult]) -> SpaceResult:
        """The plan on the best device; none if it does not fit there."""
        device, evaluation = best_single(self.graph, self.cluster, self.request.objective)
        if not evaluation.fits:
            return SpaceResult()
        mesh = (DeviceMesh.single(device),)
        decided = {node.name: NodePlan(0, {}) for node in self.graph.nodes}
        graph, plan = planned_on(self.graph, self.cluster, mesh, decided)
        cost = evaluation.cost(self.request.objective)
        solution = Solution((), cost, cost, "optimal", None, "one device")
        family = Family("single", mesh, mesh, symmetric=False)
        return SpaceResult((Candidate(family, graph, plan, evaluation, solution),), str(family))
