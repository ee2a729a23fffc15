"""Bytes sent between devices.

Transfers of point-to-point kinds and of gathers count as they are; an all-reduce, and gathers among
so many ranks that their transfers are not listed (`Comm.part`), count as a ring over the ranks in
ascending order (each rank sends to the next), whatever algorithm is priced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from partitioner.cost_model.prices.collectives import dispatch_comms
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.program import CommKind
from partitioner.ir.types import item_bytes


def moves(task: Task) -> Iterator[tuple[int, int, float]]:
    """(source, target, bytes) between devices; of a node those expected inside of it."""
    comm = task.comm
    if comm is None:
        for inside in dispatch_comms(task.placed) if task.placed is not None else ():
            for transfer in inside.transfers:
                yield transfer.source, transfer.target, float(transfer.numel)
        return
    after = dict(zip(comm.ranks, (*comm.ranks[1:], comm.ranks[0]), strict=True))
    if comm.kind is CommKind.ALL_REDUCE:
        count = len(comm.ranks)
        for rank, _, nbytes in task.writes:
            yield rank, after[rank], 2 * (count - 1) / count * nbytes
        return
    if comm.part:
        for rank, numel in comm.sent_numel().items():
            yield rank, after[rank], numel * item_bytes(comm.dtype)
        return
    for transfer in comm.transfers:
        if transfer.source != transfer.target:
            yield transfer.source, transfer.target, transfer.numel * item_bytes(comm.dtype)


def sent_bytes(schedule: Schedule) -> Mapping[int, float]:
    """Bytes that leave each device in a request or step; equal transfers count once."""
    total: dict[int, float] = defaultdict(float)
    counted: dict[int, Mapping[int, int]] = {}
    for task in schedule.tasks:
        comm, times = task.comm, schedule.times(task)
        if comm is None or comm.kind is CommKind.ALL_REDUCE:
            for source, _, nbytes in moves(task):
                total[source] += times * nbytes
            continue
        key = id(comm if comm.part else comm.transfers)
        if key not in counted:
            counted[key] = comm.sent_numel()
        for source, numel in counted[key].items():
            total[source] += times * numel * item_bytes(comm.dtype)
    return total
