"""Communications that travel together, and what each takes of the seconds of its message.

Small collectives of one pass go in buckets: their cost is latency. Each has a window, from the task
that makes its operand to the one that reads its result. Those of one kind whose windows share a
point go in one flat tensor, in the order in which they start. It leaves as soon as the last operand
is there, but not before the first of them would, so that it travels while the pass goes on. Large
ones stay alone: bandwidth sets their pace, and to copy them into one tensor would cost more than it
saves. Those that nothing in the pass waits for, such as gradients, travel among themselves: with
another, what waits for that would wait for their bytes, and they would leave in as many small
messages as there are such waits.

A value that is on its way is read by the first node that does more than rename or view it. An
operand that is a view of such a value counts as made where it is sent.

All ranks must start what they join at one place among their other collectives. So an operand that
some ranks have earlier than others, or wait for earlier, is sent alone.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.prices.collectives import bucket_seconds, comm_cost, whole_bytes
from partitioner.cost_model.schedule.tasks import Key, Task
from partitioner.ir.exchange import Transfer
from partitioner.ir.ops import is_stored, is_view, row_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import BUCKET_BYTES, JOINING, SMALL_BYTES, Comm, CommKind
from partitioner.ir.types import item_bytes


@dataclass(frozen=True)
class Member:
    """A small collective."""

    position: int  #: Of its task, or of the step that starts it.
    ready: int  #: Position of what makes its operand; -1 if the operand was there before the pass.
    due: int  #: Position of what reads its result; the end of the pass if nothing in it does.
    nbytes: int  #: Of its operand on one rank.


@dataclass(frozen=True)
class Bucket:
    """Collectives of one kind and group that travel together, in the order of their tasks."""

    kind: CommKind  #: Their kind.
    members: tuple[Member, ...]
    end: int  #: Position behind the last task of their pass.

    @property
    def begins(self) -> int:
        """Position behind which it leaves; its memory is taken then."""
        ready = max(member.ready for member in self.members)
        return max(ready, min(member.position for member in self.members))

    @property
    def arrives(self) -> int:
        """Position of what waits for it."""
        return min(member.due for member in self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of all operands on one rank."""
        return sum(member.nbytes for member in self.members)


def together(members: Sequence[Member]) -> list[tuple[Member, ...]]:
    """Choose the fewest points so that every window has one; lone members are left out."""
    left = sorted(members, key=lambda member: (member.due, member.ready))
    buckets = []
    while left:
        point, size = left[0].due, 0
        taken: list[Member] = []
        rest: list[Member] = []
        for member in left:
            fits = member.ready < point and size + member.nbytes <= BUCKET_BYTES
            (taken if fits or not taken else rest).append(member)
            size += member.nbytes if fits else 0
        buckets.append(tuple(sorted(taken, key=lambda member: member.position)))
        left = rest
    return [bucket for bucket in buckets if len(bucket) > 1]


def in_buckets(
    tasks: Sequence[Task], unlike: Container[int], backward: Container[str]
) -> tuple[list[Task], tuple[Bucket, ...]]:
    """The tasks of a plan whose nodes all run on all devices, with buckets; and these buckets.

    Communications and aliases at `unlike` positions, where devices have unlike parts, stay alone.
    The tasks of a phase are a pass; of a whole batch in one phase, those of the forward or
    `backward` nodes.
    """
    turns = [i for i in range(1, len(tasks)) if tasks[i].phase != tasks[i - 1].phase]
    if not turns:
        turns = [i for i, task in enumerate(tasks) if task.placed and task.name in backward][:1]
    buckets = [
        bucket
        for start, end in itertools.pairwise(sorted({0, *turns, len(tasks)}))
        for bucket in _Pass(tasks, unlike).buckets(start, end)
    ]
    joined = list(tasks)
    for number, bucket in enumerate(buckets):
        for member in bucket.members:
            task = joined[member.position]
            assert task.comm is not None
            joined[member.position] = replace(task, comm=task.comm.renamed(bucket=number))
    return joined, tuple(buckets)


