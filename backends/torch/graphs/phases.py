"""A rank's program as a graph for each phase (see `emit`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import TypeVar

import torch
from torch import fx

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.eager import eager
from partitioner.backends.torch.graphs.emit import (
    NO_VALUE,
    PassGraph,
    PassWriter,
    constant_of,
    rest_argument,
    stored_values,
)
from partitioner.ir.graph import Graph
from partitioner.ir.messages import Link, ends_of_messages
from partitioner.ir.phases import Part as StepPart
from partitioner.ir.phases import RunOrder
from partitioner.ir.program import (
    Comm,
    Output,
    Part,
    Programs,
    added_up,
    made_by_phase,
    steps_by_phase,
)
from partitioner.ir.types import TensorType

MadeT = TypeVar("MadeT")


@dataclass(frozen=True)
class RankPhases:
    """The phases of a rank."""

    rank: int
    graphs: Mapping[int, PassGraph]  #: By phase; no entry for one in which the rank does nothing.
    stored: tuple[str, ...]  #: Local names of the stored values on the rank.
    inputs: Mapping[str, Part]  #: Part of an input by local value.
    outputs: tuple[Output, ...]  #: Parts of outputs that the rank delivers.
    types: Mapping[str, TensorType]  #: Type of every local value.
    summed: frozenset[str]  #: Local values that are added up over the micro-batches of a step.
    order: RunOrder  #: The order of the phases.
    #: The place in the order before which each message that the rank sends has left, by its link
    #: and micro-batch.
    ends: Mapping[tuple[Link, int], int] = field(default_factory=dict)
    #: Arguments that hold values between steps, which passes bring up to date.
    rests: frozenset[str] = frozenset()

    @property
    def passes(self) -> Mapping[str, PassGraph]:
        """The graphs by name: ``setup``, ``forward 0``; ``forward`` if there is one of them."""
        named = {self.name(phase): graph for phase, graph in self.graphs.items()}
        for part in (StepPart.FORWARD, StepPart.BACKWARD):
            of_part = [name for name in named if name.startswith(f"{part} ")]
            if len(of_part) == 1:
                named[str(part)] = named[of_part[0]]
        return named

    @property
    def delivered(self) -> frozenset[str]:
        """Local names of outputs."""
        return frozenset(output.value for output in self.outputs)

    def name(self, phase: int) -> str:
        """``setup``, ``forward 0``; ``forward`` of a whole batch."""
        part, stage = self.order.phases.of(phase)
        stageless = part in (StepPart.SETUP, StepPart.DELIVER, StepPart.REDUCE)
        return str(part) if stageless or self.order.is_whole else f"{part} {stage}"

    def words(self, phase: int) -> str:
        """``forward (stage 0)``; ``forward`` of a whole batch."""
        part, stage = self.order.phases.of(phase)
        return str(part) if self.order.is_whole else f"{part} (stage {stage})"

    def is_once(self, phase: int) -> bool:
        """Tell whether a phase runs once a step."""
        return self.order.phases.is_once(phase)

    @cached_property
    def adds(self) -> Mapping[int, tuple[str, ...]]:
        """The results of each phase of which nothing but the sum over micro-batches is read."""
        graphs = (of for phase, of in self.graphs.items() if not self.is_once(phase))
        only_summed = self.summed.difference(*(of.arguments for of in graphs))
        return {
            phase: tuple(name for name in of.results if name in only_summed)
            for phase, of in self.graphs.items()
        }

    def eager(self, phase: int) -> fx.GraphModule:
        """A phase as a pass that adds to sums: it takes those of `adds` behind its arguments."""
        graph = self.graphs[phase]
        summed = [graph.results.index(name) for name in self.adds[phase]]
        return eager(graph.module, boxed=True, summed=summed)

    def is_of_all(self, phase: int) -> bool:
        """Tell whether a phase is one of all micro-batches together, of whatever sizes."""
        return phase == self.order.phases.number(StepPart.REDUCE)

    def is_forward(self, phase: int) -> bool:
        """Tell whether a phase runs where no gradients are wanted."""
        part, _ = self.order.phases.of(phase)
        return part in (StepPart.SETUP, StepPart.FORWARD, StepPart.DELIVER)


def of_each(phases: Sequence[RankPhases], make: Callable[[RankPhases], MadeT]) -> list[MadeT]:
    """Make something of the phases of each micro-batch, once where they are the same."""
    made = {key: make(one) for key, one in {id(one): one for one in phases}.items()}
    return [made[id(one)] for one in phases]


@dataclass(frozen=True)
class Rest:
    """The last micro-batch of a step, if it is smaller; it has the same nodes and stages."""

    programs: Programs  #: Programs of the ranks.
    graph: Graph  #: The model of this micro-batch.
    has_own_setup: bool  #: Whether what runs once, before all micro-batches, differs for it.


def emit_all_phases(
    programs: Programs,
    rank: int,
    graph: Graph,
    device: torch.device,
    rest: Rest | None,
    micro_batches: int,
) -> list[RankPhases]:
    """The graphs of a rank for each micro-batch; a smaller last one must keep the same values."""
    phases = [emit_phases(programs, rank, graph, device)] * micro_batches
    if rest is not None:
        phases[-1] = emit_phases(rest.programs, rank, rest.graph, device)
        first, last = (
            (
                one.stored,
                {n for p, graph in one.graphs.items() for n in graph.results if one.is_once(p)},
                one.summed,
                {output.whole: output.value for output in one.outputs},
                # run once, on sums: partial ones of all micro-batches, or of none
                [
                    [(node.name, node.op) for node in graph.module.graph.nodes]
                    for phase, graph in one.graphs.items()
                    if one.is_of_all(phase)
                ],
            )
            for one in (phases[0], phases[-1])
        )
        if first != last:
            raise BackendError(
                "the last micro-batch, which is smaller, keeps other values than the others: "
                "give micro_batches that divide the batch"
            )
    return phases


def step_runs(order: RunOrder, rank: int, rest: Rest | None) -> tuple[tuple[int, int], ...]:
    """(phase, micro-batch) of all that a rank may run in order, a rest's own setup first."""
    runs = order.runs(rank)
    if rest is None or not rest.has_own_setup:
        return runs
    return (order.phases.number(StepPart.SETUP), order.table.micro_batches - 1), *runs


