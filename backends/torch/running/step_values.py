"""One step of a rank: its phases run in their order, and messages pass between.

What each phase of each micro-batch reads, and what is read of its results, is known before the step
runs (`StepPlan`): a step only moves values. Messages are received one phase ahead and sent beside
the next one (`ir.messages`). Each pair of phases has a process group of its own for each pair of
ranks, since NCCL carries what is sent between two ranks of a group in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.backends.torch.agreeing.faults import Roll, telling
from partitioner.backends.torch.agreeing.groups import resolved_link
from partitioner.backends.torch.graphs.comms import Message
from partitioner.backends.torch.graphs.phases import RankPhases
from partitioner.backends.torch.state.buffers import memory_of, without_views, write_buffers
from partitioner.ir.messages import Link

Values = dict[str, Tensor]


@dataclass(frozen=True)
class StepStart:
    """The local values that a rank begins a step with."""

    stored: Values  #: Parameters and buffers.
    micro_batches: Sequence[Values]  #: Inputs of each micro-batch.
    written: Mapping[str, str]  #: The buffer that each result writes.

    @property
    def values(self) -> list[Values]:
        """All values of each micro-batch."""
        return [{**self.stored, **inputs} for inputs in self.micro_batches]


@dataclass(frozen=True)
class Run:
    """A phase of a micro-batch, and what becomes of values around it; results by their places."""

    phase: int
    micro_batch: int  #: The micro-batch; the first one for a phase of the whole step.
    is_once: bool  #: Whether it runs once a step.
    receives: tuple[Message, ...]  #: Messages of other ranks that it is called with.
    arguments: tuple[str, ...]  #: Names of its arguments.
    last: tuple[str, ...]  #: The arguments that nothing reads later.
    sums: tuple[str, ...]  #: The sums that it adds to itself, behind its arguments.
    kept: tuple[tuple[int, str], ...]  #: Results that are read later, with their names.
    #: Those that other micro-batches read, too, with them.
    shared: tuple[tuple[int, str, tuple[int, ...]], ...]
    summed: tuple[tuple[int, str], ...]  #: Those that are added up over micro-batches.
    sends: tuple[tuple[int, Message], ...]  #: Messages among them.
    #: Those that write a buffer, with the later micro-batches that read it.
    writes: tuple[tuple[int, str, tuple[int, ...]], ...]


class StepPlan:
    """The runs of a rank in a step, in order.

    Args:
        phases: The rank's phases, of each micro-batch; they agree on what they add up.
        runs: (phase, micro-batch) in order; those in which the rank does nothing are left out.
        written: The buffer that each result writes.
        keep: Names of values that are read behind these runs.
        adds: Whether phases add to sums themselves (see `RankPhases.eager`).
    """

    def __init__(
        self,
        phases: Sequence[RankPhases],
        runs: Sequence[tuple[int, int]],
        written: Mapping[str, str],
        keep: Collection[str],
        *,
        adds: bool = False,
    ) -> None:
        self.phases = phases
        self._asked = runs
        self._written = written
        self._keep = frozenset(keep)
        self._adds = adds
        runs = [run for run in runs if run[0] in phases[run[1]].graphs]
        self._last: dict[tuple[int, str], int] = {}  # position of the last reader
        for position, (phase, micro_batch) in enumerate(runs):
            for name in phases[micro_batch].graphs[phase].arguments:
                self._last[micro_batch, name] = position
        self.runs = tuple(self._run(position, *run) for position, run in enumerate(runs))

    @cached_property
    def joined(self) -> Mapping[str, tuple[slice, ...]]:
        """The rows that each micro-batch has of results that are put together, by local name."""
        first, sums = self.phases[0], self.phases[0].summed.union(self._written)
        names = first.delivered.intersection(self._keep).difference(sums)
        rows = {}
        for name in sorted(names) if len(self.phases) > 1 else ():
            shapes = [of.types[name].shape for of in self.phases]
            if all(shapes):
                ends = [0, *accumulate(shape[0] for shape in shapes)]
                rows[name] = tuple(slice(*ends[i : i + 2]) for i in range(len(shapes)))
        return rows

    @property
    def without_adding(self) -> StepPlan:
        """The plan of phases that add to no sums."""
        return StepPlan(self.phases, self._asked, self._written, self._keep)

    def _run(self, position: int, phase: int, micro_batch: int) -> Run:
        of = self.phases[micro_batch]
        graph, is_once = of.graphs[phase], of.is_once(phase)
        messages = {message.name: message for message in graph.sends}
        results = [one for one in enumerate(graph.results) if one[1] not in messages]
        summed = [one for one in results if one[1] in of.summed]
        later = range(micro_batch + 1, len(self.phases))
        return Run(
            phase,
            micro_batch,
            is_once,
            tuple(message for message in graph.receives if message.source != of.rank),
            graph.arguments,
            tuple(
                name
                for name in dict.fromkeys(graph.arguments)
                if self._last[micro_batch, name] == position and name not in self._keep
            ),
            of.adds[phase] if self._adds else (),
            tuple(
                (place, name)
                for place, name in results
                if (self._last.get((micro_batch, name), -1) > position or name in self._keep)
                and name not in (of.adds[phase] if name not in self._keep else of.summed)
            ),
            tuple(
                (place, name, tuple(m for m in later if self._is_read(name, m, -1)))
                for place, name in results
            )
            if is_once and not micro_batch
            else (),
            tuple(summed),
            tuple(
                (place, messages[name])
                for place, name in enumerate(graph.results)
                if name in messages
            ),
            tuple(
                (
                    place,
                    self._written[name],
                    tuple(m for m in later if self._is_read(self._written[name], m, position)),
                )
                for place, name in results
                if name in self._written
            ),
        )

    def _is_read(self, name: str, micro_batch: int, position: int) -> bool:
        return name in self._keep or self._last.get((micro_batch, name), -1) > position


class StepValues:
    """The values that a rank holds in a step; it changes `values`, those of each micro-batch."""

    def __init__(self, plan: StepPlan, values: list[Values]) -> None:
        self.plan = plan
        self._values = values
        self._sums: Values = {}
        self._next: Values = {}  # contents of buffers
        self._argument_memory: set[int] = set()
        self._wholes: Values = {}
        self._places: Counter[str] = Counter()

    def arguments(self, run: Run) -> list[Tensor | None]:
        """A phase's arguments and sums (None if not begun); the list alone holds what ends here."""
        own = self._values[run.micro_batch]
        values = {**own, **self._sums} if run.is_once else own
        arguments: list[Tensor | None] = [values[name] for name in run.arguments]
        for name in run.last:
            own.pop(name, None)
        if run.summed and any(name not in self._sums for _, name in run.summed):
            self._argument_memory = {memory_of(x) for x in arguments if x is not None}
        if run.sums:
            arguments += map(self._sums.get, run.sums)
        return arguments

    def receive(self, message: Message, micro_batch: int, tensor: Tensor) -> None:
        """Keep a message until the phase that it is for."""
        self._values[micro_batch][message.name] = tensor

    def finish(self, run: Run, results: Sequence[Tensor]) -> list[tuple[Message, Tensor]]:
        """Keep the results of a phase; returns the messages to send."""
        own, joined = self._values[run.micro_batch], () if run.is_once else self.plan.joined
        for place, name in run.kept:
            result = results[place]
            own[name] = self._in_whole(name, run, result) if name in joined else result
        for place, name, others in run.shared:
            for micro_batch in others:
                self._values[micro_batch].setdefault(name, results[place])
        addable = self._addable(run, results) if run.summed else ()
        for place, name in run.summed:
            result = results[place]
            if name not in self._sums:  # it begins in the memory of its first result, if it may
                self._sums[name] = result if place in addable else result.clone()
            elif result is not self._sums[name]:  # else the phase added to it
                self._sums[name].add_(result)
        for place, buffer, readers in run.writes:
            self._next[buffer] = results[place]
            for micro_batch in readers:
                self._values[micro_batch][buffer] = results[place]
        return [(message, results[place]) for place, message in run.sends]

    def _in_whole(self, name: str, run: Run, result: Tensor) -> Tensor:
        """Copy a result to its rows of the whole batch's."""
        rows = self.plan.joined[name]
        if name not in self._wholes:
            self._wholes[name] = _longer(result, rows[-1].stop)
        part = self._wholes[name][rows[run.micro_batch]]
        self._places[name] += 1
        return part.copy_(result)

    def whole(self, name: str) -> Tensor | None:
        """A delivered result of all micro-batches, by local name; None if they are not joined."""
        return self._wholes[name] if self._places[name] == len(self._values) else None

    def _addable(self, run: Run, results: Sequence[Tensor]) -> set[int]:
        """Places of the first results of sums whose memory is theirs alone: it may be added to.

        Others are read later, expanded, or views of arguments, constants or other results.
        """
        first = {place: name for place, name in run.summed if name not in self._sums}
        if not first:
            return set()
        written = {place for place, *_ in run.writes}
        read = {place for place, _ in run.kept}
        uses = Counter(map(memory_of, results))
        module = self.plan.phases[run.micro_batch].graphs[run.phase].module
        taken = self._argument_memory.union(map(memory_of, module.buffers()))
        return {
            place
            for place in first.keys() - written - read
            if uses[memory_of(results[place])] == 1
            and memory_of(results[place]) not in taken
            and not torch._debug_has_internal_overlap(results[place])
        }

    def result(self, name: str, micro_batch: int) -> Tensor:
        """A delivered result of a micro-batch, by local name."""
        return self._values[micro_batch][name]

    def total(self, name: str) -> Tensor:
        """A gradient of the whole step, by local name."""
        return self._sums[name] if name in self._sums else self._values[0][name]

    def taken(self, names: Collection[str]) -> Values:
        """Take those of some values that the first micro-batch has; the others are dropped."""
        own = self._values[0]
        return {name: own[name] for name in names if name in own}

    def store(self, stored: Mapping[str, Tensor], *others: Values) -> None:
        """Write the next contents over stored buffers; views of these in `others` become copies."""
        contents = {name: x for name, x in self._next.items() if name in stored}
        if not contents:
            return
        written = {memory_of(stored[name]) for name in contents}
        for values in others:
            values.update({name: without_views(x, written) for name, x in values.items()})
        write_buffers(stored, contents)


