"""The record of a rank's steps: its phases with marks, and its messages.

A rank in a process of its own has the files of its phases, and a description of the order in which
they run and of what passes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.observed import RankLog, Role
from partitioner.backends.process_group import Group, timed
from partitioner.backends.torch.agreeing.faults import Roll
from partitioner.backends.torch.files.rank_files import (
    file_name,
    phase_file,
    read_pass,
    read_rank_file,
)
from partitioner.backends.torch.graphs.emit import PassGraph
from partitioner.backends.torch.graphs.messages import Message, MessagePart
from partitioner.backends.torch.graphs.phases import PhaseGraph, RankPhases
from partitioner.backends.torch.measuring.clocks import Clock, clock_of
from partitioner.backends.torch.measuring.recording import (
    Span,
    Training,
    held_bytes,
    marked,
    recorded,
)
from partitioner.backends.torch.running.direct import direct
from partitioner.backends.torch.running.phase_steps import Posts, run_phases
from partitioner.backends.torch.running.step_values import (
    Run,
    StepPlan,
    StepStart,
    StepValues,
    Values,
)
from partitioner.backends.waiting import STEPS
from partitioner.ir.phases import Part, RunOrder, whole_batch_order
from partitioner.ir.pipeline import from_csv, to_csv
from partitioner.ir.program import Output

#: Label of the events of a message.
MESSAGE = "message"


@dataclass(frozen=True)
class Recorder:
    """Runs the phases of a rank and then its optimizer, as one step.

    Attributes:
        phases: The phases.
        runs: Those that it runs, with their micro-batches, in order.
        start: The values that a step begins with.
        device: Where they lie.
        roll: The processes of all ranks.
        training: Its parameters and optimizer; None for inference.
        last: The phases of the last micro-batch, if it is smaller than the others.
    """

    phases: RankPhases
    runs: Sequence[tuple[int, int]]
    start: StepStart
    device: torch.device
    roll: Roll
    training: Training | None = None
    last: RankPhases | None = None

    def timed(self, steps: int, shown: Mapping[str, str]) -> tuple[list[Values], float]:
        """Run so many steps, after one to warm up; all ranks must call it.

        Args:
            steps: Number of steps, at least 1.
            shown: Local names of the results to return, by name.

        Returns:
            Results of each micro-batch of the last step, and the slowest rank's seconds.
        """
        plan = self._plan(shown)

        def run(number: int) -> list[Values]:
            for _ in range(number):
                results = self._run(plan, self._plain, self._plain_last, shown=shown)
            return results

        return timed(run, steps)

    def record(self, steps: int, threads: int, group: Group = None) -> RankLog:
        """Record so many steps, after one to warm up; all ranks must call it.

        All micro-batches must be of one size.
        """
        assert self.last is None, "tasks of micro-batches of several sizes are not told apart"
        clock = clock_of(self.device)
        marking = {phase: marked(self.phases.eager(phase), clock) for phase in self.phases.graphs}
        spans = {phase: self._of_messages(phase, of) for phase, (_, of) in marking.items()}
        modules = {phase: direct(module) for phase, (module, _) in marking.items()}
        plan = self._plan({})

        def marks() -> list[Span | None]:
            return self._marks(plan, modules, spans, clock)

        def plain() -> None:
            self._run(plan, self._plain, self._plain)

        held = self._held
        return recorded(plain, marks, clock, held, self.device, steps, threads, group)

    @cached_property
    def _plain(self) -> Mapping[int, fx.GraphModule]:
        return _plain(self.phases)

    @cached_property
    def _plain_last(self) -> Mapping[int, fx.GraphModule]:
        return self._plain if self.last is None else _plain(self.last)

    def _plan(self, shown: Mapping[str, str]) -> StepPlan:
        """The runs of a step, behind which gradients are read, and what is shown.

        Results are held to the end where the caller gets them no earlier.
        """
        count = len(self.start.micro_batches)
        phases = [*[self.phases] * (count - 1), self.last or self.phases]
        keep = {*shown.values()}
        if self.training is not None:
            keep.update(one.gradient for one in self.training.updates)
        if not self.phases.order.turns:
            keep |= self.phases.delivered
        return StepPlan(phases, self.runs, self.start.written, keep, adds=True)

    def _of_messages(self, phase: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The spans of a phase; what packs and unpacks a message is of the message."""
        graph = self.phases.graphs[phase]
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

    def _marks(
        self,
        plan: StepPlan,
        modules: Mapping[int, fx.GraphModule],
        spans: Mapping[int, Sequence[Span]],
        clock: Clock,
    ) -> list[Span | None]:
        """Run a step that marks the time; returns the span that each mark begins."""
        begun: list[Span | None] = []

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

        self._run(plan, modules, modules, around, ran, before_update)
        return begun

    def _run(
        self,
        plan: StepPlan,
        modules: Mapping[int, fx.GraphModule],
        last_modules: Mapping[int, fx.GraphModule],
        around: Callable[..., Any] | None = None,
        ran: Callable[[Run], None] = lambda _: None,
        before_update: Callable[[], None] = lambda: None,
        shown: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Values]:
        """Run the phases, those of the last micro-batch by modules of their own, and the optimizer.

        Returns:
            What is `shown` of each micro-batch.
        """
        stored = dict(self.start.stored)
        if self.training is not None:
            stored |= self.training.values()
        held = StepValues(plan, replace(self.start, stored=stored).values)
        where = plan.phases, self.device, self.roll
        posts = Posts(*where) if around is None else Posts(*where, around)
        last = len(plan.phases) - 1

        def run_phase(run: Run, arguments: list[Tensor | None]) -> Sequence[Tensor]:
            module = (last_modules if run.micro_batch == last else modules)[run.phase]
            results: Sequence[Tensor] = module(arguments)
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
        """Bytes that lie on the device before a step."""
        own = self.start
        inputs = {
            f"{i} {name}": t for i, of in enumerate(own.micro_batches) for name, t in of.items()
        }
        modules = (graph.graph.module for graph in self.phases.graphs.values())
        return held_bytes({**own.stored, **inputs}, modules, self.training)


