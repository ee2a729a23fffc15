"""Price a plan of a piper instance by the definition in `stages.graph`, apart from the search.

A plan is `{"stages": [{"nodes": [ids], "dataParallelDegree", "tensorParallelDegree", "TMPCids":
[[id, name], ...]}, ...]}`, the stages in order, as the authors' program states it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partitioner.solver.formats.json_files import FormatError, as_object, count, objects
from partitioner.solver.stages import flights
from partitioner.solver.stages.graph import Config, PlannedStage, Sharded, StageGraph


@dataclass(frozen=True)
class PlanOutcome:
    """Seconds a sample and bytes a device of each stage, and the rules that the plan breaks."""

    time_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    faults: tuple[str, ...]


def evaluate_plan(graph: StageGraph, plan: Sequence[PlannedStage]) -> PlanOutcome:
    """Price a plan and name every rule that it breaks; without a price if it is not its memory."""
    if faults := _plan_faults(graph, plan):
        return PlanOutcome((), (), tuple(faults))
    many = flights([stage.data_degree for stage in plan])
    held = tuple(_held_bytes(graph, stage, m) for stage, m in zip(plan, many, strict=True))
    return PlanOutcome(
        tuple(_time_s(graph, stage) for stage in plan),
        held,
        tuple(
            f"stage {index} holds {size:.0f} bytes of {graph.limit_bytes:.0f}"
            for index, size in enumerate(held)
            if size > graph.limit_bytes
        ),
    )


def _plan_faults(graph: StageGraph, plan: Sequence[PlannedStage]) -> list[str]:
    faults: list[str] = []
    where: dict[int, int] = {}
    for index, stage in enumerate(plan):
        if stage.data_degree < 1 or graph.microbatches % stage.data_degree:
            faults.append(
                f"stage {index}: data degree {stage.data_degree} does not divide "
                f"{graph.microbatches} micro-batches"
            )
        for node, name in stage.configs.items():
            if where.setdefault(node, index) != index:
                faults.append(f"node {node} is in stages {where[node]} and {index}")
            shards = graph.nodes.get(node, {}).get(stage.tensor_degree)
            if shards is None or name not in {config.name for config in shards.configs}:
                faults.append(f"node {node} on {stage.tensor_degree} devices has no {name!r}")
    if set(where) != set(graph.nodes):
        faults.append("the stages do not hold the instance's nodes")
        return faults
    faults += [f"edge from {u} to {v} leads back" for u, v in graph.edges if where[u] > where[v]]
    devices = sum(stage.data_degree * stage.tensor_degree for stage in plan)
    if devices > graph.devices:
        faults.append(f"{devices} devices are taken, there are {graph.devices}")
    total = sum(stage.data_degree for stage in plan)
    if total > graph.microbatches:
        faults.append(f"data degrees sum to {total}, over {graph.microbatches} micro-batches")
    return faults


def _time_s(graph: StageGraph, stage: PlannedStage) -> float:
    d = stage.data_degree
    sharded = {node: graph.nodes[node][stage.tensor_degree] for node in stage.configs}
    cut = math.fsum(
        size + (sharded[v].sync_in_bytes[u] if v in sharded else sharded[u].sync_out_bytes[v])
        for (u, v), size in graph.edges.items()
        if (u in sharded) != (v in sharded)
    )
    parameters = math.fsum(of.parameter_bytes for of in sharded.values())
    computed = math.fsum(_config(sharded[v], name).time_s for v, name in stage.configs.items())
    moved = 2 * cut / d + 4 * (d - 1) / d * parameters / graph.microbatches
    return moved / graph.bandwidth_bytes_per_s + computed / d


def _held_bytes(graph: StageGraph, stage: PlannedStage, many: int) -> float:
    configs = [
        _config(graph.nodes[node][stage.tensor_degree], name)
        for node, name in stage.configs.items()
    ]
    return math.fsum(config.flying_bytes * many + config.resident_bytes for config in configs)


def _config(sharded: Sharded, name: str) -> Config:
    return next(config for config in sharded.configs if config.name == name)


def to_solution(plan: Sequence[PlannedStage]) -> dict[str, object]:
    """A plan as JSON content."""
    stages = [
        {
            "nodes": sorted(stage.configs),
            "dataParallelDegree": stage.data_degree,
            "tensorParallelDegree": stage.tensor_degree,
            "TMPCids": sorted(stage.configs.items()),
        }
        for stage in plan
    ]
    return {"stages": stages}


def parse_plan(data: Any) -> tuple[PlannedStage, ...]:
    """A plan from JSON content; "TMPCids" may be an object, too.

    Raises:
        FormatError: It is something else.
    """
    stages = objects(as_object(data, "the file"), "stages")
    return tuple(_parse_stage(stage, f"stages[{index}]") for index, stage in enumerate(stages))


def _parse_stage(stage: Mapping[str, Any], where: str) -> PlannedStage:
    data, tensor = (count(stage, f"{kind}ParallelDegree", where) for kind in ("data", "tensor"))
    names: Any = stage.get("TMPCids")
    try:
        pairs = names.items() if isinstance(names, dict) else names
        configs = {int(node): name for node, name in pairs}
        if sorted(configs) == sorted(stage["nodes"]) and not {*map(type, configs.values())} - {str}:
            return PlannedStage(configs, data, tensor)
    except (KeyError, TypeError, ValueError, OverflowError):
        pass  # refused below
    raise FormatError(f"{where} does not name one TMPC for each of its nodes")
