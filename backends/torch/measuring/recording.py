"""The record of a rank's steps: its passes with marks between the tasks, its bytes counted.

A pass runs as it does without recording (see `eager`); between the calls of two tasks its code
marks the time. What the host does beside the calls of a task counts for the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from partitioner.backends.observed import Event, RankLog, Role, Step
from partitioner.backends.process_group import (
    clock_offset,
    gpu_name,
    timed,
    timed_steps,
)
from partitioner.backends.torch.agreeing.faults import Roll
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor
from partitioner.backends.torch.graphs.comms import Message
from partitioner.backends.torch.graphs.eager import direct
from partitioner.backends.torch.graphs.notes import OPERATOR, noted_tasks
from partitioner.backends.torch.graphs.phases import RankPhases, of_each
from partitioner.backends.torch.measuring.clocks import Clock, clock_of
from partitioner.backends.torch.measuring.timing import (
    NAME,
    optimizers_of,
    stays_whole,
    stored_part,
    watch_steps,
)
from partitioner.backends.torch.running.step_values import (
    Posts,
    Run,
    StepPlan,
    StepStart,
    StepValues,
    Values,
    run_phases,
)
from partitioner.backends.torch.state.shards import part_of
from partitioner.backends.waiting import STEPS
from partitioner.ir.exchange import Region

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Span:
    """The calls between two marks."""

    nodes: tuple[str, ...]  #: The plan's nodes that they are of.
    comms: tuple[int, ...]  #: The communications that they are of.
    label: str  #: The first operator of the task.
    role: Role  #: The rank's part.
    micro_batch: int = 0  #: The micro-batch.


def marked(module: fx.GraphModule, clock: Clock) -> tuple[fx.GraphModule, tuple[Span, ...]]:
    """A pass of `eager`, changed to mark the time around each task, and the spans between marks."""
    spans: list[Span] = []
    for node, span in _spans(module.graph):
        if node.op == "output":
            with module.graph.inserting_before(node):
                module.graph.call_function(clock.mark)
        elif not spans or spans[-1] != span:
            spans.append(span)
            with module.graph.inserting_before(node):
                module.graph.call_function(clock.mark)
    module.recompile()
    return module, tuple(spans)


def _spans(graph: fx.Graph) -> Iterator[tuple[fx.Node, Span]]:
    """Each call of a graph, and the output, with the span that it is in."""
    labels: dict[tuple[object, ...], str] = {}
    arrived: set[tuple[int, ...]] = set()
    span = Span((), (), "", Role.COMPUTE)
    for node in list(graph.nodes):
        if node.op in ("call_function", "call_method"):
            tasks = noted_tasks(node)
            if tasks:
                nodes = tuple(task for task in tasks if isinstance(task, str))
                comms = tuple(task for task in tasks if isinstance(task, int))
                target = node.meta.get(OPERATOR, node.target)
                name = target if isinstance(target, str) else getattr(target, "__name__", "")
                if isinstance(target, torch._ops.OpOverload):
                    name = str(target.overloadpacket)
                label = labels.setdefault(tasks, name or str(target))
                if node.target is c10d.wait_tensor.default:
                    arrived.add(comms)
                apart = Role.RECEIVE if comms in arrived else Role.SEND
                span = Span(nodes, comms, label, apart if comms else Role.COMPUTE)
            yield node, span
        elif node.op == "output":
            yield node, span


class Update(NamedTuple):
    """A parameter that the optimizer writes to."""

    node: str  #: The plan's node.
    stored: str  #: Local name of the parameter.
    gradient: str  #: Local name of its gradient.
    cut: bool  #: Whether any parameter of the plan is stored in parts: then all are DTensors.
    #: The part of the gradient that is the parameter's, where the gradient has more.
    part: Region | None = None


class Training:
    """The parameters of a rank, in the memory of the local `values`, and their optimizer."""

    def __init__(
        self, optimizer: str, updates: Sequence[Update], values: Mapping[str, Tensor]
    ) -> None:
        self.updates = tuple(updates)
        parts = [(values[one.stored], one.cut) for one in self.updates]
        self.parameters = [
            nn.Parameter(stored_part(part, is_cut=cut and not stays_whole(optimizer, part)))
            for part, cut in parts
        ]
        self.optimizers = optimizers_of(optimizer, self.parameters)
        for one in self.optimizers:
            watch_steps(one, self.parameters)

    @property
    def span(self) -> Span:
        """The span of its step."""
        return Span(tuple(one.node for one in self.updates), (), "optimizer", Role.COMPUTE)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The local tensors of the parameters and of the optimizer's state."""
        states = [state for one in self.optimizers for state in one.state.values()]
        held = [value for one in states for value in one.values() if isinstance(value, Tensor)]
        yield from map(_local, (*self.parameters, *held))

    def values(self) -> Values:
        """The parameters by local name."""
        pairs = zip(self.updates, self.parameters, strict=True)
        return {one.stored: _local(parameter.detach()) for one, parameter in pairs}

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """A step of the optimizer with gradients by local name."""
        for one, parameter in zip(self.updates, self.parameters, strict=True):
            gradient = part_of(gradients[one.gradient], one.part)
            if isinstance(parameter, RankTensor):
                gradient = parameter.like(gradient)
            parameter.grad = gradient
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