def _longer(tensor: Tensor, rows: int) -> Tensor:
    """An empty tensor like another one, in its order of dims, with so many rows."""
    shape = rows, *tensor.shape[1:]
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


#: Runs a phase on its arguments and sums, which it may take out of their list.
RunPhase = Callable[[Run, list[Tensor | None]], Sequence[Tensor]]
#: What surrounds the waiting for a message of a micro-batch (True), or its sending.
Around = Callable[[Message, int, bool], AbstractContextManager[object]]


def run_phases(
    values: StepValues, posts: Posts, run: RunPhase, wanted: Callable[[int], bool]
) -> None:
    """Run the phases of a step by `run`; nothing is sent to phases that are not `wanted`."""
    runs = values.plan.runs
    for position, one in enumerate(runs):
        for ahead in runs[position : position + 2]:
            posts.post(ahead)
        posts.free(one.phase, one.micro_batch)
        if one.receives:
            _receive(values, posts, one)
        results = run(one, values.arguments(one))
        _send(values, posts, one, results, wanted)
        del results
    posts.wait()


def _receive(values: StepValues, posts: Posts, run: Run) -> None:
    """Keep what arrives for a phase; behind it, the values alone hold that."""
    for message, tensor in posts.arrived(run.phase, run.micro_batch):
        values.receive(message, run.micro_batch, tensor)


