"""The record of a rank's steps: its passes with marks between the tasks, its bytes counted.

A pass runs as it does without recording (see `eager`); between the calls of two tasks its code
marks the time. What the host does beside the calls of a task counts for the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from partitioner.backends.observed import Event, RankLog, Role, Step
from partitioner.backends.process_group import (
    Group,
    clock_offset,
    gpu_name,
    timed_steps,
)
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor
from partitioner.backends.torch.graphs.notes import OPERATOR, noted_tasks
from partitioner.backends.torch.measuring.clocks import Clock
from partitioner.backends.torch.measuring.optimizers import OPTIMIZERS
from partitioner.backends.torch.measuring.timing import NAME, stored_part, watch_steps
from partitioner.backends.torch.state.shards import part_of
from partitioner.ir.exchange import Region

c10d = torch.ops._c10d_functional
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Span:
    """The calls between two marks."""

    nodes: tuple[str, ...]  #: The plan's nodes that they are of.
    comms: tuple[int, ...]  #: The communications that they are of.
    label: str  #: The first operator of the task.
    role: Role  #: The rank's part.
    micro_batch: int = 0  #: The micro-batch.


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
    target = node.meta.get(OPERATOR, node.target)
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


class Update(NamedTuple):
    """A parameter that the optimizer writes to."""

    node: str  #: The plan's node.
    stored: str  #: Local name of the parameter.
    gradient: str  #: Local name of its gradient.
    cut: bool  #: Whether any parameter of the plan is stored in parts: then all are DTensors.
    #: The part of the gradient that is the parameter's, where the gradient has more.
    part: Region | None = None


class Training:
    """The parameters of a rank and their optimizer.

    Args:
        optimizer: One of `optimizers.OPTIMIZERS`.
        updates: The parameters.
        values: Local values; the parameters write to their memory.
    """

    def __init__(
        self, optimizer: str, updates: Sequence[Update], values: Mapping[str, Tensor]
    ) -> None:
        self.updates = tuple(updates)
        self.parameters = [
            nn.Parameter(stored_part(values[one.stored], is_cut=one.cut), requires_grad=True)
            for one in self.updates
        ]
        self.optimizer = OPTIMIZERS[optimizer](self.parameters) if self.parameters else None
        if self.optimizer is not None:
            watch_steps(self.optimizer, self.parameters)

    @property
    def span(self) -> Span:
        """The span of its step."""
        return Span(tuple(one.node for one in self.updates), (), "optimizer", Role.COMPUTE)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """The local tensors of the parameters and of the optimizer's state."""
        state = [] if self.optimizer is None else self.optimizer.state.values()
        held = [value for one in state for value in one.values() if isinstance(value, Tensor)]
        yield from map(_local, (*self.parameters, *held))

    def values(self) -> Values:
        """The parameters by local name."""
        pairs = zip(self.updates, self.parameters, strict=True)
        return {one.stored: _local(parameter.detach()) for one, parameter in pairs}

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """A step of the optimizer with gradients by local name."""
        if self.optimizer is None:
            return
        for one, parameter in zip(self.updates, self.parameters, strict=True):
            gradient = part_of(gradients[one.gradient], one.part)
            if isinstance(parameter, RankTensor):
                gradient = parameter.like(gradient)
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held_bytes(
    values: Mapping[str, Tensor], modules: Iterable[nn.Module], training: Training | None
) -> int:
    """Bytes of local values, of what graphs hold, and of parameters and their optimizer's state."""
    tensors = [*values.values(), *(() if training is None else training.tensors)]
    for module in modules:
        tensors += [*module.buffers(), *module.parameters()]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def recorded(
    plain: Callable[[], object],
    marks: Callable[[], Sequence[Span | None]],
    clock: Clock,
    held: Callable[[], int],
    device: torch.device,
    steps: int,
    threads: int,
    group: Group = None,
) -> RankLog:
    """The record of steps of a rank, after one to warm up; all ranks must call it.

    Args:
        plain: Runs a step.
        marks: Runs a step that marks the time, and gives the spans that each mark but the last
            begins; None for what is of no task.
        clock: It is marked.
        held: Bytes that lie on the device before a step.
        device: The device.
        steps: Number of steps.
        threads: Threads of an operator.
        group: The ranks; None for all.
    """
    plain()
    offset_s = clock_offset(group)
    logged = tuple(_step(marks, clock, group) for _ in range(steps))
    unrecorded_s = timed_steps(lambda _: plain(), steps, group)
    peak_bytes = _most_bytes(plain, held(), device)
    log = RankLog(NAME, threads, logged, tuple(unrecorded_s), peak_bytes, gpu_name(device))
    return log.shifted(offset_s)


def _step(marks: Callable[[], Sequence[Span | None]], clock: Clock, group: Group) -> Step:
    torch.distributed.barrier(group=group)
    begin = clock.begin()
    spans = marks()
    clock.mark()
    *times, end = clock.marks()
    return Step(begin, end, tuple(_events(spans, [*times, end])))


def _events(spans: Sequence[Span | None], marks: Sequence[float]) -> Iterator[Event]:
    """The events between marks, one more than spans; None is what lies between two passes."""
    for span, begin, end in zip(spans, marks[:-1], marks[1:], strict=True):
        if span is not None and (span.nodes or span.comms):
            what = span.nodes, span.comms, span.label, span.role
            yield Event(*what, begin, end, span.micro_batch)


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