#: Times that a pass is run again for a count of its bytes.
COUNTS = 10


def _most_bytes(run: Callable[[], object], held: int, device: torch.device) -> int:
    """The most bytes that lie on a device in a pass, over those that are held before.

    PyTorch's profiler does not see what another thread frees, as one of gloo does that is the last
    to let go of an operand: such a pass counts too much, and all ranks, which must call this, run
    again until each had one without.

    Args:
        run: Runs the pass, and leaves nothing of what it took.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device)
    counts: list[tuple[int, int]] = []
    unseen = torch.ones(1, dtype=torch.int64)
    while unseen.item() and len(counts) < COUNTS:
        counts.append(count_bytes(run))
        unseen[0] = min(left for left, _ in counts)
        dist.all_reduce(unseen, dist.ReduceOp.MAX)
    return held + min(counts)[1]


def count_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a run on a processor takes and is not seen to free, and the most that it holds."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    results = profiler.profiler.kineto_results
    changes: list[tuple[int, int]] = []
    left = list(results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, nbytes in sorted(changes):
        now += nbytes
        most = max(most, now)
    return now, most


#: Label of the events of a message.
MESSAGE = "message"
#: Modules by micro-batch and phase.
Modules: TypeAlias = Sequence[Mapping[int, fx.GraphModule]]


@dataclass(frozen=True)
class Recorder:
    """Runs the phases of a rank and then its optimizer, as one step."""

    phases: Sequence[RankPhases]  #: Those of each micro-batch.
    runs: Sequence[tuple[int, int]]  #: Those that it runs, with their micro-batches, in order.
    start: StepStart  #: The values that a step begins with.
    device: torch.device  #: Where they lie.
    roll: Roll  #: The processes of all ranks.
    training: Training | None = None  #: Its parameters and optimizer; None for inference.

    def timed(self, steps: int, shown: Mapping[str, str]) -> tuple[list[Values], float]:
        """Run so many steps after one to warm up, at least 1 on some rank; all must call it.

        Args:
            shown: Local names of the results to return, by name.

        Returns:
            Results of each micro-batch of the last step, and the slowest rank's seconds.
        """
        plan = self._plan(shown)

        def run(number: int) -> list[Values]:
            for _ in range(number):
                results = self._run(plan, self._plain, shown=shown)
            return results

        return timed(run, steps)

    def record(self, steps: int, threads: int) -> RankLog:
        """Record steps of equal micro-batches, after one to warm up; all ranks must call it."""
        (phases,) = {id(one): one for one in self.phases}.values()
        clock = clock_of(self.device)
        marking = {phase: marked(phases.eager(phase), clock) for phase in phases.graphs}
        spans = {phase: self._of_messages(phase, of) for phase, (_, of) in marking.items()}
        modules = {phase: direct(module) for phase, (module, _) in marking.items()}
        plan = self._plan({})

        def plain(_: int = 1) -> None:
            self._run(plan, self._plain)

        plain()
        offset_s = clock_offset()
        logged = tuple(self._step(plan, modules, spans, clock) for _ in range(steps))
        unrecorded_s = tuple(timed_steps(plain, steps))
        peak_bytes = _most_bytes(plain, self._held(), self.device)
        gpu = gpu_name(self.device)
        return RankLog(NAME, threads, logged, unrecorded_s, peak_bytes, gpu).shifted(offset_s)

    @cached_property
    def _plain(self) -> Modules:
        return of_each(
            self.phases, lambda one: {phase: direct(one.eager(phase)) for phase in one.graphs}
        )

    def _plan(self, shown: Mapping[str, str]) -> StepPlan:
        """The runs of a step, behind which gradients and results are read: a caller holds these."""
        keep = {*shown.values(), *self.phases[0].delivered}
        if self.training is not None:
            keep.update(one.gradient for one in self.training.updates)
        return StepPlan(self.phases, self.runs, self.start.written, keep, adds=True)

    def _of_messages(self, phase: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The spans of a phase; what packs and unpacks a message is of the message."""
        graph = self.phases[0].graphs[phase]
        message_of = {part.number: m for m in (*graph.sends, *graph.receives) for part in m.parts}
        leaving = {part.number for message in graph.sends for part in message.parts}
        joined = []
        for span in spans:
            messages = [message_of[number] for number in span.comms if number in message_of]
            if messages:
                role = Role.SEND if leaving.issuperset(span.comms) else Role.RECEIVE
                span = Span((), _comms(messages[0]), MESSAGE, role)
            joined.append(span)
        return tuple(joined)

    def _step(
        self,
        plan: StepPlan,
        modules: Mapping[int, fx.GraphModule],
        spans: Mapping[int, Sequence[Span]],
        clock: Clock,
    ) -> Step:
        """Run a step that marks the time, with the events between its marks."""
        begun: list[Span | None] = []  # at each mark; None: what lies between two passes

        def note(span: Span | None) -> None:
            clock.mark()
            begun.append(span)

        @contextmanager
        def around(message: Message, micro_batch: int, receives: bool) -> Iterator[None]:
            role = Role.RECEIVE if receives else Role.SEND
            note(Span((), _comms(message), MESSAGE, role, micro_batch))
            yield
            note(None)

        def before_update() -> None:
            assert self.training is not None
            note(self.training.span)

        def ran(run: Run) -> None:  # its module has marked
            begun.extend(replace(span, micro_batch=run.micro_batch) for span in spans[run.phase])
            begun.append(None)

        torch.distributed.barrier()
        begin = clock.begin()
        self._run(plan, [modules] * len(plan.phases), around, ran, before_update)
        clock.mark()
        times = clock.marks()
        events = (
            Event(span.nodes, span.comms, span.label, span.role, start, end, span.micro_batch)
            for span, (start, end) in zip(begun, pairwise(times), strict=True)
            if span is not None and (span.nodes or span.comms)
        )
        return Step(begin, times[-1], tuple(events))

    def _run(
        self,
        plan: StepPlan,
        modules: Modules,
        around: Callable[..., Any] | None = None,
        ran: Callable[[Run], None] = lambda _: None,
        before_update: Callable[[], None] = lambda: None,
        shown: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Values]:
        """Run the phases and the optimizer; returns what is `shown` of each micro-batch."""
        stored = dict(self.start.stored)
        if self.training is not None:
            stored |= self.training.values()
        held = StepValues(plan, replace(self.start, stored=stored).values)
        where = plan.phases, self.device, self.roll
        posts = Posts(*where) if around is None else Posts(*where, around)

        def run_phase(run: Run, arguments: list[Tensor | None]) -> Sequence[Tensor]:
            results: Sequence[Tensor] = modules[run.micro_batch][run.phase](arguments)
            ran(run)
            return results

        with torch.no_grad():
            run_phases(held, posts, run_phase, lambda _: True)
        results = [
            {name: held.result(local, micro_batch) for name, local in shown.items()}
            for micro_batch in range(len(plan.phases))
        ]
        if self.training is not None:
            gradients = {one.gradient: held.total(one.gradient) for one in self.training.updates}
            del held
            before_update()
            self.training.step(gradients)
        STEPS.begin()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return results

    def _held(self) -> int:
        """Bytes of values, graphs, parameters and their optimizer's state, before a step."""
        own = self.start
        tensors = [t for of in (own.stored, *own.micro_batches) for t in of.values()]
        tensors += () if self.training is None else self.training.tensors
        for graph in self.phases[0].graphs.values():
            tensors += [*graph.module.buffers(), *graph.module.parameters()]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _comms(message: Message) -> tuple[int, ...]:
    return tuple(sorted(part.number for part in message.parts))
