"""Who sends how much to whom.

Transfers of point-to-point kinds and of gathers are as they are; an all-reduce counts as a ring
over the ranks in ascending order (each rank sends to the next), whatever algorithm is priced.
"""

from __future__ import annotations

from collections.abc import Iterator

from partitioner.cost_model.schedule import Task
from partitioner.ir.program import CommKind
from partitioner.ir.types import DTYPE_BITS


def moves(task: Task) -> Iterator[tuple[int, int, float]]:
    """(source, target, bytes) between different devices; none for a task that is a node."""
    comm = task.comm
    if comm is None:
        return
    if comm.kind is CommKind.ALL_REDUCE:
        held = {device: nbytes for device, _, nbytes in task.writes}
        count = len(comm.ranks)
        for position, rank in enumerate(comm.ranks):
            after = comm.ranks[(position + 1) % count]
            yield rank, after, 2 * (count - 1) / count * held[rank]
        return
    for transfer in comm.transfers:
        if transfer.source != transfer.target:
            yield transfer.source, transfer.target, transfer.numel * DTYPE_BITS[comm.dtype] / 8
