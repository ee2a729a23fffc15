"""The kind of parallelism by which all devices share each block of a training graph.

A kind of parallelism cuts loops of the nodes over all devices: the batch, or a dim of images.
`Shared` holds the kind, its mesh and the loops that it cuts. It tells how much smaller a value's
part on a device is, so that blocks cut other dims and each has a part on every device, and plans
the graph of all blocks on one mesh under the constraints of the kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.prices.reshard import Resharder, most_joined
from partitioner.ir.graph import Graph
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import Plan
from partitioner.ir.rule import Rule
from partitioner.problem.build import planned_on
from partitioner.search.levels.asked_nodes import on_axes
from partitioner.search.request import Budget, Request
from partitioner.search.spaces.explicit import JointSearch, JointSpace
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import Family, SearchError, families

#: Kinds of parallelism of which each device may run its part in blocks.
SHARED_KINDS = ("dp", "zero1", "zero2", "zero3", "spatial")
#: Of these, the ones that are searched if none is asked for: the first that the graph has.
FREE_KINDS = ("dp", "spatial")


@dataclass(frozen=True)
class Shared:
    """A kind of parallelism over all devices, and what it cuts of a graph."""

    request: Request  #: The request for plans of this kind, without its constraints.
    mesh: Mapping[str, int]  #: Sizes of its mesh axes.
    factors: Mapping[str, Mapping[str, Any]]  #: By axis and node, the factors that are cut.

    @classmethod
    def of(cls, graph: Graph, devices: int, request: Request) -> Shared:
        """The kind that is asked for, or the first that the graph has.

        Raises:
            ConstraintError: The graph has none, or none that the mesh is of.
            SearchError: The mesh is not of the kind that is asked for.
        """
        asked = request.constraints  # pins to devices are honoured in the plans of the kind
        request = replace(request, constraints=on_axes(asked) if asked.names_devices else asked)
        if request.parallel is not None:
            return cls._of(graph, devices, request)
        refusals = []
        for kind in FREE_KINDS:
            try:
                return cls._of(graph, devices, replace(request, parallel=kind))
            except (ConstraintError, SearchError) as error:
                refusals.append(str(error))
        raise ConstraintError("; ".join(refusals))

    @classmethod
    def _of(cls, graph: Graph, devices: int, request: Request) -> Shared:
        request = replace(request, strategy="intra").over(devices)
        assert request.mesh is not None
        return cls(request, request.mesh, request.on(graph).constraints.busy)

    @property
    def kind(self) -> str:
        """Its word."""
        assert self.request.parallel is not None
        return self.request.parallel

    def cuts(self, graph: Graph, value: str) -> Mapping[int, int]:
        """The dims of a value that lie over devices, and over how many each."""
        node = graph.producers[value]
        rule = rule_of(graph, node)
        if not isinstance(rule, Rule):
            return {}
        cuts = {}
        for axis, size in self.mesh.items():
            factors = self.factors.get(axis, {}).get(node.name, frozenset())
            for dim, expr in enumerate(rule.results[node.outputs.index(value)] or ()):
                if not factors.isdisjoint(name for term in expr for name in term):
                    cuts[dim] = size
        return cuts

    def ratio(self, graph: Graph, value: str) -> float:
        """By how many times a value is larger than the largest part of it on a device."""
        shape = graph.types[value].shape
        cuts = self.cuts(graph, value).items()
        return math.prod(shape[dim] / -(-shape[dim] // parts) for dim, parts in cuts)

    def plan(self, graph: Graph, cluster: Cluster, budget: Budget) -> tuple[Family, Plan] | None:
        """The best plan of this kind, whatever its memory; None if the search finds none."""
        roomy = cluster.with_memory(4 * sum(type_.nbytes for type_ in graph.types.values()))
        (family,) = families("intra", len(cluster), self.mesh)
        family = replace(family, name=self.kind)
        try:
            request = self.request.on(graph)
        except ConstraintError:
            return None
        prices = DeviceColumns(graph, Resharder(roomy, most_joined(graph)))
        search = JointSearch(graph, roomy, request, Rules.of(graph), prices)
        plans = JointSpace(search, family, needed=False).search(budget, ()).plans
        if not plans:
            return None
        _, plan = planned_on(graph, cluster, plans[0].plan.groups, plans[0].plan.nodes)
        return family, plan
