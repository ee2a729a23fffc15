"""Communications that travel together: what each takes of the seconds of its message."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.collectives import bucket_seconds, comm_cost, whole_bytes
from partitioner.cost_model.schedule.buckets import Bucket
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.exchange import Transfer
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import item_bytes


def in_messages(tasks: Sequence[Task], cluster: Cluster) -> list[Task]:
    """The tasks of a plan in stages; those that share a message have shares of its seconds.

    All that passes from a phase of a device to a phase of another one is one message, whose
    start-up is paid once.
    """
    by_phases: dict[tuple[int, int], list[Task]] = defaultdict(list)
    for task in tasks:
        if task.comm is not None and task.phase != task.target_phase:
            by_phases[task.phase, task.target_phase].append(task)
    shares = {
        phases: _message_shares(some, cluster)
        for phases, some in by_phases.items()
        if len(some) > 1
    }
    return [
        task
        if task.comm is None or (task.phase, task.target_phase) not in shares
        else _scaled(task, shares[task.phase, task.target_phase])
        for task in tasks
    ]


def _message_shares(tasks: Sequence[Task], cluster: Cluster) -> Mapping[int, float]:
    """Seconds of communications in one message, over those of each by itself, by device."""
    nbytes: dict[tuple[int, int], int] = defaultdict(int)
    alone_s: defaultdict[int, float] = defaultdict(float)
    for task in tasks:
        assert task.comm is not None
        for transfer in task.comm.transfers:
            size = math.ceil(transfer.numel * item_bytes(task.comm.dtype))
            nbytes[transfer.source, transfer.target] += size
        for device, seconds in task.devices.items():
            alone_s[device] += seconds + task.hidden.get(device, 0.0)
    transfers = tuple(
        Transfer(source, target, (((0, size),),), (((0, size),),))
        for (source, target), size in nbytes.items()
    )
    ranks = tuple(sorted({rank for pair in nbytes for rank in pair}))
    joined_s = comm_cost(Comm(0, CommKind.SEND, ranks, "", "", "uint8", transfers), 0, cluster)
    return {
        device: min(1.0, joined_s.seconds[device] / seconds) if seconds else 1.0
        for device, seconds in alone_s.items()
    }


def _scaled(task: Task, shares: Mapping[int, float]) -> Task:
    """A task with a share of its seconds on each device."""
    return replace(
        task,
        devices={device: seconds * shares[device] for device, seconds in task.devices.items()},
        hidden={device: seconds * shares[device] for device, seconds in task.hidden.items()},
    )


def as_they_travel(
    tasks: Sequence[Task], buckets: Sequence[Bucket], cluster: Cluster
) -> list[Task]:
    """The tasks, with the seconds that those which may share a bucket take as they travel.

    One in a bucket takes its share of what the bucket takes, as full as it is; the others travel
    alone. Members that a node waits for at once pay for themselves. The rest share what they add to
    such a bucket, of which nothing passes beside compute.
    """
    messages: dict[int, _Message] = {}
    for bucket in buckets:
        positions = [member.position for member in bucket.members]
        message = _Message.of([tasks[position] for position in positions])
        messages |= dict.fromkeys(positions, message)
    return [
        task if not task.may_share else _travelling(task, messages.get(position), cluster)
        for position, task in enumerate(tasks)
    ]


@dataclass(frozen=True)
class _Message:
    """Sum up the communications of a bucket."""

    shared_bytes: float  #: `whole_bytes` of those that share what it takes.
    paid_bytes: float  #: The same of those that a node waits for at once.
    #: Seconds that these pay for themselves, by device; empty if there are none.
    paid_s: Mapping[int, float]

    @classmethod
    def of(cls, members: Sequence[Task]) -> _Message:
        """Add up the members of a bucket."""
        nbytes: dict[bool, float] = {True: 0.0, False: 0.0}
        paid_s: dict[int, float] = defaultdict(float)
        for member in members:
            nbytes[member.may_share] += _whole_bytes(member)
            if not member.may_share:
                for device, seconds in member.devices.items():
                    paid_s[device] += seconds
        return cls(nbytes[True], nbytes[False], dict(paid_s))


def _travelling(task: Task, message: _Message | None, cluster: Cluster) -> Task:
    """A task with its seconds in the message of a bucket; None for one that is alone.

    It takes no less than it is priced at, which is the least that it may.
    """
    comm = task.comm
    assert comm is not None
    if message is None:
        travels_s = comm_cost(comm, _numel(task), cluster).seconds
    else:
        sizes = _whole_bytes(task), message.shared_bytes
        travels_s = {
            device: bucket_seconds(
                comm.kind,
                comm.ranks,
                *sizes,
                device,
                cluster,
                message.paid_bytes,
                message.paid_s.get(device, 0.0),
            )
            for device in task.devices
        }
    ratios = {}
    for device, seconds in task.devices.items():
        priced_s = seconds + task.hidden.get(device, 0.0)
        ratios[device] = max(1.0, travels_s[device] / priced_s) if priced_s else 1.0
    task = _scaled(task, ratios)
    if message is None or not message.paid_s:
        return task
    whole_s = {device: s + task.hidden.get(device, 0.0) for device, s in task.devices.items()}
    return replace(task, devices=whole_s, hidden={})


def _whole_bytes(task: Task) -> float:
    assert task.comm is not None
    return whole_bytes(task.comm, _numel(task))


def _numel(task: Task) -> int:
    """The most elements that a communication writes on a device."""
    assert task.comm is not None
    return round(max((size for *_, size in task.writes), default=0) / item_bytes(task.comm.dtype))
