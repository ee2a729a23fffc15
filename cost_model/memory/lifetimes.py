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

In a plan with stages, a tensor that a later phase reads is held, once for each micro-batch in
flight, from the end of the phase that makes it to the end of the last one that reads it, in the
order of the schedule. What is made once a step is held throughout, and so is one sum of what is
reduced once a step.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.prices.compute import stored_bytes
from partitioner.cost_model.schedule.buckets import Bucket
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Key, LocalKey, Task
from partitioner.ir.graph import Graph
from partitioner.ir.ops import row_of
from partitioner.ir.ops.pieces import is_of_torch
from partitioner.ir.phases import Part, StepOrder
from partitioner.ir.pipeline import ActionKind
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

    Both `first` and `last` are included. A `buffer` is written by a communication.
    """

    device: int
    key: Key
    nbytes: int
    first: int
    last: int
    buffer: bool = False

    @property
    def value(self) -> str:
        """The value that the tensor is, or a part of."""
        return self.key[0]

    @property
    def local(self) -> LocalKey:
        """The tensor on its device."""
        return self.device, self.key


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most bytes that a device holds."""

    bytes: int  #: Sum of the two below.
    resident_bytes: int  #: Constants and zeros, of blocks those that are held at the peak.
    activation_bytes: int  #: All other tensors at the peak.
    at: str  #: Name of the first task at the peak, "" if there is none.


def kept_bytes(graph: Graph) -> int:
    """Bytes of constants and stored values, which the devices of any plan keep together."""
    if graph.blocks and not is_of_torch(graph):  # which load their constants one after the other
        return 0
    types = graph.types
    read = {value for node in graph.nodes for value in node.reads}
    kept = [dense_bytes(types[v].numel, types[v].dtype) for v in graph.constants if v in read]
    for node in graph.nodes:
        row = row_of(node)
        if row is not None and row.stored and not node.inputs:
            for value in node.writes:
                nbytes = dense_bytes(types[value].numel, types[value].dtype)
                kept.append(stored_bytes(node, types[value].dtype, nbytes))
    return sum(kept)


def peak_bytes(schedule: Schedule) -> Mapping[int, MemoryPeak]:
    """Safe peaks, with head-room, of all devices that hold a tensor."""
    return peaks(schedule, _usage(schedule, tuple(safe_lifetimes(schedule))), with_headroom)


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


class Peaks(NamedTuple):
    """Peaks of all devices that hold a tensor.

    Attributes:
        safe: Those of `peak_bytes`.
        exact: Exact peaks, at the task where a device needs most room.
        with_scratch: The exact ones with what kernels take for themselves, each at the task where
            most is held with it.
    """

    safe: Mapping[int, MemoryPeak]
    exact: Mapping[int, MemoryPeak]
    with_scratch: Mapping[int, MemoryPeak]

    @classmethod
    def of(cls, schedule: Schedule, scratch: Curves) -> Peaks:
        """Count the peaks of a schedule; `scratch` has kernels' bytes, of devices where any is."""
        uses = _Uses.of(schedule)
        safe, exact = tuple(safe_lifetimes(schedule)), tuple(exact_lifetimes(schedule, uses.roots))
        curves = dict(_usage(schedule, exact, uses))
        safe_peaks = peaks(schedule, _usage(schedule, safe, uses), with_headroom)
        exact_peaks = peaks(schedule, curves, int)
        if not scratch:
            return cls(safe_peaks, exact_peaks, exact_peaks)
        for device, taken in scratch.items():
            curves[device] = curves.get(device, 0) + taken
        return cls(safe_peaks, exact_peaks, peaks(schedule, curves, int, headroom=False))


def _usage(schedule: Schedule, lifetimes: Sequence[Lifetime], uses: _Uses | None = None) -> Curves:
    """Count the most activation bytes at each task position over all micro-batches, by device."""
    if schedule.order is None:
        return usage_curves(schedule, lifetimes)
    return _step_curves(schedule, schedule.order, lifetimes, uses)


