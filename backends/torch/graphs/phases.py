"""A rank's program as a graph for each phase (see `ir.phases`).

What passes from a phase of one rank to a phase of another is one message (see `messages`): the
phase that sends returns it, and the phase that receives it is called with it. Communications inside
of a phase are collectives in its graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import fx

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.eager import eager
from partitioner.backends.torch.graphs.emit import (
    NO_VALUE,
    PassGraph,
    PassWriter,
    constant_of,
    emit_pass,
    stored_values,
)
from partitioner.backends.torch.graphs.messages import Message, message_name
from partitioner.ir.graph import Graph
from partitioner.ir.phases import Part as StepPart
from partitioner.ir.phases import Phases, RunOrder
from partitioner.ir.program import Comm, Compute, Output, Part, Programs, RankProgram
from partitioner.ir.types import TensorType

Steps = Sequence[Compute | Comm]


@dataclass(frozen=True)
class PhaseGraph:
    """A phase of a rank.

    Attributes:
        graph: Its arguments are local values and messages received, its results local values and
            messages sent.
        receives: The messages among the arguments.
        sends: The messages among the results.
    """

    graph: PassGraph
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


@dataclass(frozen=True)
class RankPhases:
    """The phases of a rank.

    Attributes:
        graphs: By phase; no entry for one in which the rank does nothing.
        stored: Local names of the stored values on the rank.
        inputs: Part of an input by local value.
        outputs: Parts of outputs that the rank delivers.
        types: Type of every local value.
        summed: Local values that are added up over the micro-batches of a step.
        order: The order of the phases.
    """

    rank: int
    graphs: Mapping[int, PhaseGraph]
    stored: tuple[str, ...]
    inputs: Mapping[str, Part]
    outputs: tuple[Output, ...]
    types: Mapping[str, TensorType]
    summed: frozenset[str]
    order: RunOrder

    @property
    def passes(self) -> Mapping[str, PassGraph]:
        """The graphs by name: ``setup``, ``forward 0``; ``forward`` if there is one of them."""
        named = {self.name(phase): graph.graph for phase, graph in self.graphs.items()}
        for part in (StepPart.FORWARD, StepPart.BACKWARD):
            of_part = [name for name in named if name.startswith(f"{part} ")]
            if len(of_part) == 1:
                named[str(part)] = named[of_part[0]]
        return named

    @property
    def delivered(self) -> frozenset[str]:
        """Local names of outputs."""
        return frozenset(output.value for output in self.outputs)

    @property
    def numbers(self) -> Phases:
        """The numbers of the phases."""
        return self.order.phases

    def name(self, phase: int) -> str:
        """``setup``, ``forward 0``; ``forward`` of a whole batch."""
        part, stage = self.numbers.of(phase)
        stageless = part in (StepPart.SETUP, StepPart.DELIVER, StepPart.REDUCE)
        return str(part) if stageless or self.order.is_whole else f"{part} {stage}"

    def words(self, phase: int) -> str:
        """``forward (stage 0)``; ``forward`` of a whole batch."""
        part, stage = self.numbers.of(phase)
        return str(part) if self.order.is_whole else f"{part} (stage {stage})"

    def is_once(self, phase: int) -> bool:
        """Tell whether a phase runs once a step."""
        return self.numbers.is_once(phase)

    @cached_property
    def adds(self) -> Mapping[int, tuple[str, ...]]:
        """The results of each phase of which nothing but the sum over micro-batches is read."""
        graphs = (of for phase, of in self.graphs.items() if not self.is_once(phase))
        only_summed = self.summed.difference(*(of.graph.arguments for of in graphs))
        return {
            phase: tuple(name for name in of.graph.results if name in only_summed)
            for phase, of in self.graphs.items()
        }

    def eager(self, phase: int) -> fx.GraphModule:
        """A phase as a pass that adds to sums: it takes those of `adds` behind its arguments."""
        graph = self.graphs[phase].graph
        summed = [graph.results.index(name) for name in self.adds[phase]]
        return eager(graph.module, boxed=True, summed=summed)

    def is_of_all(self, phase: int) -> bool:
        """Tell whether a phase is one of all micro-batches together, of whatever sizes."""
        return phase == self.numbers.number(StepPart.REDUCE)

    def is_forward(self, phase: int) -> bool:
        """Tell whether a phase runs where no gradients are wanted."""
        part, _ = self.numbers.of(phase)
        return part in (StepPart.SETUP, StepPart.FORWARD, StepPart.DELIVER)


@dataclass(frozen=True)
class Rest:
    """The last micro-batch of a step, if it is smaller than the others: the same nodes and stages.

    Attributes:
        programs: Programs of the ranks.
        graph: The model of this micro-batch.
        has_own_setup: Whether what runs once a step, before all micro-batches, gives other values
            for this one.
    """

    programs: Programs
    graph: Graph
    has_own_setup: bool


def emit_all_phases(
    programs: Programs,
    rank: int,
    graph: Graph,
    device: torch.device,
    rest: Rest | None,
    micro_batches: int,
    *,
    keeps: bool = False,
) -> list[RankPhases]:
    """The graphs of a rank for each micro-batch, those of a smaller last one apart.

    Raises:
        BackendError: As `emit_phases`, or the last micro-batch is run in another way.
    """
    phases = [emit_phases(programs, rank, graph, device, keeps=keeps)] * micro_batches
    if rest is not None:
        phases[-1] = emit_phases(rest.programs, rank, rest.graph, device, keeps=keeps)
        first, last = (_in_common(one) for one in (phases[0], phases[-1]))
        if first != last:
            raise BackendError(
                "the last micro-batch, which is smaller, keeps other values than the others: "
                "give micro_batches that divide the batch"
            )
    return phases


def step_runs(order: RunOrder, rank: int, rest: Rest | None) -> tuple[tuple[int, int], ...]:
    """(phase, micro-batch) of all that a rank may run in a step, in order.

    The last micro-batch, if it is smaller, may have a setup of its own, which comes first.
    """
    runs = order.runs(rank)
    if rest is None or not rest.has_own_setup:
        return runs
    return (order.phases.number(StepPart.SETUP), order.table.micro_batches - 1), *runs


def _in_common(phases: RankPhases) -> Any:
    """The facts that the phases of all micro-batches of a step share."""
    outputs = {output.whole: output.value for output in phases.outputs}
    once = {
        name
        for phase, graph in phases.graphs.items()
        for name in graph.graph.results
        if phases.is_once(phase)
    }
    return phases.stored, once, phases.summed, outputs


def emit_phases(
    programs: Programs, rank: int, graph: Graph, device: torch.device, *, keeps: bool = False
) -> RankPhases:
    """The graphs of a rank.

    Args:
        programs: Programs of all ranks.
        rank: The rank.
        graph: The model of one micro-batch, which has the contents of constants.
        device: The device that the rank computes on.
        keeps: Whether values at rest are arguments; see `PassWriter`.

    Raises:
        BackendError: PyTorch has no operator of a name in the program, or no type of a constant.
    """
    program, order = programs.ranks[rank], programs.order
    phases, pieces = order.phases, _pieces(program, order.phases)
    writers = {phase: _PhaseWriter(program, device, phase=phase, keeps=keeps) for phase in pieces}
    made = {phase: writers[phase].written(steps) for phase, steps in pieces.items()}
    backward = {value for n in graph.nodes if n.name in graph.backward for value in n.writes}
    for output in program.outputs:
        if output.value in program.constants or output.value in program.literals:
            made[(max if output.whole in backward else min)(pieces)].add(output.value)
    made_in = {name: phase for phase, names in made.items() for name in names}
    outside = {phase: writers[phase].outside(steps) for phase, steps in pieces.items()}
    outputs = dict.fromkeys(output.value for output in program.outputs)
    kept = set().union(*outside.values())
    constant = cache(partial(constant_of, program, graph, device))
    graphs: dict[int, PhaseGraph] = {}
    for phase, steps in pieces.items():
        writer, of_phase = writers[phase], made[phase]
        delivered = [name for name in outputs if name in of_phase]
        results = (*delivered, *sorted(of_phase & kept - outputs.keys()))
        emitted = emit_pass(writer, steps, results, constant=constant)
        talks = any(isinstance(step, Comm) for step in steps)
        # a rank has a file, also if it does nothing
        is_last = phase == max(pieces) and not graphs
        if talks or is_last or emitted.results != (NO_VALUE,):
            received = tuple(writer.messages.values())
            graphs[phase] = PhaseGraph(emitted, received, tuple(writer.leaving))
    summed = {output.value for output in program.outputs if output.whole in backward}
    summed |= outside.get(phases.number(StepPart.REDUCE), set())
    summed &= {name for name, phase in made_in.items() if not phases.is_once(phase)}
    if order.table.micro_batches == 1:
        summed = set()
    return RankPhases(
        rank,
        graphs,
        stored_values(program.steps),
        program.inputs,
        program.outputs,
        program.types,
        frozenset(summed),
        order,
    )


def _pieces(program: RankProgram, phases: Phases) -> Mapping[int, Steps]:
    """The steps of each phase; a message is a step of both its phases."""
    pieces: dict[int, list[Compute | Comm]] = {}
    for step in program.steps:
        if isinstance(step, Compute) and not step.node.inputs and stored_values((step,)):
            continue  # stored values are given
        for phase in _phases_on(step, program.rank):
            pieces.setdefault(phase, []).append(step)
    return dict(sorted(pieces.items())) or {phases.number(StepPart.FORWARD): []}


def _phases_on(step: Compute | Comm, rank: int) -> Iterator[int]:
    if isinstance(step, Compute) or step.phase == step.target_phase:
        yield step.phase
        return
    if rank in step.sources():
        yield step.phase
    if rank in step.targets():
        yield step.target_phase


@dataclass
class _PhaseWriter(PassWriter):
    """Writes the graph of a phase.

    Attributes:
        phase: The phase.
        messages: The messages that it receives, by name.
        leaving: The messages that it sends, each added when it is packed.
        arrived: What each communication has brought, by its number and by source, as it is carried.
        departing: Communications with what they send, as it is carried, by name of the message.
    """

    phase: int = -1
    messages: dict[str, Message] = field(default_factory=dict)
    leaving: list[Message] = field(default_factory=list)
    arrived: dict[int, dict[int, fx.Node]] = field(default_factory=dict)
    departing: dict[str, list[tuple[Comm, fx.Node]]] = field(default_factory=dict)

    def touched(self, step: Compute | Comm) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that a step reads and makes in this phase."""
        reads, writes = super().touched(step)
        if isinstance(step, Comm) and step.phase != step.target_phase:
            return (reads, ()) if step.phase == self.phase else ((), writes)
        return reads, writes

    def received(self, steps: Steps) -> tuple[str, ...]:
        """Names of the messages that the phase is called with."""
        rank = self.program.rank
        by_sender: dict[tuple[int, int], list[Comm]] = {}
        for step in steps:
            if isinstance(step, Comm) and self._arrives(step):
                for source in sorted({t.source for t in step.transfers if t.target == rank}):
                    by_sender.setdefault((step.phase, source), []).append(step)
        messages = (Message.of(comms, source, rank) for (_, source), comms in by_sender.items())
        self.messages = {message.name: message for message in messages}
        return tuple(self.messages)

    def communicate(self, comm: Comm) -> None:
        """Add a collective, the unpacking of messages, or the packing of some."""
        if comm.phase == comm.target_phase:
            super().communicate(comm)
        elif self._arrives(comm):
            if not self.arrived:
                self._unpack()
            own = self.part_in(comm, sends=False)
            self.known[comm.target] = own.unpacked(self.arrived[comm.seq])
        else:
            self._send(comm)

    def _unpack(self) -> None:
        """Take all messages apart: their parts are views."""
        for message in self.messages.values():
            parts = message.unpacked(self.graph, self.value(message.name))
            for number, part in parts.items():
                self.arrived.setdefault(number, {})[message.source] = part

    def _send(self, comm: Comm) -> None:
        """Add what a communication sends to the messages that carry it."""
        rank, own = self.program.rank, self.part_in(comm, sends=True)
        for target in sorted({t.target for t in comm.transfers if t.source == rank}):
            name = message_name(comm.phase, rank, comm.target_phase, target)
            if name not in self.departing:
                self.departing[name] = []
                self.known[name] = partial(self._packed, name, target)
                self.pending[name] = comm.seq
                self.sent.append(name)
            self.departing[name].append((comm, own.packed(target)))

    def _packed(self, name: str, target: int) -> fx.Node:
        """A message that leaves, when all that it carries is there."""
        departing = self.departing[name]
        message = Message.of((comm for comm, _ in departing), self.program.rank, target)
        self.leaving.append(message)
        return message.packed(self.graph, {comm.seq: node for comm, node in departing})

    def _arrives(self, comm: Comm) -> bool:
        passes = comm.phase != comm.target_phase
        is_target = self.program.rank in comm.targets()
        return passes and comm.target_phase == self.phase and is_target
