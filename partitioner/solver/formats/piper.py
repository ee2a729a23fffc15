"""Pipeline planning instances of msr-fiddle/piper: their meaning, their reader, their referee.

Tarnawski, Narayanan, Phanishayee: "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021. A file is JSON:

    {"maxDevices": k, "maxMemoryPerDevice": bytes, "bandwidth": bytes a second, "mbsInBatch": n,
     "nodes": [{"id", "TMPCs": {"t": [{"id", "timePerSample", "parameterSize", "memoryUsageA",
                "memoryUsageB", "syncTimeFw": {"u": bytes}, "syncTimeBw": {"v": bytes}}]}}],
     "edges": [{"sourceId", "destId", "communicationCost"}]}

A TMPC is a way to run a node on t devices, for instance with its activations computed again: a
`Config` of `solver.stages.graph`, which says what a plan costs. The referee prices plans by that
definition, apart from the search. A plan is

    {"stages": [{"nodes": [ids], "dataParallelDegree", "tensorParallelDegree",
                 "TMPCids": [[id, name], ...]}, ...]}

with the stages in order, as the authors' program states it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from partitioner.solver.formats.json_files import (
    FormatError,
    as_object,
    by_id,
    count,
    edges,
    number,
    objects,
)
from partitioner.solver.stages.graph import Config, PlannedStage, Sharded, StageGraph
from partitioner.solver.stages.model import flights


def parse(data: Any) -> StageGraph:
    """A graph from JSON content."""
    top = as_object(data, "the file")
    bandwidth = number(top, "bandwidth", "the file")
    if not bandwidth:
        raise FormatError("'bandwidth' is 0")
    nodes = by_id(top)
    costs: dict[tuple[int, int], float] = {}
    for source, target, edge in edges(top, nodes):
        where = f"the edge from {source} to {target}"
        if (source, target) in costs:
            raise FormatError(f"{where} appears twice")
        costs[source, target] = number(edge, "communicationCost", where)
    before: dict[int, list[int]] = {name: [] for name in nodes}
    after: dict[int, list[int]] = {name: [] for name in nodes}
    for source, target in costs:
        before[target].append(source)
        after[source].append(target)
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        cycle = " -> ".join(map(str, error.args[1]))
        raise FormatError(f"the edges form a cycle: {cycle}") from None
    return StageGraph(
        devices=count(top, "maxDevices"),
        limit_bytes=number(top, "maxMemoryPerDevice", "the file"),
        bandwidth_bytes_per_s=bandwidth,
        microbatches=count(top, "mbsInBatch"),
        nodes={v: _shards(v, nodes[v], before[v], after[v]) for v in order},
        edges=costs,
    )


def _shards(
    node: int, entry: Mapping[str, Any], before: Sequence[int], after: Sequence[int]
) -> dict[int, Sharded]:
    table = as_object(entry.get("TMPCs"), f"'TMPCs' of node {node}")
    shards: dict[int, Sharded] = {}
    for key in table:
        if not key.isdecimal() or int(key) < 1:
            raise FormatError(f"node {node}: {key!r} is not a number of devices")
        ways = list(objects(table, key))
        if ways:
            shards[int(key)] = _sharded(ways, before, after, f"node {node} on {key}")
    return dict(sorted(shards.items()))


def _sharded(
    ways: Sequence[Mapping[str, Any]], before: Sequence[int], after: Sequence[int], where: str
) -> Sharded:
    configs: list[Config] = []
    first: Sharded | None = None
    for way in ways:
        if not isinstance(way.get("id"), str) or way["id"] in {c.name for c in configs}:
            raise FormatError(f"{where}: {way.get('id')!r} is not the name of one TMPC")
        sizes = [number(way, f"memoryUsage{part}", where) for part in "AB"]
        configs.append(Config(way["id"], number(way, "timePerSample", where), *sizes))
        shared = Sharded(
            (),
            number(way, "parameterSize", where),
            _syncs(way, "syncTimeFw", before, where),
            _syncs(way, "syncTimeBw", after, where),
        )
        first = first or shared
        if shared != first:
            raise FormatError(
                f"{where}: TMPCs {configs[0].name!r} and {configs[-1].name!r} differ in parameters "
                "or syncs; only time and memory may differ"
            )
    assert first is not None
    return replace(first, configs=tuple(configs))


def _syncs(way: Mapping[str, Any], key: str, ends: Iterable[int], where: str) -> dict[int, float]:
    table = as_object(way.get(key), f"{key!r} of {where}")
    return {end: number(table, str(end), f"{key!r} of {where}") for end in ends}


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
    held = []
    for stage, many in zip(plan, flights([stage.data_degree for stage in plan]), strict=True):
        sharded = {node: graph.nodes[node][stage.tensor_degree] for node in stage.configs}
        configs = [_config(sharded[node], name) for node, name in stage.configs.items()]
        held.append(math.fsum(c.flying_bytes * many + c.resident_bytes for c in configs))
    return PlanOutcome(
        tuple(_time_s(graph, stage) for stage in plan),
        tuple(held),
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
    """A plan from JSON content; "TMPCids" may be an object, too."""
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
