"""Price a plan of a piper instance by the definition in `piper`, apart from the search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partitioner.solver.formats.piper import Config, Instance, Sharded
from partitioner.solver.stages import flights


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan: the config of each of its nodes, and its degrees."""

    configs: Mapping[int, str]
    data_degree: int
    tensor_degree: int


@dataclass(frozen=True)
class PlanOutcome:
    """What a plan amounts to: seconds a sample and bytes of each stage, and broken rules."""

    time_s: tuple[float, ...]
    held_bytes: tuple[float, ...]
    faults: tuple[str, ...]


def evaluate_plan(instance: Instance, plan: Sequence[PlannedStage]) -> PlanOutcome:
    """Price a plan by the definition above and name every rule that it breaks."""
    degrees = [stage.data_degree for stage in plan]
    times, held = [], []
    faults = _plan_faults(instance, plan)
    if not faults:
        for index, (stage, many) in enumerate(zip(plan, flights(degrees), strict=True)):
            times.append(_time_s(instance, stage))
            held.append(_held_bytes(instance, stage, many))
            if held[-1] > instance.limit_bytes:
                faults.append(
                    f"stage {index} holds {held[-1]:.0f} bytes of {instance.limit_bytes:.0f}"
                )
    return PlanOutcome(tuple(times), tuple(held), tuple(faults))


def _plan_faults(instance: Instance, plan: Sequence[PlannedStage]) -> list[str]:
    faults: list[str] = []
    where: dict[int, int] = {}
    for index, stage in enumerate(plan):
        if stage.data_degree < 1 or instance.microbatches % stage.data_degree:
            faults.append(
                f"stage {index}: data degree {stage.data_degree} does not divide "
                f"{instance.microbatches} micro-batches"
            )
        for node, name in stage.configs.items():
            if where.setdefault(node, index) != index:
                faults.append(f"node {node} is in stages {where[node]} and {index}")
            shards = instance.nodes.get(node, {}).get(stage.tensor_degree)
            if shards is None or name not in {config.name for config in shards.configs}:
                faults.append(f"node {node} on {stage.tensor_degree} devices has no {name!r}")
    if set(where) != set(instance.nodes):
        faults.append("the stages do not hold the instance's nodes")
        return faults
    faults += [f"edge from {u} to {v} leads back" for u, v in instance.edges if where[u] > where[v]]
    devices = sum(stage.data_degree * stage.tensor_degree for stage in plan)
    if devices > instance.devices:
        faults.append(f"{devices} devices are taken, there are {instance.devices}")
    total = sum(stage.data_degree for stage in plan)
    if total > instance.microbatches:
        faults.append(f"data degrees sum to {total}, over {instance.microbatches} micro-batches")
    return faults


def _time_s(instance: Instance, stage: PlannedStage) -> float:
    own, d = stage.configs, stage.data_degree
    sharded = {node: instance.nodes[node][stage.tensor_degree] for node in own}
    cut = math.fsum(
        size + (sharded[v].sync_in_bytes[u] if v in own else sharded[u].sync_out_bytes[v])
        for (u, v), size in instance.edges.items()
        if (u in own) != (v in own)
    )
    parameters = math.fsum(of.parameter_bytes for of in sharded.values())
    computed = math.fsum(_config(sharded[node], name).time_s for node, name in own.items())
    moved = 2 * cut / d + 4 * (d - 1) / d * parameters / instance.microbatches
    return moved / instance.bandwidth_bytes_per_s + computed / d


def _held_bytes(instance: Instance, stage: PlannedStage, many: int) -> float:
    configs = [
        _config(instance.nodes[node][stage.tensor_degree], name)
        for node, name in stage.configs.items()
    ]
    return math.fsum(config.flying_bytes * many + config.resident_bytes for config in configs)


def _config(sharded: Sharded, name: str) -> Config:
    return next(config for config in sharded.configs if config.name == name)