@dataclass
class _Pass:
    tasks: Sequence[Task]
    unlike: Container[int]
    #: Position of the task that has made a value, of those that this pass makes.
    made: dict[Key, int] = field(default_factory=dict)
    #: What a value that is on its way comes from: the positions of the communications that bring
    #: it, or a value that it is another name of, a view of, or a part of.
    late: dict[Key, list[int] | Key] = field(default_factory=dict)
    #: Where the operand of each collective that may be joined was made, and its bytes.
    operands: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: Position of the first task that reads the result of a communication.
    due: dict[int, int] = field(default_factory=dict)
    #: Values that some devices have, or wait for, at another place than others.
    apart: set[Key] = field(default_factory=set)

    def buckets(self, start: int, end: int) -> Iterator[Bucket]:
        for position in range(start, end):
            task = self.tasks[position]
            if position in self.unlike:
                self._unlike(task, position)
                continue
            for (_, new), (_, old) in task.aliases:
                self._rename(old, new)
            if task.placed is not None:
                self._node(task.placed, position)
            elif task.comm is not None:
                self._communication(task, task.comm, position)
        by_kind: dict[tuple[CommKind, object], list[Member]] = defaultdict(list)
        for position, (ready, nbytes) in self.operands.items():
            comm = self.tasks[position].comm
            assert comm is not None
            member = Member(position, ready, self.due.get(position, end), nbytes)
            alike = comm.ranks, comm.reduce, comm.dtype, position in self.due
            by_kind[comm.kind, alike].append(member)
        for (kind, _), members in by_kind.items():
            yield from (Bucket(kind, bucket, end) for bucket in together(members))

    def _unlike(self, task: Task, position: int) -> None:
        """Follow a task in which devices have unlike parts: some wait for what it reads."""
        for key in {key for _, key in task.reads} & self.late.keys():
            self._read(key, position)
            self.apart.update(self._names(key))
        results = {*(key for _, key, _ in task.writes), *(new for (_, new), _ in task.aliases)}
        self.apart |= results
        self.made.update(dict.fromkeys(results, position))

    def _names(self, key: Key) -> Iterator[Key]:
        """A value, and those on their way that it is another name, a view or a part of."""
        yield key
        while isinstance(source := self.late.get(key), tuple):
            yield source
            key = source

    def _is_apart(self, key: Key) -> bool:
        return not self.apart.isdisjoint(self._names(key))

    def _rename(self, old: Key, new: Key) -> None:
        if old in self.apart:
            self.apart.add(new)
        if old in self.late:
            self.late[new] = old
        elif old in self.made:
            self.made[new] = self.made[old]

    def _node(self, placed: PlacedNode, position: int) -> None:
        operands, results = placed.operands(), placed.results()
        if not operands:
            self.made.update(dict.fromkeys(results, -1 if is_stored(placed.node) else position))
            return
        source = operands[0]
        is_late_view = is_view(placed.node) and source in self.late
        row = row_of(placed.node)
        is_name = row.again or row.either or row.in_place is not None
        if len(results) == 1 and (is_name or is_late_view):
            self._rename(source, *results)
            return
        for key in operands:
            self._read(key, position)
        self.made.update(dict.fromkeys(results, position))
        if is_view(placed.node) and self._is_apart(source):
            self.apart.update(results)

    def _communication(self, task: Task, comm: Comm, position: int) -> None:
        before, after = task.reads[0][1], task.writes[0][1] if task.writes else None
        if comm.kind is CommKind.SLICE and after is not None:
            if self._is_apart(before):
                self.apart.add(after)
            if before in self.late:
                self.late[after] = before
                return
        ready = position if before in self.late else self.made.get(before, -1)
        self._read(before, position)
        if comm.kind is CommKind.ALL_REDUCE:
            nbytes = max((nbytes for _, _, nbytes in task.writes), default=0)
        else:
            parts = len(comm.ranks) if comm.kind is CommKind.REDUCE_SCATTER else 1
            nbytes = round(parts * comm.largest_numel * item_bytes(comm.dtype))
        joins = comm.phase == comm.target_phase and may_join(comm, nbytes)
        if joins and not self._is_apart(before):
            self.operands[position] = ready, nbytes
        if after is not None and comm.phase != comm.target_phase:
            self.made[after] = position
        elif after is not None:
            brought = self.late.setdefault(after, [])
            assert isinstance(brought, list)
            brought.append(position)

    def _read(self, key: Key, position: int) -> None:
        """Note that a task reads a value: what brings it is waited for, if nothing else has."""
        source = self.late.get(key)
        if isinstance(source, tuple):
            self._read(source, position)
        elif source is not None:
            for brought in source:
                self.due.setdefault(brought, position)