def _send(
    values: StepValues,
    posts: Posts,
    run: Run,
    results: Sequence[Tensor],
    wanted: Callable[[int], bool],
) -> None:
    """Keep and send results of a phase; nothing is sent to phases that are not `wanted`."""
    for message, tensor in values.finish(run, results):
        if not wanted(message.phases[1]):
            continue
        if message.target == posts.rank:
            values.receive(message, run.micro_batch, tensor)
        else:
            posts.send(message, run.micro_batch, tensor)


class Posts:
    """Messages that are on their way to and from a rank; `around` surrounds what it does."""

    def __init__(
        self,
        phases: Sequence[RankPhases],
        device: torch.device,
        roll: Roll,
        around: Around = lambda *_: nullcontext(),
    ) -> None:
        self.rank = phases[0].rank
        self._phases = phases
        self._device = device
        self._roll = roll
        self._around = around
        self._posted: dict[tuple[int, int], list[tuple[Message, Tensor, Any]]] = {}
        self._sent: list[tuple[Message, Tensor, Any, int]] = []

    @cached_property
    def _place(self) -> Mapping[tuple[int, int], int]:
        order = self._phases[0].order
        return {run: place for place, run in enumerate(order.runs(self.rank))}

    def post(self, run: Run) -> None:
        """Get ready to receive what a phase is called with, once."""
        phase, micro_batch = run.phase, run.micro_batch
        if not run.receives or (phase, micro_batch) in self._posted:
            return
        posted = self._posted[phase, micro_batch] = []
        for message in run.receives:
            buffer = torch.empty(message.numel, dtype=message.dtype, device=self._device)
            link = resolved_link(_link(message))
            posted.append((message, buffer, dist.irecv(buffer, message.source, link, micro_batch)))

    def arrived(self, phase: int, micro_batch: int) -> list[tuple[Message, Tensor]]:
        """The messages that a phase is called with; waits for them."""
        arrived = []
        for message, buffer, work in self._posted.pop((phase, micro_batch)):
            with (
                telling(f"receiving from rank {message.source}", self.rank, self._roll),
                self._around(message, micro_batch, True),
            ):
                work.wait()
            arrived.append((message, buffer))
        return arrived

    def free(self, phase: int, micro_batch: int) -> None:
        """Free what has left when a phase begins; waits for it where the order says so."""
        if not self._sent:
            return
        place = self._place.get((phase, micro_batch), -1)
        self._wait([entry for entry in self._sent if entry[3] <= place])
        self._sent = [entry for entry in self._sent if entry[3] > place]

    def send(self, message: Message, micro_batch: int, tensor: Tensor) -> None:
        """Start to send; what has left is freed."""
        self._sent = [entry for entry in self._sent if not entry[2].is_completed()]
        dense, link = tensor.contiguous(), _link(message)
        end = self._phases[micro_batch].ends.get((link, micro_batch), len(self._place))
        with (
            telling(f"sending to rank {message.target}", self.rank, self._roll),
            self._around(message, micro_batch, False),
        ):
            work = dist.isend(dense, message.target, resolved_link(link), micro_batch)
            self._sent.append((message, dense, work, end))

    def wait(self) -> None:
        """Wait until all has left."""
        self._wait(self._sent)
        self._sent = []

    def _wait(self, sent: Sequence[tuple[Message, Tensor, Any, int]]) -> None:
        for message, _, work, _ in sent:
            with telling(f"sending to rank {message.target}", self.rank, self._roll):
                work.wait()


def _link(message: Message) -> Link:
    return (*message.phases, message.source, message.target)
