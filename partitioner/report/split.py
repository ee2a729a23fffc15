"""The split of a plan, as figures and as a sentence: operators cut, replicated or placed whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partitioner import units
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan


def facts(plan: Plan) -> dict[str, Any]:
    """The numbers of nodes, of cut and of replicated nodes, and the meshes of the last two.

    A node that runs whole on a group of several devices is replicated: each computes all of it.
    """
    cut = [plan.groups[node.group] for node in plan.nodes.values() if node.cuts]
    whole = [plan.groups[node.group] for node in plan.nodes.values() if not node.cuts]
    return {
        "nodes": len(plan.nodes),
        "cut_nodes": len(cut),
        "cut_over": _names(cut),
        "replicated_nodes": sum(1 for group in whole if group.axes),
        "replicated_on": _names([group for group in whole if group.axes]),
    }


def _names(groups: list[DeviceMesh]) -> list[str]:
    return [str(group) for group in dict.fromkeys(groups)]


def sentence(summary: Mapping[str, Any]) -> str:
    """The split of a plan, without a full stop, from the facts of its summary."""
    used, nodes, cut = summary["devices_used"], summary["nodes"], summary["cut_nodes"]
    if summary["devices"] == 1:
        return "there is one device: nothing to split"
    if cut:
        share = units.share(summary["sharded_flops_share"])
        over = "; ".join(summary["cut_over"])
        return f"{cut} of {nodes} operators cut over {over}: {share} of the splittable FLOPs"
    if used == 1:
        return _nothing(summary)
    count, replicated = summary["replicated_nodes"], "; ".join(summary["replicated_on"])
    if count == nodes and len(summary["replicated_on"]) == 1:
        return (
            f"{_nothing(summary)}; the whole model is replicated on {replicated}; "
            "one device would be as good"
        )
    some = f", {count} of them replicated on {replicated}" if replicated else ""
    return f"whole operators placed on {used} devices{some}; no operator is cut"


def _nothing(summary: Mapping[str, Any]) -> str:
    if summary["pinned"]:
        return "nothing was split: no plan within the constraints that splits was found cheaper"
    return "nothing was split because communication and launches would cost more"
