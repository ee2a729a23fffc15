"""Whether splitting pays on this machine: a plan beside one process that has all its cores."""

from __future__ import annotations

from partitioner import units
from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.compute import Sources
from partitioner.cost_model.evaluate import one_device
from partitioner.cost_model.resolve import one_process
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, resolve
from partitioner.problem.decode import planned_on

#: Largest share of the seconds that may come from a datasheet for a verdict.
MOST_UNKNOWN = 0.05


def whole_machine_notes(
    graph: Graph,
    cluster: Cluster,
    cost: float,
    objective: str,
    micro_batches: int | None = None,
) -> tuple[str, ...]:
    """One sentence, for a plan on several processes of this machine; else none.

    Args:
        graph: The graph of the plan.
        cluster: Its devices.
        cost: Its predicted seconds.
        objective: "throughput" or "latency"; "memory" is not compared.
        micro_batches: Of a step of the plan, which runs the graph once for each; None without.
    """
    whole = one_process(cluster)
    if whole is None or objective == "memory":
        return ()
    threads = whole.devices[0].profile.threads if whole.devices[0].profile else 1
    alone, plan = planned_on(
        *(graph, whole, (DeviceMesh.single(0),)), {node.name: NodePlan(0) for node in graph.nodes}
    )
    sources = Sources.of(alone, resolve(alone, plan), whole)
    if sources.shares().get("datasheet", 0.0) > MOST_UNKNOWN:
        note = (
            "whether splitting pays on this machine is not known: "
            f"`partition profile MODEL --devices 1` measures one process with {threads} threads"
        )
        return (note,)
    evaluation = one_device(alone, whole, 0, micro_batches)
    alone_s = evaluation.cost(objective)
    if not evaluation.fits_exactly:
        return ()
    pays = "pays" if cost < alone_s else "does not pay"
    note = (
        f"one process with {threads} threads takes {units.seconds(alone_s)} for what this plan "
        f"takes {units.seconds(cost)}: splitting {pays} on this machine"
    )
    return (note,)
