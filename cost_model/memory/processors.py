"""Bytes that ranks of PyTorch hold on processors, other than by the lives of tensors.

The operand of a reduce-scatter is added up as a whole, and a rank's part of it is copied where it
is waited for (`backends.torch.graphs.eager`). The inputs of a step lie in the memory of its caller
throughout. A pass adds gradients to the sums of those of earlier micro-batches as it makes them.
Behind the last pass the optimizer's step runs, beside all gradients.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from partitioner.cost_model.memory.channels_last import channels_last
from partitioner.cost_model.memory.lifetimes import (
    Curve,
    Curves,
    InFlight,
    Lifetime,
    exact_lifetimes,
    in_flight,
)
from partitioner.cost_model.memory.lives import Numbers, StepLives, Uses
from partitioner.cost_model.memory.rank_messages import RankMessages
from partitioner.cost_model.memory.torch_kernels import scratch_curves, step_bytes, updates_of
from partitioner.cost_model.schedule.buckets import Bucket
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey, Task
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_view
from partitioner.ir.phases import Part
from partitioner.ir.program import Comm, CommKind
from partitioner.ir.types import item_bytes

#: Operators that add their results to a sum by themselves.
_ADDING = frozenset({"aten::mm", "aten::bmm", "aten::embedding_dense_backward"})
#: Communications whose results are views of what arrives, or sums.
_NOT_JOINED = CommKind.SLICE, CommKind.REDUCE_SCATTER, CommKind.ALL_REDUCE


def held_curves(graph: Graph, schedule: Schedule, gpus: Container[int]) -> Curves:
    """Bytes at each position of a task that ranks of PyTorch hold, by device.

    They are those of the tensors by their lives, and what kernels take for themselves.
    """
    uses = Uses.of(schedule, _passed_on(schedule))
    lives = list(exact_lifetimes(schedule, uses.roots))
    exact = StepLives.of(schedule, lives, uses).curves()
    last = channels_last(graph, schedule)
    ends = {life.local: life.last for life in lives if life.local not in schedule.feeds}
    scratch = scratch_curves(graph, schedule, gpus, last, ends)
    on_gpus = {device: curve for device, curve in exact.items() if device in gpus}
    curves = {device: curve + scratch.get(device, 0) for device, curve in on_gpus.items()}
    if others := exact.keys() - on_gpus.keys():
        curves |= _of_processors(graph, schedule, others, uses, scratch, last)
    return curves


def _of_processors(
    graph: Graph,
    schedule: Schedule,
    devices: Collection[int],
    uses: Uses,
    scratch: Curves,
    last: Collection[LocalKey],
) -> Curves:
    messages = RankMessages.of(schedule, uses.roots, last)
    ranks = _Ranks(schedule, devices, uses, messages)
    lives, curves = ranks.lives(), dict[int, Curve]()
    for device in np.unique(lives.device).tolist():
        rows, phases = lives.device == device, schedule.runs(device)
        _, nbytes, held = lives.across(rows, phases)
        by_run = held @ nbytes - ranks.sums_to_come(device, lives)
        leaving: Numbers = np.zeros_like(by_run)
        if messages.nbytes:
            beside, leaving = messages.by_run(device, lives)
            by_run += beside
        always = ranks.inputs[device] + int(lives.nbytes[rows & lives.always].sum())
        curves[device] = lives.inside(len(schedule.tasks), rows) + scratch.get(device, 0) + always
        lacking = ranks.sums_begun_later(device, lives)
        most = _most_of_phases(schedule, phases, by_run, lacking)
        joined = list(ranks.joined(device, scratch))
        made = scratch.get(device, 0) + _made(schedule, device)
        for at, more in joined:
            made[at] += more
        absent = lacking + ranks.wholes_begun(device, lives)
        begins = _most_of_phases(schedule, phases, by_run + leaving, absent) - made
        is_first = np.diff([-1, *(task.phase for task in schedule.tasks)]) != 0
        curves[device] += np.maximum(most, np.where(is_first, begins, 0))
        curves[device] -= ranks.freed(device, lives)
        for at, more in itertools.chain(messages.copies(device), joined):
            curves[device][at] += more
    after = ranks.gradients(lives.tensors)
    for device, (position, updates) in updates_of(schedule).items():
        if device in curves:
            in_step = after[device] + ranks.inputs[device] + step_bytes(graph, updates, device)
            curves[device][position] = max(curves[device][position], in_step)
    return curves


def _most_of_phases(
    schedule: Schedule, phases: Sequence[int], by_run: Numbers, lacking: Numbers
) -> Numbers:
    """Find the most bytes of all runs of a phase at each position, of which the first one lacks."""
    first, later = dict[int, int](), dict[int, int]()
    for phase, taken in zip(phases, by_run.tolist(), strict=True):
        later[phase] = max(later.get(phase, 0), taken) if phase in first else 0
        first.setdefault(phase, taken)
    of_first = np.array([first.get(task.phase, 0) for task in schedule.tasks], np.int64)
    of_later = np.array([later.get(task.phase, 0) for task in schedule.tasks], np.int64)
    most: Numbers = np.maximum(of_first - lacking, of_later)
    return most


def _made(schedule: Schedule, device: int) -> Numbers:
    """Bytes that the node at each position makes on a device, if it makes tensors of its own."""
    made = np.zeros(len(schedule.tasks), np.int64)
    for position, task in enumerate(schedule.tasks):
        if task.placed is not None and not is_view(task.placed.node):
            made[position] = sum(size for to, _, size in task.writes if to == device)
    return made


@dataclass(frozen=True)
class _Ranks:
    schedule: Schedule
    devices: Collection[int]
    uses: Uses
    messages: RankMessages

    def lives(self) -> StepLives:
        """Make the columns; of what is summed over micro-batches, the sum alone.

        A product of matrices is added by its kernel; any other result lies there before it is.
        """
        lives = StepLives.of(self.schedule, self.lifetimes(), self.uses)
        last = lives.last.copy()
        for row in self._sums(lives):
            last[row] = lives.first[row] - self._adds_itself(lives.tensors[row].local)
        return self._with_wholes(replace(lives, last=last))

    def _with_wholes(self, lives: StepLives) -> StepLives:
        """Add the results of all micro-batches, to which each is copied when its phase ends."""
        order = self.schedule.order
        count, deliver = order.table.micro_batches, order.phases.number(Part.DELIVER)
        tasks = self.schedule.tasks
        at = [place for place, task in enumerate(tasks) if task.returns and task.phase == deliver]
        local_of = {local for place in at for local in tasks[place].reads}
        if count == 1 or not local_of:
            return lives
        roots = self.uses.roots
        returned = {roots.get(local, local) for local in local_of}
        sent = {roots[local] for local in local_of if local in roots}
        rows = [
            row
            for row, life in enumerate(lives.tensors)
            if life.local in returned and not life.operand and life.key[1].sharding.shape
        ]
        of_rows, read, always = np.array(rows, np.int64), lives.read.copy(), lives.always.copy()
        is_sent = np.array([lives.tensors[row].local in sent for row in rows], np.bool_)
        is_late = is_sent | (lives.made[of_rows] == deliver)  # else its own phase ends with a copy
        read[of_rows] = np.where(is_late, deliver, lives.made[of_rows])
        always[of_rows] = False
        phase = np.where(is_late, deliver, 0)
        return replace(
            lives,
            device=np.append(lives.device, lives.device[of_rows]),
            nbytes=np.append(lives.nbytes, lives.nbytes[of_rows] * count),
            first=np.append(lives.first, np.full(len(rows), at[0], np.int64)),
            last=np.append(lives.last, np.where(is_late, len(tasks) - 1, -1)),
            made=np.append(lives.made, phase),
            read=np.append(read, phase),
            always=np.append(always, ~is_late),
            tensors=(*lives.tensors, *(lives.tensors[row] for row in rows)),
        )

    def wholes_begun(self, device: int, lives: StepLives) -> Curve:
        """Bytes of the results of all micro-batches at the position at which the first run begins.

        They are there behind it.
        """
        begun = np.zeros(len(self.schedule.tasks), np.int64)
        firsts = np.array([life.first for life in lives.tensors], np.int64)
        is_whole = (lives.device == device) & (lives.first > firsts) & (lives.read == lives.made)
        for row in np.flatnonzero(is_whole & ~lives.always).tolist():
            if self.schedule.tasks[lives.first[row]].returns:
                begun[lives.first[row]] += lives.nbytes[row]
        return begun

    def freed(self, device: int, lives: StepLives) -> Curve:
        """Bytes of tensors of earlier phases that a phase has read for the last time."""
        tasks = self.schedule.tasks
        phase_of = np.array([task.phase for task in tasks], np.int64)
        freed = np.zeros(len(tasks), np.int64)
        for row in np.flatnonzero((lives.device == device) & lives.kept & ~lives.always).tolist():
            last = lives.tensors[row].last
            if phase_of[last] == lives.read[row]:
                freed[last + 1 :][phase_of[last + 1 :] == phase_of[last]] += lives.nbytes[row]
        return freed

    def sums_to_come(self, device: int, lives: StepLives) -> Numbers:
        """Bytes of the sums of gradients that are not begun in each run of a device."""
        phases = self.schedule.runs(device)
        left = np.zeros(len(phases), np.int64)
        for row in self._sums(lives):
            if lives.device[row] == device and lives.made[row] in phases:
                left[: phases.index(lives.made[row])] += lives.nbytes[row]
        return left

    def joined(self, device: int, scratch: Curves) -> Iterator[tuple[int, int]]:
        """Yield where a device joins what it has received, and what that takes beyond what follows.

        It lies there once as it arrived, where it is no result as it is; then a node reads it.
        """
        made_at = partial(self._made_at, device, scratch)
        for one, nbytes in self._parts:
            more = nbytes - made_at(one.until)
            if one.result[0] == device and more > 0:
                yield one.until, more
        for task, position in self._arrivals:
            assert task.comm is not None
            more = _joined_bytes(task.comm, device) - made_at(position)
            if more > 0:
                yield position, more
        for bucket in self.schedule.buckets:
            if bucket.kind is CommKind.ALL_GATHER:
                most = self._taken_apart(bucket, device)
                yield from (
                    (at, nbytes - made_at(at)) for at, nbytes in most if nbytes > made_at(at)
                )

    def _taken_apart(self, bucket: Bucket, device: int) -> Iterator[tuple[int, int]]:
        """Yield where a device takes parts out of what a bucket brings, and what lies beside them.

        Behind the last of them what has come is gone.
        """
        come, joined = 0, defaultdict[int, int](int)
        for member in bucket.members:
            task = self.schedule.tasks[member.position]
            come += sum(size for to, _, size in task.writes if to == device)
            due = max(bucket.begins, min(member.due, bucket.end - 1))
            if task.comm is not None:
                joined[due] = max(joined[due], _joined_bytes(task.comm, device))
        joined[max(joined)] = max(come, joined[max(joined)])
        yield from joined.items()

    def _made_at(self, device: int, scratch: Curves, position: int) -> int:
        """Bytes that a device takes at a position behind what it joins there."""
        task = self.schedule.tasks[position]
        made = sum(size for to, _, size in task.writes if to == device)
        taken = scratch[device][position] if device in scratch else 0
        return made + self._parts_taken[device, position] + int(taken)

    def sums_begun_later(self, device: int, lives: StepLives) -> Curve:
        """Bytes of the sums that the first run of a phase has not begun at each position."""
        tasks = self.schedule.tasks
        phase_of = np.array([task.phase for task in tasks], np.int64)
        left = np.zeros(len(tasks), np.int64)
        for row in self._sums(lives):
            if lives.device[row] == device:
                begun = lives.last[row] + 1
                left[:begun][phase_of[:begun] == lives.made[row]] += lives.nbytes[row]
        count = self.schedule.order.table.micro_batches
        for task, position in self._arrivals:  # results of all lie there behind the first of one
            if tasks[position].returns and count > 1 and task.comm is not None:
                came = sum(t.numel for t in task.comm.transfers if t.target == device)
                whole = sum(size for to, _, size in task.writes if to == device) * count
                is_joined = _joined_bytes(task.comm, device) > 0
                nbytes = round(came * item_bytes(task.comm.dtype))
                left[position] += min(whole, nbytes) if is_joined else 0
        return left

    @cached_property
    def _arrivals(self) -> Sequence[tuple[Task, int]]:
        """List the tasks whose results arrive in another phase, with the position of a reader."""
        tasks = self.schedule.tasks
        sent = [task for task in tasks if task.comm and task.phase != task.target_phase]
        readers: dict[tuple[int, LocalKey], int] = {}
        for position, task in enumerate(tasks):
            for local in task.reads:
                readers.setdefault((task.phase, local), position)
        return [
            (task, readers[task.target_phase, (device, key)])
            for task in sent
            for device, key, _ in task.writes[:1]
            if (task.target_phase, (device, key)) in readers
        ]

    def _sums(self, lives: StepLives) -> Sequence[int]:
        """List the rows that are summed over micro-batches: made in each, and always held."""
        phases = self.schedule.order.phases
        once = [phases.is_once(made) for made in lives.made.tolist()]
        return [row for row in np.flatnonzero(lives.always).tolist() if not once[row]]

    def _adds_itself(self, local: LocalKey) -> bool:
        task = self._makers.get(local)
        return task is not None and task.placed is not None and task.placed.node.op in _ADDING

    def lifetimes(self) -> Iterator[Lifetime]:
        """Yield exact lifetimes, as communications of a processor end and begin them."""
        late = CommKind.REDUCE_SCATTER, CommKind.SLICE
        arrives = {one.result: one.until for one in self._in_flight if self._kind(one) in late}
        arrives |= {one.result: one.until for one, _ in self._parts}
        gone = set(self._waited_for())
        lives = exact_lifetimes(self.schedule, self.uses.roots)
        on_their_way = (*self._packed, *self._received)
        yield from (life for life in on_their_way if life.device in self.devices)
        for life in self.messages.held([life for life in lives if life.device in self.devices]):
            life = life._replace(last=max(life.last, self._sent_until.get(life.local, -1)))
            bucket = self._buckets.get(life.local) if life.buffer else None
            if bucket is not None:
                yield _in_place(bucket, life)
            elif life.buffer and life.local in arrives:
                copied = arrives[life.local]
                yield life._replace(first=copied, last=max(copied, life.last))
            elif (life.local, life.last) in gone:
                yield life._replace(last=life.last - 1)
            elif life.buffer or life.local not in self.schedule.feeds:
                yield life

    def gradients(self, lives: Iterable[Lifetime]) -> Mapping[int, int]:
        """Bytes of what is there when the last pass has ended, by device."""
        roots, held = self.uses.roots, defaultdict[int, int](int)
        given = {roots.get(local, local) for local in self.schedule.outputs}
        for life in lives:
            if life.local in given and not life.operand:
                held[life.device] += life.nbytes
        return held

    @cached_property
    def inputs(self) -> Mapping[int, int]:
        """Bytes of the inputs of all micro-batches, by device."""
        order, held = self.schedule.order, defaultdict[int, int](int)
        for (device, _), nbytes in self.schedule.feeds.items():
            held[device] += nbytes * order.table.micro_batches
        return held

    def _kind(self, one: InFlight) -> CommKind | None:
        comm = self.schedule.tasks[one.position].comm
        return comm.kind if comm is not None else None

    def _waited_for(self) -> Iterator[tuple[LocalKey, int]]:
        """Yield operands that go as their results arrive, before the node runs that reads these.

        That of a reduce-scatter goes as the result is copied, and a part is taken of what is there.
        A rank's own part of an uneven gather is one of those that are joined, so it stays.
        """
        roots, tasks = self.uses.roots, self.schedule.tasks
        ends = {one.until for one in self._in_flight}
        read = {at: {roots.get(local, local) for local in tasks[at].reads} for at in ends}
        for one in self._in_flight:
            kind = self._kind(one)
            begun = one.position + (kind is CommKind.REDUCE_SCATTER)
            comm = tasks[one.position].comm
            is_joined = comm is not None and kind is CommKind.ALL_GATHER and not comm.is_even
            is_sent = kind is not CommKind.SLICE and not is_joined and begun < one.until
            if one.operand is not None and is_sent and one.operand not in read[one.until]:
                yield one.operand, one.until

    @cached_property
    def _parts_taken(self) -> Mapping[tuple[int, int], int]:
        """Bytes of the parts that devices take of what has arrived, by device and position."""
        taken = defaultdict[tuple[int, int], int](int)
        for one in self._in_flight:
            if self._kind(one) is CommKind.SLICE:
                for device, key, nbytes in self.schedule.tasks[one.position].writes:
                    if (device, key) == one.result:
                        taken[device, one.until] += nbytes
        return taken

    @cached_property
    def _parts(self) -> Sequence[tuple[InFlight, int]]:
        """List what devices get in parts that they join when they wait, with their bytes."""
        parts = []
        for one in self._in_flight:
            comm = self.schedule.tasks[one.position].comm
            if comm is not None and comm.kind not in _NOT_JOINED and not comm.part:
                parts.append((one, _joined_bytes(comm, one.result[0])))
        return [(one, nbytes) for one, nbytes in parts if nbytes]

    @cached_property
    def _received(self) -> Sequence[Lifetime]:
        """The parts until they are joined."""
        return [
            Lifetime(*one.result, nbytes, one.position, one.until - 1, buffer=True, operand=True)
            for one, nbytes in self._parts
            if one.position < one.until
        ]

    @cached_property
    def _sent(self) -> Sequence[tuple[int, LocalKey, int, int]]:
        """List what devices send to others as it is.

        The position, the operand, the bytes of the copy that is sent, 0 if it is the operand, and
        the last position at which it lies there. A device that gets nothing waits at the end.
        """
        tasks, sent = self.schedule.tasks, []
        ends = {task.phase: position for position, task in enumerate(tasks)}
        until = {(one.position, one.operand): one.until - 1 for one in self._in_flight}
        for position, task in enumerate(tasks):
            if task.comm is None or task.phase != task.target_phase or not _exchanges(task.comm):
                continue
            for device, key in task.reads:
                operand = self.uses.roots.get((device, key), (device, key))
                last = max(position, until.get((position, operand), ends[task.phase]))
                sent.append((position, operand, _packed_bytes(task, device), last))
        return tuple(sent)

    @cached_property
    def _packed(self) -> Sequence[Lifetime]:
        """The copies of what devices send to others."""
        return [
            Lifetime(operand[0], operand[1], nbytes, position, last, buffer=True, operand=True)
            for position, operand, nbytes, last in self._sent
            if nbytes
        ]

    @cached_property
    def _sent_until(self) -> Mapping[LocalKey, int]:
        """The last position at which each operand lies that is sent as it is."""
        until = dict[LocalKey, int]()
        for _, operand, nbytes, last in self._sent:
            if not nbytes:
                until[operand] = max(last, until.get(operand, -1))
        return until

    @cached_property
    def _in_flight(self) -> Sequence[InFlight]:
        return tuple(in_flight(self.schedule, self.uses.roots))

    @cached_property
    def _buckets(self) -> Mapping[LocalKey, Bucket]:
        """The buckets by the tensors that they bring."""
        return {
            (device, key): bucket
            for bucket in self.schedule.buckets
            for member in bucket.members
            for device, key, _ in self.schedule.tasks[member.position].writes
        }

    @cached_property
    def _makers(self) -> Mapping[LocalKey, Task]:
        tasks = self.schedule.tasks
        return {(device, key): task for task in tasks for device, key, _ in task.writes}


def _joined_bytes(comm: Comm, device: int) -> int:
    """Bytes of what a device gets in parts that it joins; 0 if it lies as the result does."""
    is_gather = not _exchanges(comm)
    own = [t for t in comm.transfers if t.target == device]
    came = [t for t in own if is_gather or t.source != device]
    is_result = len(own) == 1 or (is_gather and len({t.write[1:] for t in own}) == 1)
    return 0 if is_result else round(sum(t.numel for t in came) * item_bytes(comm.dtype))


def _exchanges(comm: Comm) -> bool:
    """Tell whether ranks send parts to each other as they are: uneven ones, or to some of them."""
    is_even = comm.kind is CommKind.ALL_GATHER and comm.is_even
    return comm.kind not in _NOT_JOINED and not is_even


def _passed_on(schedule: Schedule) -> Mapping[LocalKey, LocalKey]:
    """Results of which a device gets nothing but its own part, a view of the operand."""
    passed = dict[LocalKey, LocalKey]()
    for task in schedule.tasks:
        if task.comm is not None and _exchanges(task.comm):
            got = defaultdict[int, list[int]](list)
            for transfer in task.comm.transfers:
                got[transfer.target].append(transfer.source)
            operands = dict(task.reads)
            passed |= {
                (device, key): (device, operands[device])
                for device, key, _ in task.writes
                if got[device] == [device] and device in operands
            }
    return passed


def _packed_bytes(task: Task, device: int) -> int:
    """Bytes of the copy that a device makes of what it sends to others; 0 if it makes none."""
    (_, at), comm = next(key for of, key in task.reads if of == device), task.comm
    assert comm is not None
    leaving = [t for t in comm.transfers if t.source == device != t.target and t.numel]
    shape = at.sharding.local_shape(at.mesh, at.mesh.coord(device))
    if len(leaving) == 1 and _is_dense(leaving[0].read, shape):
        return 0
    return round(sum(t.numel for t in leaving) * item_bytes(comm.dtype))


def _is_dense(region: Region, shape: Sequence[int]) -> bool:
    """Tell whether the elements of a region lie one after the other."""
    cut = [
        dim for dim, (of, size) in enumerate(zip(region, shape, strict=True)) if of != ((0, size),)
    ]
    if not cut:
        return True
    ones = (sum(length for _, length in region[dim]) == 1 for dim in range(cut[-1]))
    return len(region[cut[-1]]) == 1 and all(ones)


def _in_place(bucket: Bucket, life: Lifetime) -> Lifetime:
    """Change the lifetime of a bucket's operands, or of its results, to that on a processor."""
    if bucket.kind is CommKind.ALL_GATHER and life.operand:  # copied to its place in the result
        return life._replace(last=life.first)
    if bucket.kind is CommKind.ALL_GATHER and life.first == bucket.begins:  # gone when it is read
        return life._replace(last=life.last - 1)
    if bucket.kind is CommKind.REDUCE_SCATTER and not life.operand:
        return life._replace(first=min(life.last, max(life.first, bucket.arrives)))
    return life
