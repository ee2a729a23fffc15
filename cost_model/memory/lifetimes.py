"""Memory of each device along a schedule, counted in two ways.

Constants (and zeros) are resident: held throughout. Every other local tensor is held over an
interval of the schedule's task positions, both ends included, so that a task's operands and
results are held together. A view or an alias has no bytes of its own; it keeps the tensor that it
names. Parts of graph inputs arrive for the first task that reads them; outputs stay to the end.

*Safe* is the linear formula of the search: a value's local tensors, resharded copies included, are
held from the value's production to its last use anywhere; its peak has the head-room that
executors take (`with_headroom`). A node that takes either of two operands is no use of them: they
are held for it alone after the last other use, and its result is a value of its own.

*Exact* is liveness, without head-room: a local tensor is held from the task that writes it to the
last one that reads it on its device; operands of a communication, but for an all-reduce's, until it
is waited for. Of collectives that travel together (`cost_model.schedule.buckets`) it has the
tensors that join them: the operands from the start to the first result that is read, and the
results until the last of them is free; gathered parts are copied out of them. Where there are none,
exact never exceeds safe. Neither counts what a kernel or a collective allocates for itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.prices.compute import stored_bytes
from partitioner.cost_model.schedule.buckets import Bucket
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Key, LocalKey, Task
from partitioner.ir.graph import Graph
from partitioner.ir.ops import UNKNOWN, is_stored, is_view, row_of
from partitioner.ir.program import CommKind
from partitioner.ir.types import dense_bytes

#: Bytes that executors request for activations, as a share of the live bytes: ONNX Runtime 1.31
#: on CPU took 1.13 to 1.5 times at realistic sizes (buffers of a whole segment's operands and
#: results, kernels' scratch).
HEADROOM_PERCENT = 150

Size = TypeVar("Size", int, npt.NDArray[np.int64])
Curve = npt.NDArray[np.int64]  #: Bytes at each position of a task.
Curves = Mapping[int, Curve]  #: By device.


def with_headroom(nbytes: Size) -> Size:
    """Bytes to reserve for activations of this size."""
    return nbytes * HEADROOM_PERCENT // 100


def without_headroom(nbytes: Size) -> Size:
    """The fewest bytes of activations that are so many with head-room."""
    return -(-nbytes * 100 // HEADROOM_PERCENT)


class Lifetime(NamedTuple):
    """A local tensor with bytes of its own, and the positions in `Schedule.tasks` it is held at.

    Both `first` and `last` are included. A `buffer` is written by a communication. The `operand` of
    a bucket bears the name of what the bucket brings.
    """

    device: int
    key: Key
    nbytes: int
    first: int
    last: int
    buffer: bool = False
    operand: bool = False

    @property
    def value(self) -> str:
        """The value that the tensor is, or a part of."""
        return self.key[0]

    @property
    def local(self) -> LocalKey:
        """The tensor on its device."""
        return self.device, self.key


def kept_bytes(graph: Graph) -> int:
    """Bytes of constants and stored values, which the devices of any plan keep together."""
    if graph.blocks and executor_of(graph).loads_blocks:  # one after the other
        return 0
    types = graph.types
    read = {value for node in graph.nodes for value in node.reads}
    kept = [dense_bytes(types[v].numel, types[v].dtype) for v in graph.constants if v in read]
    for node in graph.nodes:
        if is_stored(node) and not node.inputs:
            for value in node.writes:
                nbytes = dense_bytes(types[value].numel, types[value].dtype)
                kept.append(stored_bytes(node, types[value].dtype, nbytes))
    return sum(kept)


def loaded_lifetimes(schedule: Schedule) -> Iterator[Lifetime]:
    """Yield the lifetimes of constants that are held for blocks alone.

    While a block runs, a device loads the constants of the next one that it runs.
    """
    first = {key: span[0] for key, span in schedule.blocks.items()}
    for (device, block), (of, then) in itertools.pairwise(sorted(schedule.blocks)):
        if device == of:
            first[of, then] = schedule.blocks[device, block][0]
    for (device, key), blocks in schedule.loads.items():
        nbytes = schedule.residents[device, key]
        for block in sorted(blocks):  # two in a row hold a constant twice, once as it is loaded
            last = schedule.blocks[device, block][1]
            yield Lifetime(device, key, nbytes, first[device, block], last)


def loaded_among_activations(schedule: Schedule) -> Mapping[Lifetime, int]:
    """The lifetimes of `loaded_lifetimes` as buffers, less what head-room adds; and their bytes.

    So they can be counted among activations, all of which get head-room.
    """
    return {
        life._replace(nbytes=life.nbytes * 100 // HEADROOM_PERCENT, buffer=True): life.nbytes
        for life in loaded_lifetimes(schedule)
    }


def summed_tensors(schedule: Schedule, roots: Mapping[LocalKey, LocalKey]) -> frozenset[LocalKey]:
    """The tensors that the outputs of gradients are views of, or are themselves.

    Each device adds up those of all micro-batches. Of a gradient that a communication reduces for
    each micro-batch they are the results, not its operand.
    """
    updates = (task.placed for task in schedule.tasks if task.placed is not None)
    gradients = {
        value
        for placed in updates
        if placed.node.attrs.get("role") == "gradient"
        for value, _ in placed.results()
    }
    outputs = (local for local in schedule.outputs if local[1][0] in gradients)
    return frozenset(roots.get(local, local) for local in outputs)


def safe_lifetimes(schedule: Schedule) -> Iterator[Lifetime]:
    """Yield lifetimes from the first task that computes any part of a value to its last use."""
    first: dict[str, int] = {}
    for position, task in enumerate(schedule.tasks):
        computed = (value for _, (value, _), _ in task.writes)
        fed = (key[1][0] for key in task.reads if key in schedule.feeds)
        for value in (*computed, *fed):
            first.setdefault(value, position)
    last = _last_uses(schedule)
    for _, (device, key), nbytes, is_buffer in _tensors(schedule, either=True):
        value = key[0]
        begin = first.get(value, 0)
        yield Lifetime(device, key, nbytes, begin, max(begin, last.get(value, begin)), is_buffer)
    yield from _kept_for_either(schedule, first, last)


def _kept_for_either(
    schedule: Schedule, first: Mapping[str, int], last: Mapping[str, int]
) -> Iterator[Lifetime]:
    """Operands of nodes that take either, from the value's last other use on."""
    readers = [(at, task) for at, task in enumerate(schedule.tasks) if _is_either(task)]
    if not readers:
        return
    sizes: dict[Key, dict[int, int]] = defaultdict(dict)
    for _, (device, key), nbytes, _ in _tensors(schedule, either=True):
        sizes[key][device] = nbytes
    copied_from: dict[Key, Key] = {}  # of each resharded copy
    for task in schedule.tasks:
        if task.placed is None:
            copies = [key for _, key, _ in task.writes] + [new for (_, new), _ in task.aliases]
            copied_from.update(dict.fromkeys(copies, task.reads[0][1]))
    for position, task in readers:
        for key in dict.fromkeys(key for _, key in task.reads):
            value = key[0]
            begin = max(first[value], last.get(value, -1)) + 1
            copy: Key | None = key
            while copy is not None and begin < position:
                for device, nbytes in sizes[copy].items():
                    is_buffer = copy in copied_from
                    yield Lifetime(device, copy, nbytes, begin, position - 1, is_buffer)
                copy = copied_from.get(copy)


