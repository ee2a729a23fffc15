"""Shares of a model that unlike devices may have: by speed, by memory, and half way between.

A share has one figure per device for the whole graph, so that the parts of neighbouring nodes
agree and no reshard is needed between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.compute import node_seconds
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.strategies.derive import Rules


def device_shares(graph: Graph, rules: Rules, cluster: Cluster) -> tuple[Mapping[int, float], ...]:
    """Shares of the devices of a cluster, each in a unit of its own; none if all are equal.

    By memory, and half way between speed and memory, only where memory may bind: where a device
    could not hold its part of all values of the graph at once.
    """
    if cluster.has_equal_devices:
        return ()
    speeds = device_speeds(graph, rules, cluster)
    usual = _of_one(speeds or dict.fromkeys(range(len(cluster)), 1.0))
    memory = {d: spec.memory_bytes for d, spec in enumerate(cluster.devices)}
    held = sum(tensor.nbytes for tensor in graph.types.values())
    if all(held * share <= memory[device] for device, share in usual.items()):
        return () if speeds is None else (speeds,)
    by_memory = _of_one(memory)
    between = {device: (share + by_memory[device]) / 2 for device, share in usual.items()}
    return (usual, between, by_memory)


def _of_one(figures: Mapping[int, float]) -> Mapping[int, float]:
    total = math.fsum(figures.values())
    return {device: figure / total for device, figure in figures.items()}


def device_speeds(graph: Graph, rules: Rules, cluster: Cluster) -> Mapping[int, float] | None:
    """Speed of each device in whole graphs a second, each device alone.

    None if all devices are equal, or if one takes no time at all: no finite shares are in
    proportion to that.
    """
    if cluster.has_equal_devices:
        return None
    speeds = {}
    for spec, device in cluster.first_of_spec.items():
        mesh = DeviceMesh.single(device)
        placed_nodes = (place(graph, node, mesh, {}, rules.rule(node)) for node in graph.nodes)
        seconds = math.fsum(node_seconds(graph, placed, cluster)[device] for placed in placed_nodes)
        if seconds <= 0:
            return None
        speeds[spec] = 1 / seconds
    return {device: speeds[spec] for device, spec in enumerate(cluster.devices)}
