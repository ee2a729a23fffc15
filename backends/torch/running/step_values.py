"""The local values of one rank in a step of micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partitioner.backends.torch.graphs.messages import Message
from partitioner.backends.torch.graphs.phases import PhaseGraph, RankPhases
from partitioner.backends.torch.state.buffers import memory_of, write_buffers

Values = dict[str, Tensor]


@dataclass(frozen=True)
class PhaseValues:
    """The local values that a rank begins a step with.

    Attributes:
        stored: Parameters and buffers.
        micro_batches: Inputs of each micro-batch.
        written: The buffer that each result writes.
    """

    stored: Values
    micro_batches: Sequence[Values]
    written: Mapping[str, str]


class StepValues:
    """The values that a rank holds in a step: of the whole step, of each micro-batch, and sums.

    Args:
        phases: The rank's phases, of each micro-batch; they agree on what they add up.
        start: What it begins with, by local name; `store` writes buffers over.
        backward: Whether the backward pass runs.
        adds: Whether phases add to sums themselves (see `RankPhases.eager`).
    """

    def __init__(
        self, phases: Sequence[RankPhases], start: PhaseValues, *, backward: bool, adds: bool
    ) -> None:
        self._phases = phases
        self._stored = start.stored
        self._once: Values = dict(start.stored)
        self._micro: list[Values] = [dict(inputs) for inputs in start.micro_batches]
        self._sums: Values = {}
        self._to_begin = set(phases[0].summed)  # names of sums that have no result yet
        self._written = start.written
        self._adds = adds
        self._messages: dict[tuple[str, int], Tensor] = {}
        self._outputs = {output.value for output in phases[0].outputs}
        self._left = [Counter(of.reads if backward else _forward_reads(of)) for of in phases]
        self._argument_memory: set[int] = set()

    def arguments(self, phase: int, micro_batch: int) -> list[Tensor]:
        """The arguments of a phase; those that nothing reads later are held by the list alone."""
        phase_graph = self._phases[micro_batch].graphs[phase]
        received = {message.name for message in phase_graph.receives}
        values, left = self._micro[micro_batch], self._left[micro_batch]
        is_once = self._phases[0].is_once(phase)
        arguments = []
        for name in phase_graph.graph.arguments:
            if name in received:
                arguments.append(self._messages.pop((name, micro_batch)))
            elif is_once:
                arguments.append(self._once[name] if name in self._once else self._sums[name])
            else:
                arguments.append(values[name] if name in values else self._once[name])
                left[name] -= 1
                if not left[name] and name not in self._outputs:
                    values.pop(name, None)
        begins_sums = not self._to_begin.isdisjoint(phase_graph.graph.results)
        self._argument_memory = set(map(memory_of, arguments)) if begins_sums else set()
        return arguments

    def sums(self, phase: int, micro_batch: int) -> list[Tensor | None]:
        """The sums that a phase adds to, behind its arguments; None for those not begun."""
        names = self._phases[micro_batch].adds[phase] if self._adds else ()
        return [self._sums.get(name) for name in names]

    def receive(self, message: Message, micro_batch: int, tensor: Tensor) -> None:
        """Keep a message until the phase that it is for."""
        self._messages[message.name, micro_batch] = tensor

    def finish(
        self, phase: int, micro_batch: int, results: Sequence[Tensor]
    ) -> list[tuple[Message, Tensor]]:
        """Keep the results of a phase; returns the messages to send."""
        phase_graph = self._phases[micro_batch].graphs[phase]
        sends = {message.name: message for message in phase_graph.sends}
        is_once = self._phases[0].is_once(phase)
        addable = self._addable(phase_graph, micro_batch, results)
        leaving = []
        for name, result in zip(phase_graph.graph.results, results, strict=True):
            if name in sends:
                leaving.append((sends[name], result))
            elif is_once and not micro_batch:
                self._once[name] = result
            else:
                self._keep(name, micro_batch, result, is_addable=name in addable)
        return leaving

    def _addable(self, phase: PhaseGraph, micro_batch: int, results: Sequence[Tensor]) -> set[str]:
        """Names of the first results of sums whose memory is theirs alone: it may be added to.

        Others are read later, expanded, or views of arguments, constants or other results.
        """
        first = self._to_begin.intersection(phase.graph.results)
        if not first:
            return first
        uses = Counter(map(memory_of, results))
        taken = self._argument_memory.union(map(memory_of, phase.graph.module.buffers()))
        return {
            name
            for name, result in zip(phase.graph.results, results, strict=True)
            if name in first
            and name not in self._written
            and not self._left[micro_batch][name]
            and uses[memory_of(result)] == 1
            and memory_of(result) not in taken
            and not torch._debug_has_internal_overlap(result)
        }

    def _keep(self, name: str, micro_batch: int, result: Tensor, *, is_addable: bool) -> None:
        """Keep a result of a micro-batch as far as it is read, added up or delivered.

        A sum begins in the memory of its first result if that may be added to (`is_addable`).
        """
        if name in self._written:
            self._write(self._written[name], micro_batch, result)
        is_summed = name in self._phases[0].summed
        if is_summed and name in self._sums:
            if result is not self._sums[name]:  # else the phase added to it
                self._sums[name].add_(result)
        elif is_summed:
            self._sums[name] = result if is_addable else result.clone()
            self._to_begin.discard(name)
        is_delivered = name in self._outputs and not is_summed
        if self._left[micro_batch][name] > 0 or is_delivered:
            self._micro[micro_batch][name] = result

    def _write(self, buffer: str, micro_batch: int, result: Tensor) -> None:
        """Give a buffer its contents for the next micro-batch; this one's are kept while read.

        Not in place: messages on their way and values for the backward pass may be views of it.
        """
        if self._left[micro_batch][buffer] > 0 or buffer in self._outputs:
            self._micro[micro_batch][buffer] = self._once[buffer]
        self._once[buffer] = result

    def store(self) -> None:
        """Write the next contents of buffers over the stored ones."""
        write_buffers(self._stored, {name: self._once[name] for name in self._written.values()})

    def result(self, name: str, micro_batch: int) -> Tensor:
        """A delivered result of a micro-batch, by local name."""
        held = self._micro[micro_batch].get(name)
        return self._once[name] if held is None else held

    def total(self, name: str) -> Tensor:
        """A gradient of the whole step, by local name."""
        return self._once[name] if name in self._once else self._sums[name]


def _forward_reads(phases: RankPhases) -> Counter[str]:
    graphs = (graph for phase, graph in phases.graphs.items() if phases.is_forward(phase))
    return Counter(name for graph in graphs for name in graph.graph.arguments)
