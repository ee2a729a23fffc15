"""Messages inside of nodes whose devices send each other iterations (`ir.loops.dispatch`).

How many go to a device is known at run time: counted are those that are expected by the loads of
what rows choose or, if they are not known, if all choices are equally likely. Three all-to-alls:
counts, rows, and results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.collectives import comm_cost
from partitioner.ir.exchange import Transfer
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import Comm, CommKind

#: Bytes of the number of rows that a device tells another one to await.
COUNT_BYTES = 8


def dispatch_comms(placed: PlacedNode) -> Iterator[Comm]:
    """The communications of a node, of bytes; none of most nodes."""
    sent = placed.sent
    if not sent or placed.rule is None or placed.rule.dispatch is None:
        return
    dispatch, mesh = placed.rule.dispatch, placed.mesh
    rows, owners = placed.layouts[dispatch.rows], placed.layouts[dispatch.owners]
    for group in dict.fromkeys(placed.group(point) for _, point in mesh.coords()):
        points = {device: mesh.coord(device) for device in group}
        has = {device: rows.local_size(mesh, point) for device, point in points.items()}
        shares = {
            device: dispatch.share(owners.pieces(mesh, point), owners.size)
            for device, point in points.items()
        }
        pairs = [(source, target) for source in group for target in group if source != target]
        moved = {(source, target): has[source] * shares[target] for source, target in pairs}
        back = {(target, source): moved[source, target] for source, target in pairs}
        yield _comm(group, dict.fromkeys(pairs, COUNT_BYTES))
        yield _comm(group, {pair: n * dispatch.there_bytes for pair, n in moved.items()})
        yield _comm(group, {pair: n * dispatch.back_bytes for pair, n in back.items()})


def dispatch_seconds(placed: PlacedNode, cluster: Cluster) -> Mapping[int, float]:
    """Seconds that each device of a node spends on them; none of most nodes."""
    seconds: dict[int, float] = {}
    for comm in dispatch_comms(placed):
        for device, one in comm_cost(comm, 0, cluster).seconds.items():
            seconds[device] = seconds.get(device, 0.0) + one
    return seconds


def dispatch_s(group: tuple[int, ...], nbytes: float, cluster: Cluster) -> Mapping[int, float]:
    """Seconds of an all-to-all of as many bytes between any two devices of a group."""
    pairs = [(source, target) for source in group for target in group if source != target]
    return comm_cost(_comm(group, dict.fromkeys(pairs, nbytes)), 0, cluster).seconds


def _comm(group: tuple[int, ...], nbytes: Mapping[tuple[int, int], float]) -> Comm:
    transfers = []
    for (source, target), count in nbytes.items():
        flat = (((0, math.ceil(count)),),)
        transfers.append(Transfer(source, target, flat, flat))
    return Comm(-1, CommKind.ALL_TO_ALL, group, "", "", "uint8", tuple(transfers))
