"""What a plan splits: what is cut, replicated or placed, in figures and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partitioner import units
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan


def facts(plan: Plan) -> dict[str, Any]:
    """Numbers of nodes and of cut nodes, the meshes they are cut over, and those that replicate.

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


def sentence(found: Mapping[str, Any]) -> str:
    """The split of a plan, from the facts of its summary."""
    used, nodes, cut = found["devices_used"], found["nodes"], found["cut_nodes"]
    if found["devices"] == 1:
        return "there is one device: nothing to split"
    if cut:
        share = units.share(found["sharded_flops_share"])
        over = "; ".join(found["cut_over"])
        return f"{cut} of {nodes} operators cut over {over}: {share} of the splittable FLOPs"
    replicated = "; ".join(found["replicated_on"])
    if used == 1:
        return _nothing(found)
    if found["replicated_nodes"] == nodes and len(found["replicated_on"]) == 1:
        return (
            f"{_nothing(found)}; the whole model is replicated on {replicated}; "
            "one device would be as good"
        )
    some = f", {found['replicated_nodes']} of them replicated on {replicated}" if replicated else ""
    return f"whole operators placed on {used} devices{some}; no operator is cut"


def _nothing(found: Mapping[str, Any]) -> str:
    if found["pinned"]:
        why = ": no plan within the constraints that splits was found cheaper"
    else:
        why = " because communication and launches would cost more"
    return f"nothing was split{why}"
