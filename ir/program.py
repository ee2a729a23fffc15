"""Rank programs: the computations and communications of each rank. Backends decide nothing.

A program is a list of steps over local values. Communications carry their transfers; all ranks
have them in one global order given by `seq`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import networkx as nx
import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Region, Transfer, sent_numel
from partitioner.ir.graph import AMONG, Node
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import Copies
from partitioner.ir.messages import Group
from partitioner.ir.ops.aten.state import KEEP, STATE, UPDATE
from partitioner.ir.phases import Part as StepPart
from partitioner.ir.phases import Phases, RunOrder, whole_batch_order
from partitioner.ir.types import TensorType


class CommKind(StrEnum):
    """Communication operators."""

    SEND = "send"  #: Point to point, one source and one target (the target's side is a recv).
    BROADCAST = "broadcast"  #: One source's whole tensor to all ranks.
    SCATTER = "scatter"  #: One source, a part to each rank.
    GATHER = "gather"  #: A part of each rank to one target.
    ALL_GATHER = "all_gather"  #: Every rank's whole part to every rank.
    ALL_TO_ALL = "all_to_all"  #: Any parts between any ranks.
    REDUCE_SCATTER = "reduce_scatter"  #: Reduce partial tensors; each rank keeps its part.
    ALL_REDUCE = "all_reduce"  #: Reduce partial tensors; every rank keeps all.
    SLICE = "slice"  #: Local: one rank copies a part of its tensor.

    @property
    def spelled(self) -> str:
        """Text for people: ``"all-reduce"``."""
        return self.value.replace("_", "-")


#: Kinds that reduce partial tensors.
REDUCING = (CommKind.ALL_REDUCE, CommKind.REDUCE_SCATTER)
#: Kinds of collectives that may travel together.
JOINING = (CommKind.ALL_REDUCE, CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER)
#: Collectives of one pass over one group whose operands have fewer bytes travel together in
#: buckets, where nothing waits for them at once (`Comm.bucket`). Measured over gloo
#: (docs/performance.md, A training step).
SMALL_BYTES = 2 << 20
#: Most bytes of a bucket.
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Comm:
    """A communication; in the programs of its ranks only the local names may differ."""

    seq: int  #: Position in the one global order; unique.
    kind: CommKind
    ranks: tuple[int, ...]  #: Ranks that take part, ascending.
    source: str  #: Local value that sources read. Absent on ranks that only receive.
    target: str  #: Local value that targets write. Absent on ranks that only send.
    dtype: str
    #: Parts that move, local copies (source == target) included. Empty for ALL_REDUCE; for
    #: REDUCE_SCATTER each target gets one transfer from every rank, all with the same `write`, to
    #: be reduced.
    transfers: tuple[Transfer, ...] = ()
    reduce: str = ""  #: "sum", "max", "min" or "prod" for the reducing kinds, "" for the others.
    phase: int = 0  #: Pipeline phase (see `Compute.phase`) of the sending side.
    target_phase: int = 0  #: Of the receiving side; at least `phase`, or of a later part of a step.
    why: str = ""  #: Node that the communication serves, for reports and errors.
    #: Number of the bucket in which small collectives travel together; None for one alone. All of
    #: its ranks join the same ones, and start them at one place among their other communications.
    bucket: int | None = None
    #: Elements of each rank's part, of an all-gather or a reduce-scatter of equal parts among so
    #: many ranks that `transfers`, of which there is one a pair, are not listed. Else 0.
    part: int = 0

    @property
    def meeting(self) -> tuple[int, ...]:
        """Ranks that wait for each other in it; () for a message to another phase."""
        return self.ranks if self.phase == self.target_phase else ()

    @property
    def largest_numel(self) -> int:
        """Elements of the largest transfer."""
        return self.part or max((transfer.numel for transfer in self.transfers), default=0)

    def sent_numel(self) -> Mapping[int, int]:
        """Elements that each rank sends to others; no entry for one that sends none."""
        if self.part:
            return dict.fromkeys(self.ranks, (len(self.ranks) - 1) * self.part)
        return sent_numel(self.transfers)

    def sources(self) -> frozenset[int]:
        """Ranks that read `source`."""
        return self._ends[0]

    def targets(self) -> frozenset[int]:
        """Ranks that write `target`."""
        return self._ends[1]

    def renamed(self, **changes: Any) -> Comm:
        """The same transfers with another name, phase or position in the order."""
        comm = replace(self, **changes)
        comm.__dict__["_ends"] = self._ends
        return comm

    @cached_property
    def is_even(self) -> bool:
        """Tell whether every rank has a transfer to every rank, all of one size."""
        if self.part:
            return True
        pairs = {(transfer.source, transfer.target) for transfer in self.transfers}
        sizes = {transfer.numel for transfer in self.transfers}
        return len(sizes) == 1 and pairs == {(a, b) for a in self.ranks for b in self.ranks}

    @cached_property
    def arriving(self) -> Mapping[int, Sequence[Transfer]]:
        """The transfers to each rank that have elements."""
        found: dict[int, list[Transfer]] = {}
        for transfer in self.transfers:
            if transfer.numel:
                found.setdefault(transfer.target, []).append(transfer)
        return found

    def touched(self, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that a rank reads and writes."""
        sources, targets = self._ends
        return (self.source,) if rank in sources else (), (self.target,) if rank in targets else ()

    @cached_property
    def _ends(self) -> tuple[frozenset[int], frozenset[int]]:
        if self.kind is CommKind.ALL_REDUCE or self.part:
            return frozenset(self.ranks), frozenset(self.ranks)
        return (
            frozenset(transfer.source for transfer in self.transfers),
            frozenset(transfer.target for transfer in self.transfers),
        )


