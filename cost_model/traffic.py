"""Who sends how much to whom.

Transfers of point-to-point kinds and of gathers are as they are; an all-reduce counts as a ring
over the ranks in ascending order (each rank sends to the next), whatever algorithm is priced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from partitioner.cost_model.schedule import Task
from partitioner.ir.exchange import Transfer
from partitioner.ir.program import CommKind
from partitioner.ir.types import DTYPE_BITS


def moves(task: Task) -> Iterator[tuple[int, int, float]]:
    """(source, target, bytes) between different devices; none for a task that is a node."""
    comm = task.comm
    if comm is None:
        return
    if comm.kind is CommKind.ALL_REDUCE:
        count = len(comm.ranks)
        after = dict(zip(comm.ranks, (*comm.ranks[1:], comm.ranks[0]), strict=True))
        for rank, _, nbytes in task.writes:
            yield rank, after[rank], 2 * (count - 1) / count * nbytes
        return
    for transfer in comm.transfers:
        if transfer.source != transfer.target:
            yield transfer.source, transfer.target, transfer.numel * DTYPE_BITS[comm.dtype] / 8


def sent(tasks: Iterable[Task]) -> Mapping[int, float]:
    """Bytes that leave each device that sends any.

    Alike communications share their transfers, and those of many devices are many: they are counted
    once.
    """
    total: dict[int, float] = defaultdict(float)
    counted: dict[int, Mapping[int, int]] = {}
    for task in tasks:
        comm = task.comm
        if comm is None or comm.kind is CommKind.ALL_REDUCE:
            for source, _, nbytes in moves(task):
                total[source] += nbytes
            continue
        if id(comm.transfers) not in counted:
            counted[id(comm.transfers)] = leaving(comm.transfers)
        for source, numel in counted[id(comm.transfers)].items():
            total[source] += numel * DTYPE_BITS[comm.dtype] / 8
    return total


def leaving(transfers: Iterable[Transfer]) -> Mapping[int, int]:
    """Elements that each device sends to others."""
    found: dict[int, int] = defaultdict(int)
    for transfer in transfers:
        if transfer.source != transfer.target:
            found[transfer.source] += transfer.numel
    return found
