"""Pipeline planning instances of msr-fiddle/piper: their meaning and their reader.

Tarnawski, Narayanan, Phanishayee: "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021. A file is JSON:

    {"maxDevices": k, "maxMemoryPerDevice": bytes, "bandwidth": bytes a second, "mbsInBatch": n,
     "nodes": [{"id", "TMPCs": {"t": [{"id", "timePerSample", "parameterSize", "memoryUsageA",
                "memoryUsageB", "syncTimeFw": {"u": bytes}, "syncTimeBw": {"v": bytes}}]}}],
     "edges": [{"sourceId", "destId", "communicationCost"}]}

A TMPC is a way to run a node on t devices, for instance with its activations computed again: a
`Config` of `solver.stages.graph`, which says what a plan costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from partitioner.solver.formats.json_files import (
    FormatError,
    as_object,
    by_id,
    count,
    number,
    objects,
)
from partitioner.solver.stages.graph import Config, Sharded, StageGraph


def parse(data: Any) -> StageGraph:
    """A graph from JSON content.

    Raises:
        FormatError: Something is missing, out of its range or not supported.
    """
    top = as_object(data, "the file")
    bandwidth = number(top, "bandwidth", "the file")
    if not bandwidth:
        raise FormatError("'bandwidth' is 0")
    nodes = by_id(top)
    edges = _edges(top, nodes)
    before: dict[int, list[int]] = {name: [] for name in nodes}
    after: dict[int, list[int]] = {name: [] for name in nodes}
    for source, target in edges:
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
        edges=edges,
    )


def _edges(
    top: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]]
) -> dict[tuple[int, int], float]:
    edges: dict[tuple[int, int], float] = {}
    for edge in objects(top, "edges"):
        ends = edge.get("sourceId"), edge.get("destId")
        for end in ends:
            if not isinstance(end, int) or end not in nodes:
                raise FormatError(f"the edge from {ends[0]!r} to {ends[1]!r} has no node {end!r}")
        source, target = int(edge["sourceId"]), int(edge["destId"])
        where = f"the edge from {source} to {target}"
        if (source, target) in edges:
            raise FormatError(f"{where} appears twice")
        edges[source, target] = number(edge, "communicationCost", where)
    return edges


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
