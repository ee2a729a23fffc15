"""The reasons why a plan has no other strategies of some nodes."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.foundations import units
from partitioner.ir.graph import Node
from partitioner.report.planned import Planned
from partitioner.report.schema import contains
from partitioner.search.neighbourhood import why_not_improved


def not_taken(result: Planned, nodes: Sequence[Node]) -> str:
    """Say why a plan has no other strategy of some nodes, with which its step would be shorter."""
    bound = list(dict.fromkeys(text for node in nodes for text in constraints_on(result, node)))
    cert = result.plan.certificate
    if result.objective != "throughput":
        return f"a shorter step was not asked for: the plan's objective is {result.objective}"
    if bound:
        return f"constrained by {'; '.join(bound)}"
    if cert is None:
        return "the plan was not searched for"
    if kind := why_not_improved(result.graph, result.plan, result.cluster):
        return f"changes of single operators are not searched of plans {kind}"
    gap = f"a gap of {units.share(cert.gap)}"
    if cert.status == "time_limit":
        return f"the time limit ended the search with {gap}: a longer --time-limit may find it"
    ended = f"the search ended with {gap}"
    return f"{ended}: a smaller --gap or a longer --time-limit may find it"


def constraints_on(result: Planned, node: Node) -> list[str]:
    """List what the request asked for that leaves out strategies of a node."""
    position = result.graph.order[node.name]
    bound = result.summary.get("bound_by", {})
    return [text for text, nodes in bound.items() if contains(nodes, position)]
