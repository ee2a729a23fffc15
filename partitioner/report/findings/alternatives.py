"""The reasons why a plan has no other strategies of some nodes."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.foundations import units
from partitioner.ir.graph import Node
from partitioner.report.planned import Planned
from partitioner.report.schema import contains


def not_taken(result: Planned, nodes: Sequence[Node], better: str = "throughput") -> str:
    """Say why a plan has no other strategy of some nodes, with which an objective would be better.

    The objective is that of the plan, or `throughput` of a change whose step is known.
    """
    bound = list(dict.fromkeys(text for node in nodes for text in constraints_on(result, node)))
    cert = result.plan.certificate
    if result.objective != better:
        return f"a shorter step was not asked for: the plan's objective is {result.objective}"
    if bound:
        return f"constrained by {'; '.join(bound)}"
    if cert is None:
        return "the plan was not searched for"
    if result.plan.blocks:
        return "changes of single operators are not searched of plans in blocks"
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