@dataclass(frozen=True)
class _Uses:
    """The phases in which devices use local tensors.

    Attributes:
        roots: The tensor whose memory each view or alias names.
        by_root: The phases in which a tensor or a view of it is read, written, sent or received.
        arrived: The phases in which a tensor is received.
    """

    roots: Mapping[LocalKey, LocalKey]
    by_root: Mapping[LocalKey, set[int]]
    arrived: Mapping[LocalKey, set[int]]

    @classmethod
    def of(cls, schedule: Schedule) -> _Uses:
        roots = _roots(schedule)
        by_root: dict[LocalKey, set[int]] = defaultdict(set)
        arrived: dict[LocalKey, set[int]] = defaultdict(set)
        for task in schedule.tasks:
            for local in task.reads:
                by_root[roots.get(local, local)].add(task.phase)
            for device, key, _ in task.writes:
                local = device, key
                by_root[roots.get(local, local)].add(task.target_phase)
                if task.comm is not None:
                    arrived[local].add(task.target_phase)
        return cls(roots, by_root, arrived)

    def of_life(
        self,
        life: Lifetime,
        made: int,
        read: int,
        own: Container[int],
        place: Mapping[int, float] | None = None,
    ) -> tuple[int, int]:
        """The phases in which a device makes or gets a tensor, and in which it uses it last.

        Args:
            life: The tensor.
            made, read: The phases of its first and its last task, of any device.
            own: The phases that the device runs.
            place: The turns of these phases, if they run in another order than that of numbers.
        """
        if not life.buffer and made in own and read in own and place is None:
            return made, read
        local = life.local
        used = self.by_root.get(self.roots.get(local, local)) or {made}
        if place is not None:
            read = max({read, *used} & place.keys(), key=place.__getitem__, default=read)
            if not life.buffer and made in own and read in own:
                return made, read
        begun = made
        if life.buffer:
            arrived = self.arrived.get(local, used)
            begun = min((phase for phase in arrived if phase >= made), default=min(used))
        elif made not in own:
            begun = min(used)
        return begun, read if read in own else max(used)


@dataclass(frozen=True)
class StepLives:
    """The lifetimes of a step of a plan with stages, by how long they are held.

    Attributes:
        passing: Tensors that are made and read within a phase, as positions in `Schedule.tasks`.
        begun: Of the tensors below, from the task that writes each to the end of its phase.
        kept: Tensors that a later phase reads, with the phases that make them and that read them
            last: held once for each micro-batch in between.
        always: Tensors that are made once a step, those of several micro-batches that are read
            once, and gradients that are added up: held throughout. In inference also the
            inputs of all micro-batches, one after the other as one tensor.
    """

    passing: Sequence[Lifetime]
    begun: Sequence[Lifetime]
    kept: Sequence[tuple[Lifetime, tuple[int, int]]]
    always: Sequence[Lifetime]

    @property
    def inside(self) -> Sequence[Lifetime]:
        """All that is held within a phase."""
        return (*self.passing, *self.begun)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        order: StepOrder,
        lifetimes: Iterable[Lifetime],
        uses: _Uses | None = None,
    ) -> StepLives:
        """Sort lifetimes along the tasks of one micro-batch by how long they are held.

        A device runs the phases of its own stages alone: it holds a tensor from the phase in which
        it makes or gets it to the last one of its own that uses it.
        """
        phase_at = [task.phase for task in schedule.tasks]
        start_of: dict[int, int] = {}
        for position, phase in enumerate(phase_at):
            start_of.setdefault(phase, position)
        end_of = {phase: position for position, phase in enumerate(phase_at)}
        uses = uses or _Uses.of(schedule)
        passing: list[Lifetime] = []
        begun: list[Lifetime] = []
        kept: list[tuple[Lifetime, tuple[int, int]]] = []
        fed, given = _borders(schedule, order, uses)
        end, count = order.phases.number(Part.REDUCE), order.table.micro_batches
        summed = _summed(schedule, uses.roots) if count > 1 else frozenset()
        lifetimes = tuple(lifetimes)
        inputs = {x for x in lifetimes if x.local in fed and not x.buffer} if fed else set()
        always = [
            x._replace(nbytes=x.nbytes * count) for x in sorted(inputs, key=lambda x: x.value)
        ]
        once = {phase for phase in range(end + 1) if order.phases.is_once(phase)}
        own_of = {device: order.own(device) for device in {x.device for x in lifetimes}}
        for life in (x for x in lifetimes if x not in inputs) if inputs else lifetimes:
            local, phases = life.local, (phase_at[life.first], phase_at[life.last])
            device = life.device
            made, read = uses.of_life(life, *phases, own_of[device], order.places(device))
            begin, stop = max(life.first, start_of.get(made, 0)), end_of.get(made, 0)
            span = life._replace(first=begin, last=max(life.first, stop))
            is_given = bool(given) and local in given
            if made not in once and local in summed:
                always.append(life)
                begun.append(span)
                continue
            if made == read and not is_given:
                passing.append(span._replace(last=max(begin, min(life.last, span.last))))
                continue
            if made in once or (read in once and not is_given and count > 1):
                always.append(life)
            else:
                kept.append((life, (made, end if is_given else read)))
            if made not in once:
                begun.append(span)
        return cls(passing, begun, kept, always)


