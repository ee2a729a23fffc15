"""Bytes that the sessions of ONNX Runtime hold along a schedule, beside constants.

A device runs its nodes between two communications, of one phase and block, in one session. What
enters a session or leaves it lies outside, from the session's start to its end. Inside, ONNX
Runtime decides beforehand which tensors share memory: a kernel may write into an operand that
nothing else reads, and a tensor takes the memory of one of the same shape that is not needed any
more. Such memory is held from its first to its last tensor, in between, too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.memory.cpu_kernels import Kernel, LocalNode, Name, Session, Tensor
from partitioner.cost_model.memory.lives import MemoryPeak, peaks
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Key, LocalKey, Task
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_view
from partitioner.ir.program import CommKind
from partitioner.ir.types import dense_bytes

#: Convolutions are plain where blocked ones compute this many times as many products: few channels
#: are computed no slower so (docs/concepts/memory.md).
MOST_FILLED = 1.25

Part = int | None  #: A block, or what is in none.


@dataclass(frozen=True)
class Run:
    """Tasks of one device that are one session."""

    part: Part  #: Their block.
    session: Session  #: Their nodes.


@dataclass(frozen=True)
class Sessions:
    """The sessions of one device, and what lies between them."""

    runs: Sequence[Run]  #: In order.
    between: npt.NDArray[np.int64]  #: Bytes outside of sessions at each position of the schedule.

    def held(self, plain: Collection[Part]) -> npt.NDArray[np.int64]:
        """Count the most bytes at each position, if convolutions of some parts are plain."""
        curve = self.between.copy()
        for run in self.runs:
            session, live = run.session, 0
            kernels, tensors = session.kernels(blocked=run.part not in plain)
            memory = _Memory(tensors, session.given, Counter(n for k in kernels for n in k.reads))
            for index, kernel in enumerate(kernels):
                memory.take(index, kernel)
            change = [0] * (len(kernels) + 1)
            for nbytes, first, last in memory.spans:
                change[first] += nbytes
                change[last + 1] -= nbytes
            most: dict[int, int] = {}
            for kernel, more in zip(kernels, change, strict=False):
                live += more
                most[kernel.at] = max(most.get(kernel.at, 0), live + kernel.scratch_bytes)
            for at, nbytes in most.items():
                curve[at] += nbytes
        return curve


@dataclass(frozen=True)
class Held:
    """Count what the sessions of all devices hold, under the layouts that they run with."""

    plain: frozenset[Part]  #: The parts of the graph whose convolutions are plain.
    peaks: Mapping[int, MemoryPeak]  #: The peak of each device that has tasks.

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, limits: Mapping[int, int]) -> Held | None:
        """Count the sessions of a plan without stages; None for a graph that runs in no sessions.

        Convolutions are plain in parts with too few channels for blocks, and in those that would
        exceed the memory of a device, `limits`.
        """
        if not executor_of(graph).in_sessions or not schedule.order.is_whole or graph.backward:
            return None
        sessions = sessions_of(graph, schedule)
        plain = plain_parts(sessions.values())
        most = cls._peaks(schedule, sessions, plain)
        over = {device for device, peak in most.items() if peak.bytes > limits[device]}
        runs = {
            run.part
            for device in over
            for run in sessions[device].runs
            if run.session.may_be_blocked
        }
        if not runs <= plain:
            plain |= runs
            most = cls._peaks(schedule, sessions, plain)
        return cls(plain, most)

    @staticmethod
    def _peaks(
        schedule: Schedule, sessions: Mapping[int, Sessions], plain: frozenset[Part]
    ) -> Mapping[int, MemoryPeak]:
        curves = {device: of.held(plain) for device, of in sessions.items()}
        return peaks(schedule, curves, int, headroom=False)


def plain_parts(sessions: Iterable[Sessions]) -> frozenset[Part]:
    """The parts whose convolutions have too few channels for blocks."""
    plain: Counter[Part] = Counter()
    blocked: Counter[Part] = Counter()
    for run in (run for one in sessions for run in one.runs):
        some, filled = run.session.products()
        plain[run.part] += some
        blocked[run.part] += filled
    return frozenset(part for part in plain if blocked[part] > MOST_FILLED * plain[part])


@dataclass
class _Memory:
    """Decides as ONNX Runtime does which tensors of a session share memory."""

    tensors: Mapping[Name, Tensor]  #: All tensors.
    given: Collection[Name]  #: Those that lie outside, beside those that no kernel writes.
    reads: Mapping[Name, int]  #: How often each is read.
    #: Bytes of each memory, and the first and the last kernel that it is held at.
    spans: list[list[int]] = field(default_factory=list)
    _of: dict[Name, int] = field(default_factory=dict)  # memory of each tensor
    _uses: Counter[int] = field(default_factory=Counter)  # of each memory, still to come
    _free: list[tuple[Tensor, int]] = field(default_factory=list)

    def take(self, index: int, kernel: Kernel) -> None:
        """Find memory for the results of a kernel, and free what is read for the last time."""
        made = []
        for place, name in enumerate(kernel.writes):
            if name in self.given:
                continue
            memory = self._found(name, kernel) if place == 0 else self._freed(name)
            if memory is None and not (kernel.view and place == 0):
                memory = len(self.spans)
                self.spans.append([self.tensors[name].nbytes, index, index])
            if memory is not None:  # else a view of what lies outside
                self._of[name] = memory
                self._uses[memory] += self.reads.get(name, 0)
                made.append((name, memory))
        for name in kernel.reads:
            if (memory := self._of.get(name)) is not None:
                self.spans[memory][2] = index
                self._uses[memory] -= 1
                if not self._uses[memory]:
                    self._free.insert(0, (self.tensors[name], memory))
        for name, memory in made:
            self.spans[memory][2] = index
            if not self._uses[memory]:
                self._free.insert(0, (self.tensors[name], memory))

    def _found(self, name: Name, kernel: Kernel) -> int | None:
        if kernel.view:
            return self._of.get(kernel.reads[0]) if kernel.reads else None
        for operand in kernel.into:
            memory = self._of.get(operand)
            if memory is not None and self._uses[memory] == 1:
                return memory
        return self._freed(name)

    def _freed(self, name: Name) -> int | None:
        tensor = self.tensors[name]
        for place, (known, memory) in enumerate(self._free):
            if known == tensor:
                del self._free[place]
                return memory
        return None


def sessions_of(graph: Graph, schedule: Schedule) -> Mapping[int, Sessions]:
    """The sessions of each device that has tasks, for one request."""
    tasks: dict[int, list[tuple[int, Task]]] = defaultdict(list)
    for position, task in enumerate(schedule.tasks):
        for device in {device for device, _ in _touched(task)}:
            tasks[device].append((position, task))
    return {
        device: _Device(graph, schedule, device, tasks[device]).sessions()
        for device in sorted(tasks)
    }


def _touched(task: Task) -> Iterator[LocalKey]:
    yield from task.reads
    yield from ((device, key) for device, key, _ in task.writes)
    yield from (new for new, _ in task.aliases)


def _is_local(task: Task) -> bool:
    """Test whether a task is computed in a session."""
    return task.placed is not None or (task.comm is not None and task.comm.kind is CommKind.SLICE)


@dataclass(frozen=True)
class _Device:
    """The tasks of one device."""

    graph: Graph
    schedule: Schedule
    device: int
    tasks: Sequence[tuple[int, Task]]  #: Those of the device, with their positions.

    @cached_property
    def roots(self) -> Mapping[Key, Key]:
        """The tensor that each alias is another name of."""
        roots: dict[Key, Key] = {}
        for _, task in self.tasks:
            for (device, new), (_, old) in task.aliases:
                if device == self.device:
                    roots[new] = roots.get(old, old)
        return roots

    def sessions(self) -> Sessions:
        """Group the device's tasks into sessions, and count the bytes between them."""
        groups = list(self._groups())
        first: dict[Key, int] = dict.fromkeys(self._own(self.schedule.feeds), 0)
        last: dict[Key, int] = {}
        sizes = {key: self.schedule.feeds[self.device, key] for key in first}
        moments: list[tuple[int, int, int]] = []  # bytes, first, last
        made: dict[Key, int] = {}  # the group that makes it
        left: set[Key] = {*self._own(self.schedule.outputs)}
        for number, group in enumerate(groups):
            for position, task in group:
                for key, nbytes in self._writes(task):
                    made[key], sizes[key] = number, nbytes
                    first[key] = group[0][0] if _is_local(task) else position
                if task.comm is not None and not _is_local(task):
                    moments.append((self._arriving(task), position, position))
            for key in dict.fromkeys(key for _, task in group for key in self._reads(task)):
                if made.get(key) != number:
                    left.add(key)
                    last[key] = group[-1][0]
        end = len(self.schedule.tasks) - 1
        last |= dict.fromkeys(self._own(self.schedule.outputs), end)
        summed = self._summed(groups, made)
        moments += [
            (sizes[key], first[key], last.get(key, first[key])) for key in first if key in left
        ]
        moments += [(-sizes[key], at, at) for key, at in summed if key in left]
        change = np.zeros(end + 2, np.int64)
        for nbytes, begin, stop in moments:
            change[begin] += nbytes
            change[stop + 1] -= nbytes
        runs = tuple(self._run(group, left) for group in groups if _is_local(group[0][1]))
        return Sessions(runs, np.cumsum(change)[:-1])

    def _groups(self) -> Iterator[list[tuple[int, Task]]]:
        """Tasks that are one session each, and communications by themselves."""
        group: list[tuple[int, Task]] = []
        now: tuple[int, Part] = (0, None)
        for position, task in self.tasks:
            if task.placed is None and task.comm is None:
                continue
            then = task.hops, self._part(task)
            if group and (not _is_local(task) or then != now):
                yield group
                group = []
            now = then
            if _is_local(task):
                group.append((position, task))
            else:
                yield [(position, task)]
        if group:
            yield group

    def _part(self, task: Task) -> Part:
        return None if task.placed is None else self.graph.blocks.get(task.name)

    def _own(self, keys: Iterable[LocalKey]) -> Iterator[Key]:
        return (self.roots.get(key, key) for device, key in keys if device == self.device)

    def _reads(self, task: Task) -> Iterator[Key]:
        residents = self.schedule.residents
        return (key for key in self._own(task.reads) if (self.device, key) not in residents)

    def _writes(self, task: Task) -> Iterator[tuple[Key, int]]:
        return ((key, n) for device, key, n in task.writes if device == self.device)

    def _arriving(self, task: Task) -> int:
        """Bytes of what others send here, before it is in place."""
        assert task.comm is not None
        arriving = sum(
            transfer.numel
            for transfer in task.comm.transfers
            if transfer.target == self.device != transfer.source
        )
        return dense_bytes(arriving, task.comm.dtype)

    def _summed(
        self, groups: Sequence[Sequence[tuple[int, Task]]], made: Mapping[Key, int]
    ) -> Iterator[tuple[Key, int]]:
        """Operands of all-reduces that become the result, with the positions of these."""
        reads = Counter(
            key
            for group in groups
            for key in {key for _, task in group for key in self._reads(task)}
        )
        kept = self.schedule.outputs
        for position, task in (group[0] for group in groups):
            if task.comm is None or task.comm.kind is not CommKind.ALL_REDUCE:
                continue
            for key in self._reads(task):
                if reads[key] == 1 and key in made and (self.device, key) not in kept:
                    yield key, position

    def _run(self, group: Sequence[tuple[int, Task]], left: Collection[Key]) -> Run:
        tensors: dict[Name, Tensor] = {}
        nodes = [self._node(position, task, tensors) for position, task in group]
        written = {name for node in nodes for name in node.writes}
        session = Session(nodes, tensors, frozenset(key for key in left if key in written))
        return Run(self._part(group[0][1]), session)

    def _node(self, position: int, task: Task, tensors: dict[Name, Tensor]) -> LocalNode:
        placed = task.placed
        if placed is None:
            reads, writes = tuple(self._reads(task)), tuple(key for key, _ in self._writes(task))
            for key in (*reads, *writes):
                tensors[key] = self._tensor(key)
            sizes = tuple(tensors[key].shape for key in reads)
            return LocalNode(position, "Slice", {}, reads, sizes, writes)
        node = placed.node
        names: list[Name | None] = []
        shapes: list[tuple[int, ...]] = []
        for value, at in zip((*node.inputs, *node.captures), placed.ins, strict=True):
            if at is None:
                names.append(None)
                shapes.append(())
                continue
            key = self.roots.get((value, at), (value, at))
            tensor = self._tensor((value, at))
            is_resident = (self.device, key) in self.schedule.residents
            names.append(None if is_resident else key)
            shapes.append(tensor.shape)
            if not is_resident:
                tensors[key] = tensor
        results: list[Name | None] = []
        for value, at in zip(node.outputs, placed.outs, strict=True):
            results.append(None if at is None else (value, at))
            if at is not None:
                tensors[value, at] = self._tensor((value, at))
        return LocalNode(
            position,
            node.op,
            node.attrs,
            tuple(names),
            tuple(shapes),
            tuple(results),
            is_view(node),
        )

    def _tensor(self, key: Key) -> Tensor:
        value, at = key
        point = at.mesh.coord(self.device) if self.device in at.mesh.members else {}
        shape = at.sharding.local_shape(at.mesh, point)
        return Tensor(shape, self.graph.types[value].dtype)
