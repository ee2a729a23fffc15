"""The bytes of communications, by pair of devices and by level of the cluster."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.collectives import comm_cost
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.cost_model.schedule.traffic import moves
from partitioner.ir.types import DTYPE_BITS
from partitioner.report.lanes import Lanes
from partitioner.report.schema import Link, Traffic


def traffic(schedule: Schedule, cluster: Cluster, lanes: Lanes) -> Traffic:
    """Bytes that a request or step moves, by pair of lanes and by level of the cluster."""
    exact: dict[tuple[int, int], float] = defaultdict(float)
    for task in schedule.tasks:
        for source, target, nbytes in moves(task):
            exact[source, target] += schedule.times(task) * nbytes
    pairs = {pair: round(nbytes) for pair, nbytes in exact.items()}
    of_lanes: Counter[tuple[int, int]] = Counter()
    for (source, target), nbytes in pairs.items():
        of_lanes[lanes.of[source], lanes.of[target]] += nbytes
    sent: dict[str, Counter[int]] = defaultdict(Counter)
    for (source, target), nbytes in pairs.items():
        sent[cluster.level((source, target)).name][source] += nbytes
    links = []
    for level in cluster.levels:
        most = max(sent[level.name].values(), default=0)
        rate = level.bandwidth_bytes_per_s
        link = Link(
            level=level.name,
            size=min(level.size, len(cluster)),
            bytes=most,
            total_bytes=sum(sent[level.name].values()),
            seconds=most / rate,
            bandwidth_bytes_per_s=rate if math.isfinite(rate) else None,
        )
        links.append(link)
    rows = sorted(of_lanes.items())
    return Traffic(
        source=[source for (source, _), _ in rows],
        target=[target for (_, target), _ in rows],
        bytes=[nbytes for _, nbytes in rows],
        links=links,
    )


def crossing_bytes(task: Task) -> int:
    """Bytes that a communication moves between devices, its collectives as rings."""
    return round(sum(nbytes for _, _, nbytes in moves(task)))


def algorithm(task: Task, cluster: Cluster) -> str:
    """The algorithm that a communication is priced with."""
    comm = task.comm
    assert comm is not None
    bits = DTYPE_BITS[comm.dtype]
    largest = max((nbytes for _, _, nbytes in task.writes), default=0)
    return comm_cost(comm, largest * 8 // bits, cluster).algorithm