def _borders(
    schedule: Schedule, order: StepOrder, uses: _Uses
) -> tuple[frozenset[LocalKey], frozenset[LocalKey]]:
    """Parts of inputs and of outputs of all micro-batches of a step of inference.

    Inputs are there when it begins, outputs until it ends. In training they are small, or summed.
    """
    if any(a.kind is not ActionKind.FORWARD for lane in order.table.lanes for a in lane):
        return frozenset(), frozenset()
    given = frozenset(uses.roots.get(local, local) for local in schedule.outputs)
    return frozenset(schedule.feeds), given


def _summed(schedule: Schedule, roots: Mapping[LocalKey, LocalKey]) -> frozenset[LocalKey]:
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


def _step_curves(
    schedule: Schedule, order: StepOrder, lifetimes: Sequence[Lifetime], uses: _Uses | None
) -> Curves:
    """Count the most activation bytes at each task position, of a plan with stages.

    While a phase runs, all that earlier phases keep is held.
    """
    lives = StepLives.of(schedule, order, lifetimes, uses)
    phase_at = np.fromiter((task.phase for task in schedule.tasks), np.int64, len(schedule.tasks))
    phases_end = 1 + order.phases.number(Part.REDUCE)
    kept: dict[int, dict[tuple[int, int], int]] = defaultdict(lambda: defaultdict(int))
    always: dict[int, int] = defaultdict(int)
    for life, phases in lives.kept:
        kept[life.device][phases] += life.nbytes
    for life in lives.always:
        always[life.device] += life.nbytes
    curves = dict(usage_curves(schedule, lives.inside))
    for device in {*kept, *always}:
        held = np.zeros(phases_end, np.int64)
        for phase, nbytes in _most_held(kept[device], order.runs(device)).items():
            held[phase] = nbytes
        base = held[phase_at]
        zeros = np.zeros(len(phase_at), np.int64)
        curves[device] = curves.get(device, zeros) + base + always[device]
    return curves


def _most_held(
    kept: Mapping[tuple[int, int], int], runs: Iterable[tuple[int, int]]
) -> Mapping[int, int]:
    """Count the most bytes that other phases keep while a phase runs, by phase.

    `kept` has the bytes of a micro-batch by the phases that make them and that read them last.
    """
    held, most = 0, defaultdict[int, int](int)
    made: dict[int, int] = defaultdict(int)
    freed: dict[int, int] = defaultdict(int)
    for (first, last), nbytes in kept.items():
        made[first] += nbytes
        freed[last] += nbytes
    for phase, _ in runs:
        most[phase] = max(most[phase], held)
        held += made[phase] - freed[phase]
    return most


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
    """Yield lifetimes from the task that writes a local tensor to its device's last reader.

    `roots` are the tensors whose memory views and aliases name, if they are known.
    """
    roots = _roots(schedule) if roots is None else roots
    arrival: dict[LocalKey, int] = {}
    last: dict[LocalKey, int] = {}
    for position, task in enumerate(schedule.tasks):
        for key in (*task.reads, *(new for new, _ in task.aliases)):
            root = roots.get(key, key)
            arrival.setdefault(root, position)
            last[root] = position
    for key in schedule.outputs:
        last[roots.get(key, key)] = len(schedule.tasks) - 1
    for key, position in _in_flight(schedule, roots):
        last[key] = max(last[key], position)
    buckets = schedule.buckets
    is_summed = bool(buckets) and schedule.order is not None
    summed = _summed(schedule, roots) if is_summed else frozenset[LocalKey]()
    members = {member.position: bucket for bucket in buckets for member in bucket.members}
    for position, bucket in members.items():
        for key in schedule.tasks[position].reads:  # copied into the bucket
            root = roots.get(key, key)
            last[root] = max(last[root], bucket.begins)
    for written, key, nbytes, is_buffer in _tensors(schedule, either=False):
        if written in members:
            continue
        begin = arrival.get(key, 0) if written is None else written
        end = max(begin, last.get(key, begin))
        yield Lifetime(*key, nbytes, begin, end, is_buffer)
    for bucket in buckets:
        yield from _in_bucket(schedule, bucket, last, summed)