def exact_lifetimes(
    schedule: Schedule, roots: Mapping[LocalKey, LocalKey] | None = None
) -> Iterator[Lifetime]:
    """Yield lifetimes from a local tensor's writer to its device's last reader; see `roots_of`."""
    roots = roots_of(schedule) if roots is None else roots
    arrival, last = _read_at(schedule, roots)
    buckets = schedule.buckets
    is_summed = bool(buckets) and schedule.order.table.micro_batches > 1
    summed = summed_tensors(schedule, roots) if is_summed else frozenset[LocalKey]()
    members = {member.position: bucket for bucket in buckets for member in bucket.members}
    for written, key, nbytes, is_buffer in _tensors(schedule, either=False):
        if written in members or key in roots:
            continue
        begin = arrival.get(key, 0) if written is None else written
        end = max(begin, last.get(key, begin))
        yield Lifetime(*key, nbytes, begin, end, is_buffer)
    for bucket in buckets:
        yield from _in_bucket(schedule, bucket, last, summed)


def _read_at(
    schedule: Schedule, roots: Mapping[LocalKey, LocalKey]
) -> tuple[dict[LocalKey, int], dict[LocalKey, int]]:
    """The first and the last position at which each tensor is read, sent or returned.

    What a bucket brings is copied into it where it leaves, and may go before a gather's result is
    there. Another name for a tensor reads nothing.
    """
    first: dict[LocalKey, int] = {}
    last: dict[LocalKey, int] = {}
    copied = {
        member.position: bucket.begins - (bucket.kind is CommKind.ALL_GATHER)
        for bucket in schedule.buckets
        for member in bucket.members
    }
    for position, task in enumerate(schedule.tasks):
        if task.placed is not None and row_of(task.placed.node).again:
            continue
        at = copied.get(position, position)
        for key in (*task.reads, *(new for new, _ in task.aliases)):
            root = roots.get(key, key)
            first[root] = min(at, first.get(root, at))
            last[root] = max(at, last.get(root, at))
    for key in schedule.outputs:
        last[roots.get(key, key)] = len(schedule.tasks) - 1
    for sent in in_flight(schedule, roots):
        if sent.operand is not None:
            last[sent.operand] = max(last[sent.operand], sent.until)
    return first, last


