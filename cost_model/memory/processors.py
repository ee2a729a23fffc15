"""Bytes that ranks of PyTorch hold on processors, other than by the lives of tensors.

gloo communicates where tensors lie. An all-reduce takes the place of an operand that nothing else
reads. The operand of a reduce-scatter is added up as a whole, and a rank's part of it is copied
where it is waited for (`backends.torch.graphs.eager`). The inputs of a step lie in the memory of
its caller throughout. Behind the last pass the optimizer's step runs, beside all gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from partitioner.cost_model.memory.lifetimes import (
    Curves,
    InFlight,
    Lifetime,
    exact_lifetimes,
    in_flight,
)
from partitioner.cost_model.memory.lives import StepLives, Uses
from partitioner.cost_model.memory.torch_kernels import scratch_curves, step_bytes, updates_of
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey, Task
from partitioner.ir.graph import Graph
from partitioner.ir.ops import is_stored, is_view
from partitioner.ir.program import CommKind

#: Views through which an all-reduce may write to the tensor that they are of.
_PASSING_ON = frozenset(
    {
        *("aten::reshape", "aten::view", "aten::_unsafe_view"),
        *("aten::t", "aten::transpose.int", "aten::permute"),
    }
)


def held_curves(
    graph: Graph, schedule: Schedule, gpus: Container[int], uses: Uses, exact: Curves
) -> Curves:
    """Bytes at each position of a task that ranks of PyTorch hold, by device.

    `exact` has them by the lives of tensors, beside which kernels take bytes for themselves.
    """
    scratch = scratch_curves(graph, schedule, gpus)
    on_gpus = {device: curve for device, curve in exact.items() if device in gpus}
    curves = {device: curve + scratch.get(device, 0) for device, curve in on_gpus.items()}
    return curves | _of_processors(graph, schedule, exact.keys() - on_gpus.keys(), uses, scratch)


def _of_processors(
    graph: Graph, schedule: Schedule, devices: Collection[int], uses: Uses, scratch: Curves
) -> Curves:
    ranks = _Ranks(schedule, devices, uses)
    lives = StepLives.of(schedule, ranks.lifetimes(), uses)
    curves = {
        device: curve + scratch.get(device, 0) + ranks.inputs[device]
        for device, curve in lives.curves().items()
    }
    after = ranks.gradients(lives.tensors)
    for device, (position, updates) in updates_of(schedule).items():
        if device in curves:
            held = after[device] + ranks.inputs[device] + step_bytes(graph, updates, device)
            curves[device][position] = max(curves[device][position], held)
    return curves


@dataclass(frozen=True)
class _Ranks:
    schedule: Schedule
    devices: Collection[int]
    uses: Uses

    def lifetimes(self) -> Iterator[Lifetime]:
        """Yield exact lifetimes, as communications of a processor end and begin them."""
        for life in exact_lifetimes(self.schedule, self.uses.roots):
            if life.device not in self.devices:
                continue
            if life.buffer and (arrives := self._scattered.get(life.local)) is not None:
                yield life._replace(first=arrives, last=max(arrives, life.last))
            elif life.buffer or life.local not in self.schedule.feeds:
                last = self._ends.get(life.local, life.last)
                yield life._replace(last=max(life.first, min(last, life.last)))

    def gradients(self, lives: Iterable[Lifetime]) -> Mapping[int, int]:
        """Bytes of what is there when the last pass has ended, by device."""
        roots, held = self.uses.roots, defaultdict[int, int](int)
        given = {roots.get(local, local) for local in self.schedule.outputs}
        for life in lives:
            if life.local in given:
                held[life.device] += life.nbytes
        return held

    @cached_property
    def inputs(self) -> Mapping[int, int]:
        """Bytes of the inputs of all micro-batches, by device."""
        order, held = self.schedule.order, defaultdict[int, int](int)
        for (device, _), nbytes in self.schedule.feeds.items():
            held[device] += nbytes * order.table.micro_batches
        return held

    @cached_property
    def _in_flight(self) -> Collection[InFlight]:
        return tuple(in_flight(self.schedule, self.uses.roots))

    @cached_property
    def _scattered(self) -> Mapping[LocalKey, int]:
        """Positions at which the results of reduce-scatters are copied.

        At the end of a phase one after the other is, and the operand freed: the largest result is
        there with all operands.
        """
        arrives: dict[LocalKey, int] = {}
        last: dict[tuple[int, int], tuple[int, LocalKey]] = {}
        sizes = {
            (device, key): nbytes
            for sent in self._scatters
            for device, key, nbytes in self.schedule.tasks[sent.position].writes
        }
        for sent in self._scatters:
            arrives[sent.result] = sent.until
            if self._is_end(sent):
                place = sent.result[0], sent.until  # device, end
                largest = last.get(place, (-1, sent.result))
                last[place] = max(largest, (sizes[sent.result], sent.result), key=lambda o: o[0])
        for (_, end), (_, result) in last.items():
            arrives[result] = end - 1
        return arrives

    @cached_property
    def _ends(self) -> Mapping[LocalKey, int]:
        """Positions at which operands of communications are held last."""
        ends: dict[LocalKey, int] = {}
        for position, task in enumerate(self.schedule.tasks):
            if task.comm is None or task.comm.kind is not CommKind.ALL_REDUCE:
                continue
            for local in task.reads:
                if position not in self._joined and self._is_free(local, task.phase):
                    ends[self.uses.roots.get(local, local)] = position - 1
        for sent in self._scatters:
            if self._is_end(sent) and self._last_read[sent.operand] <= sent.position:
                ends[sent.operand] = sent.until - 1
        return ends

    @cached_property
    def _scatters(self) -> Collection[InFlight]:
        def scatters(task: Task) -> bool:
            return task.comm is not None and task.comm.kind is CommKind.REDUCE_SCATTER

        return [one for one in self._in_flight if scatters(self.schedule.tasks[one.position])]

    def _is_end(self, sent: InFlight) -> bool:
        """Tell whether a communication is waited for at the end of its phase, some tasks later."""
        end = self._end_of[self.schedule.tasks[sent.position].phase]
        return sent.position + 1 < sent.until == end

    @cached_property
    def _end_of(self) -> Mapping[int, int]:
        return {task.phase: position for position, task in enumerate(self.schedule.tasks)}

    @cached_property
    def _joined(self) -> Collection[int]:
        return {one.position for bucket in self.schedule.buckets for one in bucket.members}

    @cached_property
    def _last_read(self) -> Mapping[LocalKey, int]:
        roots = self.uses.roots
        reads = enumerate(task.reads for task in self.schedule.tasks)
        return {roots.get(local, local): at for at, of in reads for local in of}

    @cached_property
    def _readers(self) -> Counter[LocalKey]:
        readers = Counter(local for task in self.schedule.tasks for local in task.reads)
        return readers + Counter(old for task in self.schedule.tasks for _, old in task.aliases)

    @cached_property
    def _makers(self) -> Mapping[LocalKey, Task]:
        tasks = self.schedule.tasks
        return {(device, key): task for task in tasks for device, key, _ in task.writes}

    def _is_free(self, local: LocalKey, phase: int) -> bool:
        """Tell whether an all-reduce may write over a tensor, its only reader."""
        task = self._makers.get(local)
        if task is None or task.placed is None or task.phase != phase:
            return False
        node = task.placed.node
        if self._readers[local] > 1 or local in self.schedule.outputs or is_stored(node):
            return False
        if not is_view(node):
            return len(task.placed.results()) == 1
        return node.op in _PASSING_ON and self._is_free(
            (local[0], task.placed.operands()[0]), phase
        )