def _in_flight(
    schedule: Schedule, roots: Mapping[LocalKey, LocalKey]
) -> Iterator[tuple[LocalKey, int]]:
    """The operands of communications within a phase, and until when each of them is held.

    That is until a node reads the result, or the end of the phase: nothing waits earlier for what
    is on its way, and parts of it are taken then, too. Operands of all-reduces, and those that are
    copied into buckets, are left out.
    """
    read: dict[LocalKey, int] = {}
    end_of: dict[int, int] = {}
    for position, task in enumerate(schedule.tasks):
        end_of[0 if schedule.order is None else task.phase] = position
        if task.placed is not None and not _is_named(task):
            for local in task.reads:
                read.setdefault(roots.get(local, local), position)
    brought: set[LocalKey] = set()
    joined = {member.position for bucket in schedule.buckets for member in bucket.members}
    for position, task in enumerate(schedule.tasks):
        if task.comm is None or task.phase != task.target_phase or position in joined:
            continue
        end = end_of[0 if schedule.order is None else task.phase]
        results = {device: (device, key) for device, key, _ in task.writes}
        is_part = task.comm.kind is CommKind.SLICE
        if task.comm.kind is CommKind.ALL_REDUCE:  # sums a copy, which is its result
            brought.update(results.values())
            continue
        for device, key in task.reads:
            local = device, key
            if device in results and (local in brought or not is_part):
                yield roots.get(local, local), min(end, read.get(results[device], end))
        if not is_part:
            brought.update(results.values())


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
            yield Lifetime(device, first, bucket.nbytes, begins, sent, buffer=True)


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


def _roots(schedule: Schedule) -> Mapping[LocalKey, LocalKey]:
    """The tensor whose memory each view or alias names."""
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


def _is_named(task: Task) -> bool:
    """Test whether a node's result is its first operand itself, or a view of it."""
    row = row_of(task.placed.node) if task.placed is not None else None
    return row is not None and (row.view or row.again or row.either or row.in_place is not None)


def _is_either(task: Task) -> bool:
    row = row_of(task.placed.node) if task.placed is not None else None
    return row is not None and row.either


def peaks(
    schedule: Schedule, curves: Curves, counted: Callable[[int], int], *, headroom: bool = True
) -> Mapping[int, MemoryPeak]:
    """Peaks of devices with these bytes of activations, beside what is resident.

    Args:
        schedule: The schedule.
        curves: Bytes at each position of a task.
        counted: What so many bytes count as.
        headroom: Whether the peak is where most bytes are held with head-room.
    """
    resident: dict[int, int] = defaultdict(int)
    for key, nbytes in schedule.residents.items():
        resident[key[0]] += 0 if key in schedule.loads else nbytes
    loaded = usage_curves(schedule, loaded_lifetimes(schedule))
    zeros = np.zeros(len(schedule.tasks), np.int64)
    most_of = {}
    for device in sorted({*resident, *curves}):
        constants, curve = resident[device], curves.get(device, zeros)
        held = loaded.get(device, zeros)
        most, name = 0, ""
        if curve.size:
            position = int(np.argmax(held + (with_headroom(curve) if headroom else curve)))
            constants += int(held[position])
            most, name = counted(int(curve[position])), schedule.tasks[position].name
        most_of[device] = MemoryPeak(constants + most, constants, most, name)
    return most_of