def _plain(phases: RankPhases) -> Mapping[int, fx.GraphModule]:
    return {phase: direct(phases.eager(phase)) for phase in phases.graphs}


def _comms(message: Message) -> tuple[int, ...]:
    return tuple(sorted(part.number for part in message.parts))


# The description of a rank's phases -------------------------------------------------------------


def described(
    phases: RankPhases, runs: Sequence[tuple[int, int]], *, last: bool = False
) -> dict[str, Any]:
    """The phases of a rank and the order in which it runs them as plain data, but no graphs.

    Those of a smaller `last` micro-batch lack the phase of all micro-batches together.
    """
    graphs = {p: graph for p, graph in phases.graphs.items() if not (last and phases.is_of_all(p))}
    return {
        "schedule": to_csv(phases.order.table).splitlines(),
        "lanes": phases.order.lanes,
        "is_whole": phases.order.is_whole,
        "runs": [run for run in runs if run[0] in phases.graphs],
        "last": last,
        "messages": {
            phase: [list(map(_data, graph.receives)), list(map(_data, graph.sends))]
            for phase, graph in graphs.items()
        },
        "outputs": [output.value for output in phases.outputs],
        "summed": sorted(phases.summed),
    }


def read_phases(
    data: Mapping[str, Any], directory: Path, rank: int, device: torch.device
) -> RankPhases:
    """The phases that `described` gave, with the graphs in a folder's files, for a device.

    Raises:
        BackendError: A file cannot be read.
    """
    messages = {int(phase): of for phase, of in data["messages"].items()}
    table = from_csv("\n".join(data["schedule"]) + "\n")
    lanes = tuple(map(tuple, data["lanes"]))
    outputs = tuple(Output(value, value, None) for value in data["outputs"])
    empty = RankPhases(
        rank=rank,
        graphs={},
        stored=(),
        inputs={},
        outputs=outputs,
        types={},
        summed=frozenset(data["summed"]),
        order=RunOrder(table, lanes, is_whole=data["is_whole"]),
    )
    graphs = {}
    for phase, (received, sent) in messages.items():
        is_first = phase == min(messages) and not data["last"]
        path = directory / phase_file(empty, phase, is_first=is_first, last=data["last"])
        received, sent = tuple(map(_message, received)), tuple(map(_message, sent))
        graphs[phase] = PhaseGraph(_graph(path, device), received, sent)
    return replace(empty, graphs=graphs)


def request_phases(directory: Path, rank: int, device: torch.device) -> RankPhases:
    """The one phase of a rank that serves whole requests, with the graph in its file.

    Raises:
        BackendError: The file cannot be read.
    """
    path = directory / file_name(rank)
    header = read_rank_file(path).header
    order = whole_batch_order(header.ranks)
    return RankPhases(
        rank=rank,
        graphs={order.phases.number(Part.FORWARD): PhaseGraph(_graph(path, device), (), ())},
        stored=(),
        inputs=header.inputs,
        outputs=header.outputs,
        types={},
        summed=frozenset(),
        order=order,
    )


def _graph(path: Path, device: torch.device) -> PassGraph:
    file = read_rank_file(path)
    return PassGraph(read_pass(path, device), file.arguments, file.results)


def _data(message: Message) -> list[Any]:
    parts = [(part.number, part.numel, str(part.dtype)) for part in message.parts]
    return [message.source, message.target, message.phases, parts]


def _message(data: Sequence[Any]) -> Message:
    source, target, phases, parts = data
    own = (MessagePart(n, numel, getattr(torch, d.removeprefix("torch."))) for n, numel, d in parts)
    return Message(source, target, tuple(phases), tuple(own))
