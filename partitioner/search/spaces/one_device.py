"""The whole graph on one device, where a device that is busy alone is faster than one of several.

Joint problems price every operator as it is while all processes of a machine are busy. A plan that
keeps one of them busy costs less (see `Cluster.beside`), so it competes under its own price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import best_single, evaluate
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan
from partitioner.problem.build import planned_on
from partitioner.rewrites.graph_writer import chosen
from partitioner.search.outcome import Candidate, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.solver.outcome import Solution
from partitioner.strategies.spaces import Family


def shortage(graph: Graph, cluster: Cluster) -> tuple[bool, bool]:
    """Tell whether one device, and all of them together, have too little memory for a graph.

    If all have, no plan fits: at each node all values that live are somewhere, and one device holds
    each of them once.
    """
    device, alone = best_single(graph, cluster, "memory")
    held = alone.exact_bytes[device]
    together = sum(spec.memory_bytes for spec in cluster.devices)
    return not alone.fits_exactly, held - len(cluster) > together


@dataclass(frozen=True)
class OneDeviceSpace:
    """The plans that run the whole graph on one device."""

    graph: Graph
    cluster: Cluster
    request: Request

    @property
    def is_faster(self) -> bool:
        """Tell whether it is to be searched before the joint spaces."""
        return self.request.objective == "latency" and self.is_free and self._is_priced_apart

    @property
    def least(self) -> float:
        """No plan of it costs less; infinite where the bounds of joint problems cover them."""
        goal = self.request.objective
        if goal == "memory" or self._is_on_a_mesh or not self._is_priced_apart:
            return math.inf
        _, evaluation = best_single(chosen(self.graph, frozenset()), self.cluster, goal)
        # what optional nodes compute again need not be held
        may_fit = evaluation.fits_exactly or self.graph.optional
        return evaluation.cost(goal) if may_fit else math.inf

    @property
    def is_free(self) -> bool:
        """Tell whether the request and the graph allow a plan of one device as it is."""
        return not (self._is_on_a_mesh or self.request.constraints.bound or self.graph.optional)

    @property
    def _is_on_a_mesh(self) -> bool:
        """Tell whether all plans of the request have every device in one mesh."""
        asked = self.request
        return asked.strategy == "intra" or asked.mesh is not None or asked.parallel is not None

    @property
    def _is_priced_apart(self) -> bool:
        """Tell whether a device that is busy alone has seconds of its own."""
        return self.cluster.beside((0,)) != self.cluster

    def search(self, _budget: Budget, _others: Sequence[SpaceResult]) -> SpaceResult:
        """The plan on the best device; none if it does not fit there, or its results elsewhere."""
        device, alone = best_single(self.graph, self.cluster, self.request.objective)
        if not alone.fits:
            return SpaceResult()
        mesh = (DeviceMesh.single(device),)
        decided = {node.name: NodePlan(0, {}) for node in self.graph.nodes}
        graph, plan = planned_on(self.graph, self.cluster, mesh, decided)
        evaluation = evaluate(graph, plan, self.cluster)
        if not evaluation.fits_exactly:
            return SpaceResult()
        cost = evaluation.cost(self.request.objective)
        solution = Solution((), cost, cost, "optimal", None, "one device")
        family = Family("single", mesh, mesh, symmetric=False)
        return SpaceResult((Candidate(family, graph, plan, evaluation, solution),), str(family))