def emit_phases(programs: Programs, rank: int, graph: Graph, device: torch.device) -> RankPhases:
    """The graphs of a rank.

    Args:
        programs: Programs of all ranks.
        graph: The model of one micro-batch, which has the contents of constants.
        device: The device that the rank computes on.

    Raises:
        BackendError: PyTorch has no operator of a name in the program, or no type of a constant.
    """
    program, order = programs.ranks[rank], programs.order
    pieces = steps_by_phase(program, order.phases)
    writers = {phase: PassWriter(program, device, phase) for phase in pieces}
    backward = {value for n in graph.nodes if n.name in graph.backward for value in n.writes}
    made = made_by_phase(pieces, backward)
    outputs = dict.fromkeys(output.value for output in program.outputs)
    kept = set().union(*(piece.outside for piece in pieces.values()))
    constant = cache(partial(constant_of, program, graph, device))
    graphs: dict[int, PassGraph] = {}
    for phase, piece in pieces.items():
        of_phase = made[phase]
        delivered = [name for name in outputs if name in of_phase]
        results = (*delivered, *sorted(of_phase & kept - outputs.keys()))
        emitted = writers[phase].write(piece, results, constant)
        talks = any(isinstance(step, Comm) for step in piece.steps)
        # a rank has a file, also if it does nothing
        is_last = phase == max(pieces) and not graphs
        if talks or is_last or emitted.results != (NO_VALUE,):
            graphs[phase] = emitted
    held = {n for phase, piece in pieces.items() for n in writers[phase].at_rest(piece.steps)}
    rests = {rest_argument(name): program.types[name] for name in held}
    return RankPhases(
        rank,
        graphs,
        stored_values(program.steps),
        program.inputs,
        program.outputs,
        {**program.types, **rests},
        added_up(order, pieces, backward),
        order,
        ends_of_messages(order, links_of(programs), rank, programs.meetings),
        frozenset(rests),
    )


def links_of(programs: Programs) -> list[Link]:
    """The pairs of phases and ranks between which messages pass, in order."""
    return sorted(
        {
            (comm.phase, comm.target_phase, transfer.source, transfer.target)
            for program in programs.ranks
            for comm in program.comms
            if comm.phase != comm.target_phase
            for transfer in comm.transfers
            if transfer.source != transfer.target
        }
    )
