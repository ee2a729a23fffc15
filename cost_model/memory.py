"""Bytes held on each device along a schedule, counted in two ways.

Constants (and zeros) are resident: held throughout. Every other local tensor is held over an
interval of the schedule's task positions, both ends included, so that a task's operands and
results are held together. A view or an alias has no bytes of its own; it keeps the tensor that it
names. Parts of graph inputs arrive for the first task that reads them; outputs stay to the end.

*Safe* is the linear formula that the search uses: a value's local tensors, copies that reshards
make included, are held from the value's production to its last use anywhere; its peak has the
head-room that executors take (`with_headroom`). What a node takes that takes either operand is
held for it alone after the last other use, and its result is a value of its own.

*Exact* is liveness, without head-room: a local tensor is held from the task that writes it to the
last one that reads it on its device. Exact never exceeds safe. Neither counts what a kernel or a
collective allocates for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.schedule import Key, LocalKey, Schedule, Task
from partitioner.ir.ops import row_of

#: Bytes that executors request for activations, over the bytes that are live: ONNX Runtime 1.31
#: on CPU took 1.13 to 1.5 times at realistic sizes (buffers of a whole segment's operands and
#: results, kernels' scratch).
HEADROOM_PERCENT = 150

Size = TypeVar("Size", int, npt.NDArray[np.int64])
Curves = Mapping[int, npt.NDArray[np.int64]]


def with_headroom(nbytes: Size) -> Size:
    """Bytes to reserve for activations of this size."""
    return nbytes * HEADROOM_PERCENT // 100


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A local tensor with bytes of its own, held at task positions first .. last.

    Attributes:
        device: Where.
        value: Of which value it is a part.
        nbytes: Size.
        first: Position in `Schedule.tasks`.
        last: Likewise, at least `first`.
        buffer: Whether a communication writes it.
    """

    device: int
    value: str
    nbytes: int
    first: int
    last: int
    buffer: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most bytes that a device holds.

    Attributes:
        bytes: Sum of the two below.
        resident_bytes: Constants and zeros.
        activation_bytes: Everything else at the peak.
        at: Name of the first task at which it is reached, "" if there is none.
    """

    bytes: int
    resident_bytes: int
    activation_bytes: int
    at: str


def peak_bytes(schedule: Schedule) -> Mapping[int, MemoryPeak]:
    """Safe peaks, with head-room, of all devices that hold anything."""
    curves = usage_curves(schedule, safe_lifetimes(schedule))
    return _peaks(schedule, {device: with_headroom(curve) for device, curve in curves.items()})


def exact_peak_bytes(schedule: Schedule) -> Mapping[int, MemoryPeak]:
    """Exact peaks of all devices that hold anything."""
    return _peaks(schedule, usage_curves(schedule, exact_lifetimes(schedule)))


def usage_curves(schedule: Schedule, lifetimes: Iterable[Lifetime]) -> Curves:
    """Activation bytes at each task position, by device."""
    changes: dict[int, npt.NDArray[np.int64]] = {}
    for life in lifetimes:
        if life.device not in changes:
            changes[life.device] = np.zeros(len(schedule.tasks) + 1, np.int64)
        changes[life.device][life.first] += life.nbytes
        changes[life.device][life.last + 1] -= life.nbytes
    return {device: np.cumsum(change)[:-1] for device, change in sorted(changes.items())}


def safe_lifetimes(schedule: Schedule) -> Iterator[Lifetime]:
    """From the first task that makes any part of the value to its last use anywhere."""
    first: dict[str, int] = {}
    for position, task in enumerate(schedule.tasks):
        for value in _begun(task, schedule):
            first.setdefault(value, position)
    last = _last_uses(schedule)
    for made, key, nbytes in _owned(schedule, _is_settled_view):
        device, (value, _) = key
        begin = first.get(value, 0)
        end = max(begin, last.get(value, begin))
        yield Lifetime(device, value, nbytes, begin, end, _is_buffer(schedule, made))
    yield from _kept(schedule, first, last)


def _kept(
    schedule: Schedule, first: Mapping[str, int], last: Mapping[str, int]
) -> Iterator[Lifetime]:
    """What is held of values from their last other use on, for those that take either operand."""
    takers = [(at, task) for at, task in enumerate(schedule.tasks) if _is_either(task)]
    if not takers:
        return
    sizes: dict[Key, dict[int, int]] = defaultdict(dict)
    for _, (device, key), nbytes in _owned(schedule, _is_settled_view):
        sizes[key][device] = nbytes
    sources = _sources(schedule)
    for position, task in takers:
        for key in {key: None for _, key in task.reads}:
            begin = max(first[key[0]], last.get(key[0], -1)) + 1
            copy: Key | None = key
            while copy is not None and begin < position:
                for device, nbytes in sizes[copy].items():
                    yield Lifetime(device, key[0], nbytes, begin, position - 1, copy in sources)
                copy = sources.get(copy)


def _sources(schedule: Schedule) -> Mapping[Key, Key]:
    """What each resharded copy of a value is made from."""
    found: dict[Key, Key] = {}
    for task in schedule.tasks:
        if task.placed is None:
            made = [key for _, key, _ in task.writes] + [new for (_, new), _ in task.aliases]
            found.update(dict.fromkeys(made, task.reads[0][1]))
    return found


def exact_lifetimes(schedule: Schedule) -> Iterator[Lifetime]:
    """From the task that writes a local tensor to its device's last task that reads it."""
    roots = _roots(schedule)
    arrival: dict[LocalKey, int] = {}
    last: dict[LocalKey, int] = {}
    for position, task in enumerate(schedule.tasks):
        for key in (*task.reads, *(new for new, _ in task.aliases)):
            root = roots.get(key, key)
            arrival.setdefault(root, position)
            last[root] = position
    for key in schedule.outputs:
        last[roots.get(key, key)] = len(schedule.tasks) - 1
    for made, key, nbytes in _owned(schedule, _is_view):
        begin = arrival.get(key, 0) if made is None else made
        end = max(begin, last.get(key, begin))
        yield Lifetime(key[0], key[1][0], nbytes, begin, end, _is_buffer(schedule, made))


