"""The record of a rank's steps: its phases with marks, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.observed import RankLog, Role
from partitioner.backends.process_group import Group, timed
from partitioner.backends.torch.agreeing.faults import Roll
from partitioner.backends.torch.graphs.messages import Message
from partitioner.backends.torch.graphs.phases import RankPhases
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

#: Label of the events of a message.
MESSAGE = "message"


@dataclass(frozen=True)
class Recorder:
    """Runs the phases of a rank and then its optimizer, as one step."""

    phases: RankPhases
    runs: Sequence[tuple[int, int]]  #: Those that it runs, with their micro-batches, in order.
    start: StepStart  #: The values that a step begins with.
    device: torch.device  #: Where they lie.
    roll: Roll  #: The processes of all ranks.
    training: Training | None = None  #: Its parameters and optimizer; None for inference.
    #: The phases of the last micro-batch, if it is smaller than the others.
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
        modules = (graph.module for graph in self.phases.graphs.values())
        return held_bytes({**own.stored, **inputs}, modules, self.training)


def _plain(phases: RankPhases) -> Mapping[int, fx.GraphModule]:
    return {phase: direct(phases.eager(phase)) for phase in phases.graphs}


def _comms(message: Message) -> tuple[int, ...]:
    return tuple(sorted(part.number for part in message.parts))