class InFlight(NamedTuple):
    """A device's part in what is sent within a phase, neither to an all-reduce nor in a bucket."""

    position: int  #: Of the communication.
    operand: LocalKey | None  #: The tensor whose memory it sends; None if it gets a result alone.
    result: LocalKey  #: What the device gets.
    until: int  #: Position at which a node reads the result, or the end of the phase.


def in_flight(schedule: Schedule, roots: Mapping[LocalKey, LocalKey]) -> Iterator[InFlight]:
    """Yield what devices send within a phase, and until when each of the operands is held.

    That is until a node reads the result, or the end of the phase: nothing waits earlier for what
    is on its way, and parts of it are taken then, too. Operands of all-reduces, and those that are
    copied into buckets, are left out.
    """
    end_of = {task.phase: position for position, task in enumerate(schedule.tasks)}
    brought: set[LocalKey] = set()
    joined = {member.position for bucket in schedule.buckets for member in bucket.members}
    sent: list[InFlight] = []
    for position, task in enumerate(schedule.tasks):
        if task.comm is None or task.phase != task.target_phase or position in joined:
            continue
        results = {device: (device, key) for device, key, _ in task.writes}
        is_part = task.comm.kind is CommKind.SLICE
        if task.comm.kind is CommKind.ALL_REDUCE:  # sums a copy, which is its result
            brought.update(results.values())
            continue
        operands = {device: roots.get((device, key), (device, key)) for device, key in task.reads}
        for device, result in results.items():
            operand = operands.get(device)
            if operand in brought or not is_part:
                sent.append(InFlight(position, operand, result, end_of[task.phase]))
        if not is_part:
            brought.update(results.values())
    yield from _until_read(schedule, sent)


def _until_read(schedule: Schedule, sent: Sequence[InFlight]) -> Iterator[InFlight]:
    """Let what is sent end where the result, or a part of it that is taken then, is waited for.

    A result that is the device's own part of the operand is waited for, too.
    """
    read, roots = dict[LocalKey, int](), roots_of(schedule)
    for position, task in enumerate(schedule.tasks):
        row = UNKNOWN if task.placed is None else row_of(task.placed.node)
        # The result of some nodes is their first operand itself, or a view of it.
        is_named = row.view or row.again or row.either or row.in_place is not None
        if task.returns or (task.placed is not None and not is_named):
            for local in task.reads:
                read.setdefault(roots.get(local, local), position)
    until: dict[LocalKey, int] = {}
    for one in reversed(sent):
        until[one.result] = taken = min(one.until, read.get(one.result, one.until))
        comm = schedule.tasks[one.position].comm
        if comm is not None and comm.kind is CommKind.SLICE and one.operand is not None:
            read[one.operand] = min(taken, read.get(one.operand, taken))
    for one in sent:
        yield one._replace(until=until[one.result])


