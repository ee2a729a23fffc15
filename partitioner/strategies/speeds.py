"""Relative speed of a cluster's devices on one model.

There is one figure per device for the whole graph, so that the shares of neighbouring nodes agree
and no reshard is needed between them.
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
