"""The record of a rank's steps: its passes with marks between the tasks, its bytes counted.

A pass runs as it does without recording (see `eager`); between the calls of two tasks its code
marks the time. What the host does beside the calls of a task counts for the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from partitioner.backends.observed import Event, RankLog, Role, Step
from partitioner.backends.process_group import Group, clock_offset, timed_steps
from partitioner.backends.torch.clocks import Clock, clock_of
from partitioner.backends.torch.eager import eager
from partitioner.backends.torch.timing import NAME
from partitioner.backends.torch.values import noted_tasks

c10d = torch.ops._c10d_functional
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Span:
    """The calls between two marks.

    Attributes:
        nodes: The plan's nodes that they are of.
        comms: The communications that they are of.
        label: The first operator of the task.
        role: The rank's part.
    """

    nodes: tuple[str, ...]
    comms: tuple[int, ...]
    label: str
    role: Role


@dataclass(frozen=True)
class Pass:
    """A pass of a rank.

    Attributes:
        module: Its graph, as emitted or read from a file.
        arguments: Names of local values.
        results: Names of local values.
    """

    module: fx.GraphModule
    arguments: tuple[str, ...]
    results: tuple[str, ...]


def marked(module: fx.GraphModule, clock: Clock) -> tuple[fx.GraphModule, tuple[Span, ...]]:
    """A pass that marks the time before each task and after the last, and the spans between marks.

    Args:
        module: A pass as `eager` makes it; its graph is changed.
        clock: Marks.
    """
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
                label = labels.setdefault(tasks, _name(node))
                if node.target is c10d.wait_tensor.default:
                    arrived.add(comms)
                apart = Role.RECEIVE if comms in arrived else Role.SEND
                span = Span(nodes, comms, label, apart if comms else Role.COMPUTE)
            yield node, span
        elif node.op == "output":
            yield node, span


def _name(node: fx.Node) -> str:
    """``aten.mm``, ``contiguous``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


@dataclass
class Recorder:
    """Runs the passes of a rank, one after the other, as one step.

    Attributes:
        passes: In order: the forward pass and, in training, the backward pass.
        values: Local values before a step: inputs and stored values.
        device: Where they lie.
    """

    passes: Sequence[Pass]
    values: Mapping[str, Tensor]
    device: torch.device
    _marked: list[tuple[fx.GraphModule, tuple[Span, ...]]] = field(default_factory=list)

    def record(self, steps: int, threads: int, group: Group = None) -> RankLog:
        """Record so many steps, after one to warm up; all ranks must call it."""
        plain = [eager(one.module, boxed=True) for one in self.passes]
        clock = clock_of(self.device)
        marking = [marked(eager(one.module, boxed=True), clock) for one in self.passes]
        modules = [module for module, _ in marking]
        spans = [span for _, spans in marking for span in (*spans, None)]
        self._run(plain)
        offset_s = clock_offset(group)
        recorded = tuple(self._step(modules, spans, clock, group) for _ in range(steps))
        unrecorded_s = timed_steps(lambda _: self._run(plain), steps, group)
        peak_bytes = _most_bytes(lambda: self._run(plain), self._held(), self.device)
        log = RankLog(NAME, threads, recorded, tuple(unrecorded_s), peak_bytes)
        return log.shifted(offset_s)

    def _step(
        self,
        modules: Sequence[fx.GraphModule],
        spans: Sequence[Span | None],
        clock: Clock,
        group: Group,
    ) -> Step:
        torch.distributed.barrier(group=group)
        begin = clock.begin()
        self._run(modules)
        clock.mark()
        *marks, end = clock.marks()
        return Step(begin, end, tuple(_events(spans, marks)))

    def _run(self, modules: Iterable[Callable[[list[Tensor]], Sequence[Tensor]]]) -> None:
        """Run the passes; a value is dropped once no later pass takes it."""
        values = dict(self.values)
        with torch.no_grad():
            for index, (module, one) in enumerate(zip(modules, self.passes, strict=True)):
                later = {name for other in self.passes[index + 1 :] for name in other.arguments}
                taken = [values[n] if n in later else values.pop(n) for n in one.arguments]
                results = dict(zip(one.results, module(taken), strict=True))
                values.update((name, value) for name, value in results.items() if name in later)
                del results
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _held(self) -> int:
        """Bytes that lie on the device before a step."""
        tensors = [*self.values.values()]
        tensors += [buffer for one in self.passes for buffer in one.module.buffers()]
        tensors += [parameter for one in self.passes for parameter in one.module.parameters()]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def _events(spans: Sequence[Span | None], marks: Sequence[float]) -> Iterator[Event]:
    """The events between marks; None stands for what is between two passes."""
    for span, begin, end in zip(spans, marks, [*marks[1:], marks[-1]], strict=True):
        if span is not None and (span.nodes or span.comms):
            yield Event(span.nodes, span.comms, span.label, span.role, begin, end)


def _most_bytes(run: Callable[[], object], held: int, device: torch.device) -> int:
    """The most bytes that lie on a device while something runs.

    Args:
        held: Bytes that lie there before.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device)
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
    return held + most