def _in_bucket(
    schedule: Schedule,
    bucket: Bucket,
    last: Mapping[LocalKey, int],
    summed: frozenset[LocalKey],
) -> Iterator[Lifetime]:
    """The tensors of collectives that travel together; sums take the place of their operands.

    `summed` has the tensors of which each device adds up those of all micro-batches.
    """
    results: dict[int, list[tuple[Key, int, int]]] = defaultdict(list)  # tensor, bytes, last use
    begins, end = bucket.begins, bucket.end - 1
    for member in bucket.members:
        for device, key, size in schedule.tasks[member.position].writes:
            until = max(begins, min(member.due, end), last.get((device, key), begins))
            if bucket.kind is CommKind.ALL_GATHER:
                arrived = max(begins, min(member.due, end))
                yield Lifetime(device, key, size, arrived, until, buffer=True)
                until = arrived
            results[device].append((key, size, until))
    for device, parts in results.items():
        adds = [part for part in parts if (device, part[0]) in summed]
        kept = [part for part in parts if part[2] > end and part not in adds]
        # All parts are views of one tensor. A sum takes it over, if nothing else keeps it.
        first, _, until = max(kept or adds or parts, key=lambda part: part[2])
        whole = sum(size for _, size, _ in parts)
        until = max(until, *(part[2] for part in parts if part not in adds), begins)
        yield Lifetime(device, first, whole, begins, until, buffer=True)
        if kept:
            yield from (Lifetime(device, *part[:2], begins, part[2], buffer=True) for part in adds)
        if bucket.kind is not CommKind.ALL_REDUCE:
            sent = max(begins, min(bucket.arrives, end))
            yield Lifetime(device, first, bucket.nbytes, begins, sent, buffer=True, operand=True)


def _tensors(
    schedule: Schedule, *, either: bool
) -> Iterator[tuple[int | None, LocalKey, int, bool]]:
    """Local tensors with bytes of their own: (writer's position, tensor, bytes, is a buffer).

    The position is None for graph inputs. `either` counts the results of nodes that take either
    operand, which are views.
    """
    if not schedule.tasks:
        return
    for key, nbytes in schedule.feeds.items():
        yield None, key, nbytes, False
    for position, task in enumerate(schedule.tasks):
        if not _is_view(task) or (either and _is_either(task)):
            for device, written, nbytes in task.writes:
                yield position, (device, written), nbytes, task.comm is not None


def _last_uses(schedule: Schedule) -> Mapping[str, int]:
    """Position of the last use of each value or of a view of it."""
    last = {value: len(schedule.tasks) - 1 for _, (value, _) in schedule.outputs}
    for position in reversed(range(len(schedule.tasks))):
        task = schedule.tasks[position]
        if task.placed is None or _is_either(task):
            continue  # a communication serves a node that reads the value
        for _, (value, _) in task.reads:
            last[value] = max(last.get(value, -1), position)
        if _is_view(task):
            viewed = task.placed.operands()[0][0]
            results = (value for _, (value, _), _ in task.writes)
            last[viewed] = max([last[viewed], *(last.get(value, position) for value in results)])
    return last


def roots_of(
    schedule: Schedule, passed_on: Mapping[LocalKey, LocalKey] | None = None
) -> Mapping[LocalKey, LocalKey]:
    """The tensor whose memory each view or alias names.

    `passed_on` has the results of communications that are their operands, as an executor runs them.
    """
    roots: dict[LocalKey, LocalKey] = {}
    for task in schedule.tasks:
        pairs = list(task.aliases)
        if passed_on:
            results = ((device, key) for device, key, _ in task.writes)
            pairs += [(local, passed_on[local]) for local in results if local in passed_on]
        if _is_view(task) and task.placed is not None:
            operand = task.placed.operands()[0]
            pairs += [((device, key), (device, operand)) for device, key, _ in task.writes]
        for new, old in pairs:
            roots[new] = roots.get(old, old)
    return roots


def _is_view(task: Task) -> bool:
    return task.placed is not None and is_view(task.placed.node)


def _is_either(task: Task) -> bool:
    return task.placed is not None and row_of(task.placed.node).either
