"""Decisions as a plan, and what a plan decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partitioner.cost_model.cluster import Cluster
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.offers import chosen
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place
from partitioner.strategies import Rules


def planned_on(
    graph: Graph, cluster: Cluster, groups: Sequence[DeviceMesh], decided: Mapping[str, NodePlan]
) -> tuple[Graph, Plan]:
    """Decisions in the order of the plan as a plan, and the graph that it is for."""
    left = chosen(graph, decided) if graph.optional else graph
    names = [name for name in decided if name in left.by_name]
    used = sorted({decided[name].group for name in names})
    index = {group: position for position, group in enumerate(used)}
    nodes = {n: NodePlan(index[decided[n].group], decided[n].cuts) for n in names}
    return left, Plan(left.digest, cluster.to_data(), tuple(groups[g] for g in used), nodes)


def planned_node(graph: Graph, plan: Plan | None, rules: Rules, node: Node) -> PlacedNode | None:
    """What a plan does with a node; None if it does not say."""
    decision: NodePlan | None = plan.nodes.get(node.name) if plan is not None else None
    if plan is None or decision is None:
        return None
    mesh: DeviceMesh = plan.groups[decision.group]
    rule = rules.rule(node)
    sizes = {name: factor.size for name, factor in rule.factors.items()} if rule else {}
    layouts = {name: cut.layout(sizes[name], mesh) for name, cut in decision.cuts.items()}
    return place(graph, node, mesh, layouts, rule)
