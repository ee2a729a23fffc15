"""The record of a rank's steps in stages: its phases with marks, and its messages.

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
from partitioner.backends.torch.files.rank_files import phase_file, read_pass, read_rank_file
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
from partitioner.backends.torch.running.step_values import PhaseValues, StepValues, Values
from partitioner.backends.waiting import STEPS
from partitioner.ir.phases import Phases
from partitioner.ir.program import Output

#: Label of the events of a message.
MESSAGE = "message"


@dataclass(frozen=True)
class PhaseRecorder:
    """Runs the phases of a rank and then its optimizer, as one step.

    Attributes:
        phases: The phases.
        runs: Those that it runs, with their micro-batches, in order.
        values: The values that a step begins with.
        device: Where they lie.
        roll: The processes of all ranks.
        training: Its parameters and optimizer; None for inference.
        last: The phases of the last micro-batch, if it is smaller than the others.
    """

    phases: RankPhases
    runs: Sequence[tuple[int, int]]
    values: PhaseValues
    device: torch.device
    roll: Roll
    training: Training | None = None
    last: RankPhases | None = None

    def timed(self, steps: int, shown: Mapping[str, str]) -> tuple[list[Values], float]:
        """Run so many steps; see `Recorder.timed`. Results are those of each micro-batch."""

        def run(number: int) -> list[Values]:
            for _ in range(number):
                results = self._run(self._plain, self._plain_last, shown=shown)
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

        def marks() -> list[Span | None]:
            return self._marks(modules, spans, clock)

        def plain() -> None:
            self._run(self._plain, self._plain)

        held = self._held
        return recorded(plain, marks, clock, held, self.device, steps, threads, group)

    @cached_property
    def _plain(self) -> Mapping[int, fx.GraphModule]:
        return _plain(self.phases)

    @cached_property
    def _plain_last(self) -> Mapping[int, fx.GraphModule]:
        return self._plain if self.last is None else _plain(self.last)

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

        def ran(phase: int, micro_batch: int) -> None:  # its module has marked
            begun.extend(replace(span, micro_batch=micro_batch) for span in spans[phase])
            begun.append(None)

        self._run(modules, modules, around, ran, before_update)
        return begun

    def _run(
        self,
        modules: Mapping[int, fx.GraphModule],
        last_modules: Mapping[int, fx.GraphModule],
        around: Callable[..., Any] | None = None,
        ran: Callable[[int, int], None] = lambda *_: None,
        before_update: Callable[[], None] = lambda: None,
        shown: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Values]:
        """Run the phases, those of the last micro-batch by modules of their own, and the optimizer.

        Returns:
            What is `shown` of each micro-batch.
        """
        stored = dict(self.values.stored)
        if self.training is not None:
            stored |= self.training.values()
        count = len(self.values.micro_batches)
        all_phases = [*[self.phases] * (count - 1), self.last or self.phases]
        start = replace(self.values, stored=stored)
        held = StepValues(all_phases, start, backward=self.training is not None, adds=True)
        where = [of.graphs for of in all_phases], self.phases.rank, self.device, self.roll
        posts = Posts(*where) if around is None else Posts(*where, around)

        def run(phase: int, micro_batch: int, arguments: list[Tensor | None]) -> Sequence[Tensor]:
            run_phase = (last_modules if micro_batch == count - 1 else modules)[phase]
            results: Sequence[Tensor] = run_phase(arguments)
            ran(phase, micro_batch)
            return results

        with torch.no_grad():
            run_phases(self.runs, held, posts, run, lambda _: True)
        results = [
            {name: held.result(local, micro_batch) for name, local in shown.items()}
            for micro_batch in range(count)
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
        own = self.values
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
        "stages": phases.numbers.stages,
        "splits": phases.numbers.splits,
        "runs": [run for run in runs if run[0] in phases.graphs],
        "last": last,
        "messages": {
            phase: [list(map(_data, graph.receives)), list(map(_data, graph.sends))]
            for phase, graph in graphs.items()
        },
        "stored": phases.stored,
        "outputs": [output.value for output in phases.outputs],
        "reads": dict(phases.reads),
        "once": sorted(phases.once),
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
    numbers = Phases(data["stages"], data["splits"])
    outputs = tuple(Output(value, value, None) for value in data["outputs"])
    empty = RankPhases(
        rank=rank,
        graphs={},
        stored=tuple(data["stored"]),
        inputs={},
        outputs=outputs,
        types={},
        reads=data["reads"],
        once=frozenset(data["once"]),
        summed=frozenset(data["summed"]),
        numbers=numbers,
    )
    graphs = {}
    for phase, (received, sent) in messages.items():
        is_first = phase == min(messages) and not data["last"]
        path = directory / phase_file(empty, phase, is_first=is_first, last=data["last"])
        file = read_rank_file(path)
        graph = PassGraph(read_pass(path, device), file.arguments, file.results)
        graphs[phase] = PhaseGraph(
            graph, tuple(map(_message, received)), tuple(map(_message, sent))
        )
    return replace(empty, graphs=graphs)


def _data(message: Message) -> list[Any]:
    parts = [(part.number, part.numel, str(part.dtype)) for part in message.parts]
    return [message.source, message.target, message.phases, parts]


def _message(data: Sequence[Any]) -> Message:
    source, target, phases, parts = data
    own = (MessagePart(n, numel, getattr(torch, d.removeprefix("torch."))) for n, numel, d in parts)
    return Message(source, target, tuple(phases), tuple(own))
