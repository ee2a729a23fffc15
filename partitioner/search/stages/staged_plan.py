"""The plan of a graph in stages, made from shardings, what it costs and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.executors import executor_of
from partitioner.ir.mesh import DeviceMesh, numbers
from partitioner.ir.plan import NodePlan, Pipeline, Plan
from partitioner.problem.memory_kinds import Holdings
from partitioner.search.outcome import Candidate, of_results
from partitioner.search.stages.figures import Sharding
from partitioner.solver.joint.shortage import short_of_memory
from partitioner.solver.outcome import Infeasible
from partitioner.solver.referee import Objective

#: A schedule by name, or the rows of its table.
Table = str | tuple[str, ...]


def staged_plan(
    shardings: Sequence[Sharding],
    cluster: Cluster,
    stages: Mapping[str, int],
    devices: Sequence[tuple[int, ...]],
    name: Table,
    micro_batches: int,
) -> Plan:
    """The plan of nodes in stages with shardings of their own, in the order of the first one."""
    groups: dict[tuple[int, int], int] = {}
    nodes: dict[str, NodePlan] = {}
    meshes: list[DeviceMesh] = []
    of_group: list[int] = []
    for node in shardings[0].plan.nodes:
        stage = stages[node]
        sharding = shardings[stage]
        decision = sharding.plan.nodes[node]
        key = stage, decision.group
        if key not in groups:
            groups[key] = len(meshes)
            mesh = sharding.plan.groups[decision.group]
            own = tuple(devices[stage][device] for device in mesh.devices)
            meshes.append(DeviceMesh(mesh.axes, own))
            of_group.append(stage)
        nodes[node] = NodePlan(groups[key], decision.cuts)
    pipeline, of = Pipeline(name, micro_batches), tuple(of_group)
    digest = shardings[0].graph.digest
    return Plan(digest, cluster.to_data(), tuple(meshes), nodes, pipeline=pipeline, stages=of)


def too_large(best: Candidate, cluster: Cluster) -> Infeasible:
    """The refusal of the best cut that was found, which does not fit."""
    evaluation, plan = best.evaluation, best.plan
    over = max(evaluation.short_bytes, key=evaluation.short_bytes.__getitem__)
    peak, inside = evaluation.needed_peak(over), ""
    in_kernels = evaluation.needed_bytes[over] > evaluation.held_bytes[over]
    if (stages := _stages_on(plan, over, peak.at)) and plan.kind == "pipeline":
        inside = f" of stage{'s' if len(stages) > 1 else ''} {numbers(stages)}"
    if in_kernels:
        inside += f" in {executor_of(best.graph).holder}"
    holdings = Holdings.of(best.graph, plan, cluster)
    parts = holdings.text(over, exact=True, headroom=not in_kernels)
    held = f"without them it holds {parts}" if in_kernels else f"there it holds {parts}"
    results = of_results(best.graph, plan, cluster, evaluation, over)
    return short_of_memory(
        evaluation.needed_bytes[over],
        evaluation.limit_bytes[over],
        over,
        peak.at,
        inside=inside,
        more=f"; {held}{results}; this is {best.space}",
    )


def _stages_on(plan: Plan, device: int, task: str) -> tuple[int, ...]:
    """The stage of a node or, where the task is none, the stages on a device, ascending."""
    if task in plan.nodes:
        return (plan.stages[plan.nodes[task].group],)
    groups = zip(plan.groups, plan.stages, strict=True)
    return tuple(sorted({stage for mesh, stage in groups if device in mesh.devices}))


def figure(candidate: Candidate, objective: Objective) -> tuple[int, float]:
    """Bytes above the limits, then the cost of a step."""
    evaluation = candidate.evaluation
    return sum(evaluation.short_bytes.values()), step_cost(evaluation, objective)


def step_cost(evaluation: Evaluation, objective: Objective) -> float:
    """Cost of a step in micro-batches: bytes for the objective memory, else seconds."""
    return evaluation.cost("memory") if objective == "memory" else evaluation.step_s
