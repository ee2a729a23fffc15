"""The split of a plan, as figures and as a sentence: operators cut, replicated or placed whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_stored, is_view
from partitioner.ir.ops.estimate import estimated_flops
from partitioner.ir.plan import Plan
from partitioner.ir.rule import Rule

#: Least share of all FLOPs at which operators without a rule are named.
WORTH_NAMING = 0.01


def facts(plan: Plan) -> dict[str, Any]:
    """The numbers of nodes, of cut and of replicated nodes, and the meshes of both."""
    cut = [plan.groups[node.group] for node in plan.nodes.values() if node.cuts]
    whole = [plan.groups[node.group] for node in plan.nodes.values() if not node.cuts]
    replicated = [group for group in whole if group.axes]
    return {
        "nodes": len(plan.nodes),
        "cut_nodes": len(cut),
        "cut_over": list(map(str, dict.fromkeys(cut))),
        "replicated_nodes": len(replicated),
        "replicated_on": list(map(str, dict.fromkeys(replicated))),
    }


def kept_whole(graph: Graph, rules: Mapping[str, Rule | str]) -> dict[str, Any]:
    """The operators without a rule, most FLOPs first, and their (estimated) share of all FLOPs."""
    counts, flops, known = Counter[str](), Counter[str](), 0.0
    for node in graph.nodes:
        rule = rules.get(node.name)
        if isinstance(rule, Rule):
            known += rule.flops
        elif not (is_view(node) or is_stored(node)):
            counts[node.op] += 1
            flops[node.op] += int(estimated_flops(graph, node))
    whole = flops.total()
    return {
        "kept_whole": {op: counts[op] for op in sorted(counts, key=lambda op: (-flops[op], op))},
        "kept_whole_flops_share": whole / (whole + known) if whole else 0.0,
    }


def sentence(summary: Mapping[str, Any]) -> str:
    """The split of a plan, without a full stop, from the facts of its summary."""
    share, counts = summary["kept_whole_flops_share"], summary["kept_whole"]
    if summary["devices"] == 1 or share < WORTH_NAMING:
        return _split(summary)
    named = ", ".join(f"{count} x {op}" for op, count in list(counts.items())[:3])
    more = f" and {len(counts) - 3} more operators" if len(counts) > 3 else ""
    return (
        f"{_split(summary)}; {named}{more} cannot be cut for want of a rule: {units.share(share)} "
        "of all FLOPs (estimated)"
    )


def _split(summary: Mapping[str, Any]) -> str:
    used, nodes, cut = summary["devices_used"], summary["nodes"], summary["cut_nodes"]
    if summary["devices"] == 1:
        return "there is one device: nothing to split"
    if not nodes:
        return "the model has no operator: nothing to split"
    if cut:
        share = units.share(summary["sharded_flops_share"])
        over = "; ".join(summary["cut_over"])
        return f"{cut} of {nodes} operators cut over {over}: {share} of the splittable FLOPs"
    if used == 1:
        return _nothing(summary)
    if summary["strategy"] == "copies":
        return f"whole operators in whole copies on {used} devices; no operator is cut"
    count, replicated = summary["replicated_nodes"], "; ".join(summary["replicated_on"])
    if count == nodes and len(summary["replicated_on"]) == 1:
        return (
            f"{_nothing(summary)}; the whole model is replicated on {replicated}; "
            "one device alone does as much"
        )
    some = f", {count} of them replicated on {replicated}" if replicated else ""
    return f"whole operators placed on {used} devices{some}; no operator is cut"


def _nothing(summary: Mapping[str, Any]) -> str:
    if summary["pinned"]:
        return "nothing was split: no plan within the constraints that splits was found cheaper"
    if summary["status"] != "optimal":
        return (
            "nothing was split: no plan that splits was found cheaper, and none was proven dearer"
        )
    return "nothing was split because communication and launches would cost more"
