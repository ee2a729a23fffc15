"""Tell whether splitting pays on this machine: a plan beside one process that has all its cores."""

from __future__ import annotations

from partitioner.cost_model.cluster.resolve import one_process
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import one_device
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.prices.compute import Sources
from partitioner.cost_model.profiles.database import whole_key
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, resolve
from partitioner.problem.decode import planned_on

#: Largest share of the seconds that may come from a datasheet for a verdict.
MOST_UNKNOWN = 0.05
#: Median error of predicted seconds (docs/performance.md, "Predictions beside runs"): a plan that
#: gains less may lose.
ERROR = 0.10


def whole_machine_notes(
    graph: Graph,
    cluster: Cluster,
    cost: float,
    priced_by: Sources,
    objective: str,
) -> tuple[str, ...]:
    """A sentence for a plan on several processes of this machine; for another plan none.

    Where the executor computes several operators in one kernel, the model must have been measured
    as a whole; else the seconds of its operators are added up. Nothing is compared for "memory".
    """
    whole = one_process(cluster)
    if whole is None or objective == "memory":
        return ()
    if _is_unknown(priced_by):
        return (_unknown(f"measures what this plan's {len(cluster)} processes take", len(cluster)),)
    profile = whole.devices[0].profile
    threads = profile.threads if profile else 1
    measures = f"measures one process with {threads} threads"
    if executor_of(graph).fuses:
        entry = profile.wholes.get(whole_key(graph.digest)) if profile else None
        if entry is None:
            return (_unknown(measures, len(cluster)),)
        return (_verdict(threads, entry.seconds, cost),)
    alone, plan = planned_on(
        graph, whole, (DeviceMesh.single(0),), {node.name: NodePlan(0) for node in graph.nodes}
    )
    if _is_unknown(Sources.of(alone, resolve(alone, plan), whole)):
        return (_unknown(measures, 1),)
    evaluation = one_device(alone, whole, 0)
    if not evaluation.fits_exactly:
        return ()
    return (_verdict(threads, evaluation.cost(objective), cost),)


def _is_unknown(sources: Sources) -> bool:
    return sources.shares().get("datasheet", 0.0) > MOST_UNKNOWN


def _unknown(measures: str, devices: int) -> str:
    return (
        "whether splitting pays on this machine is not known: "
        f"`partition profile MODEL --devices {devices}` {measures}"
    )


def _verdict(threads: int, alone_s: float, cost: float) -> str:
    compared = (
        f"one process with {threads} threads takes {units.seconds(alone_s)} for what this plan "
        f"takes {units.seconds(cost)}"
    )
    if cost >= alone_s:
        return f"{compared}: splitting does not pay on this machine"
    if cost > alone_s * (1 - ERROR):
        return (
            f"{compared}: splitting does not surely pay on this machine, because predictions are "
            f"off by {units.share(ERROR)}"
        )
    return f"{compared}: splitting pays on this machine"