@dataclass(frozen=True)
class Compute:
    """A local node."""

    node: Node  #: Reads and writes local values and local constants.
    origin: str  #: Name of the graph's node that it comes from.
    #: Its phase of `ir.phases`. Of a request that ONNX Runtime runs as a whole, the number of
    #: cross-group hops from the inputs: with several in flight, round t runs phase p of request
    #: t - p.
    phase: int = 0
    #: (name inside the node's subgraphs, local name) of every captured value.
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def meeting(self) -> tuple[int, ...]:
        """Ranks that send each other rows inside of the node; () for any other node."""
        ranks = self.node.attrs.get(AMONG, ())
        return tuple(map(int, ranks)) if isinstance(ranks, tuple) else ()

    @cached_property
    def touched(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that it reads and writes; one object for all ranks that share the step."""
        return self.node.reads, self.node.writes


@dataclass(frozen=True)
class Part:
    """A part of a whole tensor: its `region` (None: all), or zeros of the local shape."""

    whole: str
    region: Region | None
    zero: bool = False


@dataclass(frozen=True)
class Output:
    """A part of a graph output that this rank holds and delivers."""

    value: str
    whole: str
    region: Region | None


@dataclass(frozen=True)
class RankProgram:
    """The program of one rank."""

    rank: int  #: The rank; it drives device `rank` of the cluster.
    #: Part of a graph input that each local value is fed with at every request.
    inputs: Mapping[str, Part]
    constants: Mapping[str, Part]  #: Part of a graph constant by local value.
    #: New small constants (localised shapes and the like) by local value.
    literals: Mapping[str, np.ndarray]
    types: Mapping[str, TensorType]  #: Type of every local value.
    steps: tuple[Compute | Comm, ...]  #: In the order of execution.
    #: Parts of graph outputs. Over all ranks they tile each output exactly once; in programs of a
    #: module, and of results in `Programs.fed`, every rank delivers the parts that it holds.
    outputs: tuple[Output, ...] = ()
    #: Values that a node makes where its first operand lies, a stored value (`ir.nodes.in_place`).
    in_place: frozenset[str] = frozenset()

    @property
    def comms(self) -> tuple[Comm, ...]:
        """Communications in order."""
        return tuple(step for step in self.steps if isinstance(step, Comm))


class ProgramError(IRError):
    """Rank programs that would deadlock, or read a value before it is computed."""


@dataclass(frozen=True)
class Home:
    """Placement of a graph value where it is computed, and its local name on those ranks."""

    name: str
    placement: Placement


_ONE_RUN = whole_batch_order(1)


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks."""

    ranks: tuple[RankProgram, ...]  #: In order of rank.
    inputs: Mapping[str, TensorType]  #: Whole types of the model's inputs.
    outputs: Mapping[str, TensorType]  #: Whole types of the model's outputs.
    #: Of each value that a node of the graph computes.
    homes: Mapping[str, Home] = field(default_factory=dict)
    #: The order of phases and micro-batches: a rank runs the steps of a phase together, for one
    #: micro-batch after the other. A request that ONNX Runtime runs as a whole is one run.
    order: RunOrder = _ONE_RUN
    #: Blocks of the graph, None for what is in none, in which ONNX Runtime keeps convolutions out
    #: of its blocked layouts.
    plain: frozenset[int | None] = frozenset()
    #: The model's outputs whose sizes depend on data: those of their types are bounds.
    bounded: frozenset[str] = frozenset()
    copies: Copies | None = None  #: Whole copies, of which each request has one.
    #: Whether each rank delivers the parts that it holds, also those that others deliver: all of a
    #: module's results.
    delivers_all: bool = False
    #: The input of the next call that each of these results becomes, by name. Each rank delivers
    #: the part of such a result that it holds.
    fed: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Prove that no rank waits for ever and that every value is computed before it is read.

        Raises:
            ProgramError: A rank meets its communications out of the global order, a rank of a
                communication or of a node that sends rows lacks it, two communications differ under
                one `seq`, ranks meet in such nodes in other orders, or a value is missing.
        """
        comms: dict[int, Comm] = {}
        ranks: dict[int, set[int]] = {}
        checked: set[object] = set()
        for program in self.ranks:
            # equal for ranks whose steps read and write values of the same names
            sources = frozenset((*program.inputs, *program.constants, *program.literals))
            outputs = tuple(output.value for output in program.outputs)
            names = tuple(_touched(program)), sources, frozenset(program.types), outputs
            if names not in checked:
                _check_values(program)
                checked.add(names)
            last = -1
            for comm in program.comms:
                if comm.seq <= last:
                    raise ProgramError(
                        f"rank {program.rank}: communication {comm.seq} after {last}"
                    )
                last = comm.seq
                first = comms.setdefault(comm.seq, comm)
                if comm is not first and comm != replace(
                    first, source=comm.source, target=comm.target
                ):
                    raise ProgramError(f"communication {comm.seq} differs on rank {program.rank}")
                ranks.setdefault(comm.seq, set()).add(program.rank)
        for seq, comm in comms.items():
            if ranks[seq] != set(comm.ranks):
                raise ProgramError(
                    f"communication {seq} wants ranks {comm.ranks}, is on {sorted(ranks[seq])}"
                )
        self._check_sending_nodes()

    def _check_sending_nodes(self) -> None:
        """Refuse nodes that send rows if a rank of theirs lacks one, or has them in other order."""
        nodes: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        order = nx.DiGraph()
        for program in self.ranks:
            meetings: list[object] = []
            for step in program.steps:
                if isinstance(step, Comm):
                    meetings.append(step.seq)
                elif step.meeting:
                    meetings.append((step.origin, step.meeting))
                    nodes.setdefault((step.origin, step.meeting), set()).add(program.rank)
            nx.add_path(order, meetings)
        for (name, wanted), ranks in nodes.items():
            if ranks != set(wanted):
                raise ProgramError(f"node {name!r} wants ranks {wanted}, is on {sorted(ranks)}")
        if nodes and not nx.is_directed_acyclic_graph(order):
            circle = {one for edge in nx.find_cycle(order) for one in edge}
            among = sorted(name for name, ranks in nodes if (name, ranks) in circle)
            raise ProgramError(f"ranks meet in {among} and in what is around in other orders")

    @property
    def meetings(self) -> frozenset[Group]:
        """Ranks that wait for each other within a phase, by phase."""
        steps = (step for program in self.ranks for step in program.steps)
        return frozenset((step.phase, step.meeting) for step in steps if step.meeting)


def _touched(program: RankProgram) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    rank = program.rank
    return [
        step.touched if isinstance(step, Compute) else step.touched(rank) for step in program.steps
    ]


def _check_values(program: RankProgram) -> None:
    rank, known = program.rank, {*program.inputs, *program.constants, *program.literals}
    for reads, writes in _touched(program):
        for value in reads:
            if value not in known:
                raise ProgramError(f"rank {rank}: {value!r} is read before it is made")
        for value in writes:
            if value in known:
                raise ProgramError(f"rank {rank}: {value!r} is made twice")
            if value not in program.types:
                raise ProgramError(f"rank {rank}: {value!r} has no type")
            known.add(value)
    for output in program.outputs:
        if output.value not in known:
            raise ProgramError(f"rank {rank}: output part {output.value!r} is not made")


@dataclass(frozen=True)
class BatchParts:
    """The parts of a request that its micro-batches take and give."""

    count: int  #: Number of micro-batches, at least 1.
    types: Mapping[str, TensorType]  #: Types of the whole batch's inputs and outputs, by name.
    #: The part of each micro-batch in a whole input or output, by name. An input that is not here
    #: goes whole to every micro-batch; such an output is the same in all of them.
    regions: Mapping[str, tuple[Region, ...]]


#: Nodes that take a value to where it is stored.
UPDATES = UPDATE, KEEP

Steps = Sequence[Compute | Comm]


@dataclass(frozen=True)
class PhaseSteps:
    """The steps that a rank runs in a phase."""

    program: RankProgram
    phase: int
    steps: Steps

    def touched(self, step: Compute | Comm) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that a step reads and makes in this phase, without those written over."""
        if isinstance(step, Comm):
            reads, writes = step.touched(self.program.rank)
            if step.phase != step.target_phase:
                return (reads, ()) if step.phase == self.phase else ((), writes)
            return reads, writes
        reads, writes = step.touched
        return step.node.inputs[:1] if step.node.op in UPDATES else reads, writes

    @property
    def written(self) -> set[str]:
        """Local values that the steps make."""
        return {name for step in self.steps for name in self.touched(step)[1]}

    @property
    def outside(self) -> set[str]:
        """Values that the steps read and do not make."""
        made: set[str] = set()
        outside: set[str] = set()
        for step in self.steps:
            reads, writes = self.touched(step)
            outside.update(set(reads) - made)
            made.update(writes)
        return outside


def steps_by_phase(program: RankProgram, phases: Phases) -> Mapping[int, PhaseSteps]:
    """The steps of each phase, without those that give stored values."""
    pieces: dict[int, list[Compute | Comm]] = {}
    for step in program.steps:
        if isinstance(step, Compute) and not step.node.inputs and step.node.op == STATE:
            continue
        if isinstance(step, Compute) or step.phase == step.target_phase:
            on = [step.phase]
        else:
            ends = (step.phase, step.sources()), (step.target_phase, step.targets())
            on = [phase for phase, ranks in ends if program.rank in ranks]
        for phase in on:
            pieces.setdefault(phase, []).append(step)
    by_phase = dict(sorted(pieces.items())) or {phases.number(StepPart.FORWARD): []}
    return {phase: PhaseSteps(program, phase, steps) for phase, steps in by_phase.items()}


def made_by_phase(
    pieces: Mapping[int, PhaseSteps], backward: Collection[str]
) -> Mapping[int, set[str]]:
    """Local values that each phase makes; a constant that is delivered is of the first or last.

    `backward` are the outputs of the backward pass, which the last one delivers.
    """
    made = {phase: piece.written for phase, piece in pieces.items()}
    program = next(iter(pieces.values())).program
    for output in program.outputs:
        if output.value in program.constants or output.value in program.literals:
            made[(max if output.whole in backward else min)(pieces)].add(output.value)
    return made


def added_up(
    order: RunOrder, pieces: Mapping[int, PhaseSteps], backward: Collection[str]
) -> frozenset[str]:
    """Local values whose sum over the micro-batches of a step is what is read of them.

    Args:
        order: The order of the phases.
        pieces: The steps of a rank by phase.
        backward: Outputs of the backward pass.
    """
    if order.table.micro_batches == 1:
        return frozenset()
    program, phases = next(iter(pieces.values())).program, order.phases
    read = {output.value for output in program.outputs if output.whole in backward}
    reduce = pieces.get(phases.number(StepPart.REDUCE))
    read |= set() if reduce is None else reduce.outside
    made = made_by_phase(pieces, backward).items()
    often = (values for phase, values in made if not phases.is_once(phase))
    return frozenset(read.intersection(itertools.chain.from_iterable(often)))