def may_join(comm: Comm, nbytes: int) -> bool:
    """Test whether a communication is one of equal parts that is small."""
    if comm.kind not in JOINING or not 0 < nbytes < SMALL_BYTES:
        return False
    return comm.kind is CommKind.ALL_REDUCE or comm.is_even


def unlike_parts(tasks: Sequence[Task]) -> frozenset[int]:
    """Positions of communications and aliases in which devices have unlike parts.

    By such steps of a reshard some get what others have, or hold zeros, or only send or receive.
    """
    everyone = {device for task in tasks for device in task.devices}
    steps: dict[tuple[Key, ...], list[int]] = defaultdict(list)
    for position, task in enumerate(tasks):
        if task.placed is None and not task.returns:
            made = [
                *(key for _, key, _ in task.writes[:1]),
                *(new for (_, new), _ in task.aliases[:1]),
            ]
            steps[(*(key for _, key in task.reads[:1]), *made)].append(position)
    unlike: set[int] = set()
    for positions in steps.values():
        some = [tasks[position] for position in positions]
        comms = [task.comm for task in some if task.comm is not None]
        kinds = {None if task.comm is None else task.comm.kind for task in some}
        is_of_all = (
            all(comm.sources() == comm.targets() == set(comm.ranks) for comm in comms)
            and len(kinds) == 1
            and {device for task in some for device, _ in task.reads} == everyone
        )
        if not is_of_all:
            unlike.update(positions)
    return frozenset(unlike)


def in_messages(tasks: Sequence[Task], cluster: Cluster) -> list[Task]:
    """The tasks of a plan in stages; messages from one phase to another share one start-up."""
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
        for device, seconds in task.whole_s.items():
            alone_s[device] += seconds
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
    return replace(
        task,
        devices={device: seconds * shares[device] for device, seconds in task.devices.items()},
        hidden={device: seconds * shares[device] for device, seconds in task.hidden.items()},
    )


def as_they_travel(
    tasks: Sequence[Task], buckets: Sequence[Bucket], cluster: Cluster
) -> list[Task]:
    """The tasks, with the seconds that those which may share a bucket take as they travel.

    One in a bucket takes its share of what the bucket takes; the others travel alone. Members that
    a node waits for at once pay for themselves; the rest share what they add, none of it beside
    compute.
    """
    messages: dict[int, _Message] = {}
    for bucket in buckets:
        nbytes: dict[bool, float] = {True: 0.0, False: 0.0}
        paid_s: dict[int, float] = defaultdict(float)
        for member in bucket.members:
            task = tasks[member.position]
            nbytes[task.may_share] += _whole_bytes(task)
            for device, seconds in task.devices.items() if not task.may_share else ():
                paid_s[device] += seconds
        message = _Message(nbytes[True], nbytes[False], paid_s)
        messages |= {member.position: message for member in bucket.members}
    return [
        task if not task.may_share else _travelling(task, messages.get(position), cluster)
        for position, task in enumerate(tasks)
    ]


@dataclass(frozen=True)
class _Message:
    shared_bytes: float  #: `whole_bytes` of those that share what it takes.
    paid_bytes: float  #: The same of those that a node waits for at once.
    #: Seconds that these pay for themselves, by device; empty if there are none.
    paid_s: Mapping[int, float]


def _travelling(task: Task, message: _Message | None, cluster: Cluster) -> Task:
    """A task with its seconds in a message, or alone; no less than it is priced at."""
    comm = task.comm
    assert comm is not None
    if message is None:
        travels_s = comm_cost(comm, _numel(task), cluster).seconds
    else:
        travels_s = {
            device: bucket_seconds(
                comm.kind,
                comm.ranks,
                _whole_bytes(task),
                message.shared_bytes,
                device,
                cluster,
                message.paid_bytes,
                message.paid_s.get(device, 0.0),
            )
            for device in task.devices
        }
    ratios = {
        device: max(1.0, travels_s[device] / priced_s) if priced_s else 1.0
        for device, priced_s in task.whole_s.items()
    }
    task = _scaled(task, ratios)
    if message is None or not message.paid_s:
        return task
    return replace(task, devices=task.whole_s, hidden={})


def _whole_bytes(task: Task) -> float:
    assert task.comm is not None
    return whole_bytes(task.comm, _numel(task))


def _numel(task: Task) -> int:
    """The most elements that a communication writes on a device."""
    assert task.comm is not None
    return round(max((size for *_, size in task.writes), default=0) / item_bytes(task.comm.dtype))