def _is_buffer(schedule: Schedule, made: int | None) -> bool:
    return made is not None and schedule.tasks[made].comm is not None


def _owned(
    schedule: Schedule, is_view: Callable[[Task], bool]
) -> Iterator[tuple[int | None, LocalKey, int]]:
    """(position of the writing task, local tensor, bytes); None for parts of graph inputs."""
    if not schedule.tasks:
        return
    for key, nbytes in schedule.feeds.items():
        yield None, key, nbytes
    for position, task in enumerate(schedule.tasks):
        if not is_view(task):
            for device, key_of, nbytes in task.writes:
                yield position, (device, key_of), nbytes


def _begun(task: Task, schedule: Schedule) -> Iterator[str]:
    """Values of which a task makes or, if they are graph inputs, reads a part."""
    yield from (value for _, (value, _), _ in task.writes)
    yield from (key[1][0] for key in task.reads if key in schedule.feeds)


def _last_uses(schedule: Schedule) -> Mapping[str, int]:
    """Position of the last use of a value or of a view of it."""
    last = {key[1][0]: len(schedule.tasks) - 1 for key in schedule.outputs}
    for position in reversed(range(len(schedule.tasks))):
        task = schedule.tasks[position]
        if task.placed is None or _is_either(task):
            continue  # what moves a value does so for a node that reads it
        for _, (value, _) in task.reads:
            last[value] = max(last.get(value, -1), position)
        if _is_view(task):
            viewed = _viewed(task)
            made = (value for _, (value, _), _ in task.writes)
            last[viewed] = max([last[viewed], *(last.get(value, position) for value in made)])
    return last


def _roots(schedule: Schedule) -> Mapping[LocalKey, LocalKey]:
    """The tensor whose memory a view or alias is, by local tensor."""
    roots: dict[LocalKey, LocalKey] = {}
    for task in schedule.tasks:
        pairs = list(task.aliases)
        if _is_view(task) and task.placed is not None:
            operand = task.placed.operands()[0]
            pairs += [((device, key), (device, operand)) for device, key, _ in task.writes]
        for new, old in pairs:
            roots[new] = roots.get(old, old)
    return roots


def _is_view(task: Task) -> bool:
    row = row_of(task.placed.node) if task.placed is not None else None
    return row is not None and row.view


def _is_either(task: Task) -> bool:
    row = row_of(task.placed.node) if task.placed is not None else None
    return row is not None and row.either


def _is_settled_view(task: Task) -> bool:
    return _is_view(task) and not _is_either(task)


def _viewed(task: Task) -> str:
    assert task.placed is not None
    return task.placed.operands()[0][0]


def _peaks(schedule: Schedule, curves: Curves) -> Mapping[int, MemoryPeak]:
    resident: dict[int, int] = defaultdict(int)
    for (device, _), nbytes in schedule.residents.items():
        resident[device] += nbytes
    none = np.zeros(len(schedule.tasks), np.int64)
    return {
        device: _peak(schedule, resident[device], curves.get(device, none))
        for device in sorted({*resident, *curves})
    }


def _peak(schedule: Schedule, resident: int, curve: npt.NDArray[np.int64]) -> MemoryPeak:
    if not curve.size:
        return MemoryPeak(resident, resident, 0, "")
    position = int(np.argmax(curve))
    most = int(curve[position])
    return MemoryPeak(resident + most, resident, most, schedule.tasks[position].name)
