"""How all devices share each block of a graph: each runs its part, on one mesh.

A kind of parallelism, pins of tensors, named dims or a mesh cut loops of the nodes over all
devices. `Shared` holds the request, its mesh and the loops that are cut. It tells how much smaller
a value's part on a device is, so that blocks cut other dims and each has a part on every device,
and plans the graph of all blocks on the mesh under the constraints of the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from glob import escape
from typing import Any

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.prices.reshard import Resharder, most_joined
from partitioner.ir.graph import Graph
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import Plan
from partitioner.ir.rule import Rule
from partitioner.problem.build import planned_on
from partitioner.rewrites.block_graph import BlockGraph
from partitioner.search.levels.asked_nodes import on_axes
from partitioner.search.request import Budget, Request
from partitioner.search.spaces.explicit import JointSearch, JointSpace
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.derive import Rules
from partitioner.strategies.named_dims import in_copies
from partitioner.strategies.spaces import Family, SearchError, families

#: Kinds of parallelism whose constraints say which loops they cut.
SHARED_KINDS = ("dp", "zero1", "zero2", "zero3", "spatial")
#: Of these, the ones that are searched in training if none is asked for: the first that the graph
#: has.
FREE_KINDS = ("dp", "spatial")


def is_shared(request: Request) -> bool:
    """Test whether a request says how devices share nodes."""
    asked = request.constraints
    pins = any(not pin.devices for pin in asked.pins)
    kinds = request.parallel is not None or request.mesh is not None
    return kinds or pins or asked.named is not None or request.strategy == "intra"


def on_blocks(asked: Constraints, graph: Graph, cut: BlockGraph) -> Constraints:
    """Pins and named dims of a graph, as those of the copies in its blocks."""

    def copies(name: str) -> tuple[str, ...]:
        return name, *cut.copies.get(name, ())

    def values(name: str) -> Iterator[str]:
        return (copy for copy in copies(name) if copy in cut.graph.types)

    pins = []
    for pin in asked.pins:
        if pin.tensor:
            pins += [replace(pin, tensor=copy) for copy in values(pin.tensor)]
            continue
        named = [node.name for node in graph.nodes if pin.names(node)]
        nodes = tuple(escape(copy) for name in named for copy in copies(name))
        pins.append(replace(pin, op="", nodes=nodes))
    named_dims = asked.named and in_copies(asked.named, graph, values)
    return replace(asked, pins=tuple(pins), named=named_dims)


@dataclass(frozen=True, eq=False)
class Shared:
    """A mesh of all devices, and what is cut over it of a graph."""

    graph: Graph  #: The graph, not in blocks.
    request: Request  #: The request on that mesh, without pins to devices.
    mesh: Mapping[str, int]  #: Sizes of its axes.
    factors: Mapping[str, Mapping[str, Any]]  #: By axis and node, the factors that are cut.

    @classmethod
    def ways(
        cls, graph: Graph, cluster: Cluster, request: Request, budget: Budget
    ) -> Iterator[Shared]:
        """The kind that is asked for, or the first that the graph has.

        Where that does not say what it cuts, and in inference: also what the best plans of the
        graph cut that the request leaves, whatever their memory.

        Raises:
            ConstraintError: The graph has none, or none that the mesh is of.
            SearchError: The mesh is not of the kind that is asked for.
        """
        devices, is_asked = len(cluster), is_shared(request)
        asked = on_axes(request.constraints)  # pins to devices are honoured in each plan
        request = replace(request, strategy="intra", constraints=asked)
        if request.parallel in SHARED_KINDS:
            yield cls.of(graph, devices, request)
            return
        refusals = []
        is_open = request.parallel is None and bool(graph.backward or not is_asked)
        for kind in FREE_KINDS if is_open else ():
            try:
                one = cls.of(graph, devices, replace(request, parallel=kind))
            except (ConstraintError, SearchError) as error:
                refusals.append(str(error))
            else:
                yield one
                break
        if is_asked or not graph.backward:
            yield from cls._planned(graph, cluster, request, budget)
        elif len(refusals) == len(FREE_KINDS):
            raise ConstraintError("; ".join(refusals))

    @classmethod
    def of(cls, graph: Graph, devices: int, request: Request) -> Shared:
        """The kind of parallelism that a request names; it raises as `ways`."""
        request = replace(request, strategy="intra").over(devices)
        assert request.mesh is not None
        return cls(graph, request, request.mesh, request.on(graph).constraints.busy)

    @classmethod
    def _planned(
        cls, graph: Graph, cluster: Cluster, request: Request, budget: Budget
    ) -> Iterator[Shared]:
        """Give what plans of the whole graph cut on each mesh.

        They are the best plan, and that of fewest bytes.
        """
        devices = len(cluster)
        for on_mesh in request.over(devices).on_meshes(devices):
            for family in families("intra", devices, on_mesh.mesh):
                mesh = dict(family.groups[0].axes)
                one = replace(on_mesh, mesh=mesh)
                known: list[object] = []
                for objective in dict.fromkeys((request.objective, "memory")):
                    of_goal = replace(one.on(graph), objective=objective)
                    plan = _best(graph, cluster, of_goal, family, budget)
                    if plan is None:
                        continue
                    factors = on_axes(Constraints(plan=plan)).busy
                    if factors not in known:
                        known.append(factors)
                        yield cls(graph, one, mesh, factors)

    @property
    def kind(self) -> str:
        """The word of its kind of parallelism; "intra" if it has none."""
        return self.request.parallel or "intra"

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

    def constants_share(self, graph: Graph) -> float:
        """The share of all constants that a device has, by the first reader of each."""
        held: dict[str, float] = {}
        for node in graph.nodes:
            rule = rule_of(graph, node)
            for slot, value in enumerate(node.inputs):
                if value not in graph.constants or value in held:
                    continue
                dims = rule.operands[slot] if isinstance(rule, Rule) else None
                names = {name for expr in dims or () for term in expr for name in term}
                parts = math.prod(
                    size
                    for axis, size in self.mesh.items()
                    if not names.isdisjoint(self.factors.get(axis, {}).get(node.name, ()))
                )
                held[value] = graph.types[value].nbytes / parts
        total = sum(graph.types[value].nbytes for value in held)
        return sum(held.values()) / total if total else 1.0

    def ratio(self, graph: Graph, value: str) -> float:
        """By how many times a value is larger than the largest part of it on a device."""
        shape = graph.types[value].shape
        cuts = self.cuts(graph, value).items()
        return math.prod(shape[dim] / -(-shape[dim] // parts) for dim, parts in cuts)

    def plan(self, cut: BlockGraph, cluster: Cluster, budget: Budget) -> tuple[Family, Plan] | None:
        """The best plan of a graph of blocks, whatever its memory; None if none is found."""
        (family,) = families("intra", len(cluster), self.mesh)
        family = replace(family, name=self.kind)
        asked = on_blocks(self.request.constraints, self.graph, cut)
        try:
            request = replace(self.request, constraints=asked).on(cut.graph)
        except ConstraintError:
            return None
        busy = {
            axis: {
                copy: factors
                for name, factors in nodes.items()
                for copy in (name, *cut.copies.get(name, ()))
            }
            for axis, nodes in self.factors.items()
        }
        constraints = replace(request.constraints, busy={**busy, **request.constraints.busy})
        request = replace(request, constraints=constraints)
        plan = _best(cut.graph, cluster, request, family, budget)
        return None if plan is None else (family, plan)


def _best(
    graph: Graph, cluster: Cluster, request: Request, family: Family, budget: Budget
) -> Plan | None:
    """The best plan on a mesh, whatever its memory; None if none is found."""
    roomy = cluster.with_memory(4 * sum(type_.nbytes for type_ in graph.types.values()))
    prices = DeviceColumns(graph, Resharder(roomy, most_joined(graph)))
    search = JointSearch(graph, roomy, request, Rules.of(graph), prices)
    plans = JointSpace(search, family, needed=False).search(budget, ()).plans
    if not plans:
        return None
    return planned_on(graph, cluster, plans[0].plan.groups, plans[0].plan.nodes)[1]
