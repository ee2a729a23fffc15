"""A search's choices as a plan, and a plan's decisions as strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place
from partitioner.problem.build import Built
from partitioner.rewrites.graph_writer import chosen
from partitioner.solver import Solution
from partitioner.strategies.derive import Rules


def kept_decision(graph: Graph, plan: Plan | None, rules: Rules, node: Node) -> PlacedNode | None:
    """The strategy of a node in a plan that is kept; None if the plan has none for it."""
    decision = plan.nodes.get(node.name) if plan is not None else None
    if plan is None or decision is None:
        return None
    mesh, rule = plan.groups[decision.group], rules.rule(node)
    sizes = {name: factor.size for name, factor in rule.factors.items()} if rule else {}
    layouts = {name: cut.layout(sizes[name], mesh) for name, cut in decision.cuts.items()}
    return place(graph, node, mesh, layouts, rule)


def decided(graph: Graph, cluster: Cluster, built: Built, solution: Solution) -> tuple[Graph, Plan]:
    """The plan of a solution, and the graph that it is for."""
    plans = built.node_plans(graph, solution.chosen)
    order = solution.order or range(len(graph.nodes))
    ordered = {name: plans[name] for i in order if (name := graph.nodes[i].name) in plans}
    return planned_on(graph, cluster, built.groups, ordered)


def planned_on(
    graph: Graph, cluster: Cluster, groups: Sequence[DeviceMesh], decided: Mapping[str, NodePlan]
) -> tuple[Graph, Plan]:
    """The plan of some decisions, in their order, and the graph that it is for."""
    left = chosen(graph, decided) if graph.optional else graph
    names = [name for name in decided if name in left.by_name]
    used = sorted({decided[name].group for name in names})
    index = {group: position for position, group in enumerate(used)}
    nodes = {n: NodePlan(index[decided[n].group], decided[n].cuts) for n in names}
    return left, Plan(left.digest, cluster.to_data(), tuple(groups[g] for g in used), nodes)
