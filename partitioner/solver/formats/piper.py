"""Pipeline planning instances of msr-fiddle/piper: their meaning and their reader.

Tarnawski, Narayanan, Phanishayee: "Piper: Multidimensional Planner for DNN Parallelization",
NeurIPS 2021. A file is JSON:

    {"maxDevices": k, "maxMemoryPerDevice": bytes, "bandwidth": bytes a second, "mbsInBatch": n,
     "nodes": [{"id", "TMPCs": {"t": [{"id", "timePerSample", "parameterSize", "memoryUsageA",
                "memoryUsageB", "syncTimeFw": {"u": bytes}, "syncTimeBw": {"v": bytes}}]}}],
     "edges": [{"sourceId", "destId", "communicationCost"}]}

A TMPC is a way to run a node on t devices, for instance with its activations computed again. A
stage is a set of nodes on d times t devices: t share each node, d take turns at micro-batches.
No edge leads back to an earlier stage, d divides the number of micro-batches, and all d sum to
that number at most. A stage's time per sample is

    (2 * (cut edges' bytes and syncs) / d + 4 * (d - 1) / d * parameters / n) / bandwidth
    + timePerSample / d

and the largest counts. A device holds memoryUsageA * y + memoryUsageB of each node, where
y = ceil(d of this stage and all later ones / d).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Config:
    """A way to run a node on some number of devices (a TMPC).

    Attributes:
        name: Its id in the file.
        time_s: Seconds a sample.
        flying_bytes: Held for each micro-batch in flight.
        resident_bytes: Held besides.
    """

    name: str
    time_s: float
    flying_bytes: float
    resident_bytes: float


@dataclass(frozen=True)
class Sharded:
    """A node on one number of devices.

    Attributes:
        configs: The ways to run it; at least one.
        parameter_bytes: Of its weights on a device, the same in all ways.
        sync_in_bytes: For each predecessor, paid if its edge is cut; the same in all ways.
        sync_out_bytes: For each successor.
    """

    configs: tuple[Config, ...]
    parameter_bytes: float
    sync_in_bytes: Mapping[int, float]
    sync_out_bytes: Mapping[int, float]


@dataclass(frozen=True)
class Instance:
    """A file's content; `dataclasses.replace` it for other devices or limits.

    Attributes:
        limit_bytes: Memory of each device.
        bandwidth_bytes_per_s: From each device to the others.
        microbatches: In a batch.
        nodes: For each id, the node on each number of devices it can be on; topological order.
        edges: (source, target) -> bytes of activations.
    """

    devices: int
    limit_bytes: float
    bandwidth_bytes_per_s: float
    microbatches: int
    nodes: Mapping[int, Mapping[int, Sharded]]
    edges: Mapping[tuple[int, int], float]


def parse(data: Any) -> Instance:
    """An instance from JSON content.

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
    return Instance(
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
