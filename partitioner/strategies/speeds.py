"""How fast the devices of a cluster are on one model.

One figure a device for the whole graph, so that the shares of neighbouring nodes agree and nothing
is moved between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.compute import node_seconds
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.strategies.derive import Rules


def device_speeds(graph: Graph, rules: Rules, cluster: Cluster) -> Mapping[int, float] | None:
    """Whole graphs a second of each device alone.

    Returns:
        Speed by device; None where all devices are equal, or one takes no time at all: no finite
        shares are in proportion to that.
    """
    seconds: dict[int, float] = {}
    first = {spec: device for device, spec in reversed(tuple(enumerate(cluster.devices)))}
    if len(first) == 1:
        return None
    for device in first.values():
        seconds[device] = _alone_s(graph, rules, cluster, device)
    if min(seconds.values()) <= 0:
        return None
    return {device: 1 / seconds[first[spec]] for device, spec in enumerate(cluster.devices)}


def _alone_s(graph: Graph, rules: Rules, cluster: Cluster, device: int) -> float:
    mesh = DeviceMesh.single(device)
    placed = (place(graph, node, mesh, {}, rules.rule(node)) for node in graph.nodes)
    return math.fsum(node_seconds(graph, one, cluster)[device] for one in placed)
