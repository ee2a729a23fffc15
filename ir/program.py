"""Rank programs: what each rank computes and communicates, explicit: backends decide nothing.

A program is a list of steps over local values. Communications carry their transfers (which box of
which local tensor goes where); all ranks see them in one global order given by `seq`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from partitioner.ir.errors import IRError
from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.graph import Node
from partitioner.ir.layout import Placement
from partitioner.ir.types import TensorType


class CommKind(StrEnum):
    """Communication operators. SLICE is local (one rank, transfers to itself)."""

    SEND = "send"  #: Point to point, one source and one target (the target's side is a recv).
    BROADCAST = "broadcast"  #: One source's whole tensor to all ranks.
    SCATTER = "scatter"  #: One source, a part to each rank.
    GATHER = "gather"  #: A part of each rank to one target.
    ALL_GATHER = "all_gather"  #: Every rank's whole part to every rank.
    ALL_TO_ALL = "all_to_all"  #: Any parts between any ranks.
    REDUCE_SCATTER = "reduce_scatter"  #: Reduce partial tensors; each rank keeps its part.
    ALL_REDUCE = "all_reduce"  #: Reduce partial tensors; every rank keeps all.
    SLICE = "slice"  #: Keep a part of the own tensor.

    @property
    def spelled(self) -> str:
        """For people: ``"all-reduce"``."""
        return self.value.replace("_", "-")


@dataclass(frozen=True)
class Comm:
    """One communication; in the programs of all its ranks it differs in the local names at most.

    Attributes:
        seq: Position in the one global order; unique.
        kind: Operator.
        ranks: Ranks that take part, ascending.
        source: Local value that sources read. Absent on ranks that only receive.
        target: Local value that targets write. Absent on ranks that only send.
        dtype: Element type.
        transfers: Parts that move, local copies (source == target) included. Empty for
            ALL_REDUCE; for REDUCE_SCATTER each target gets one transfer from every rank, all
            with the same `write`, to be reduced.
        reduce: "sum", "max", "min" or "prod" for the reducing kinds, "" for the others.
        phase: Requests' pipeline phase (see `Compute.phase`) of the sending side.
        target_phase: Of the receiving side; at least `phase`.
        why: Node that wants it, for reports and errors.
    """

    seq: int
    kind: CommKind
    ranks: tuple[int, ...]
    source: str
    target: str
    dtype: str
    transfers: tuple[Transfer, ...] = ()
    reduce: str = ""
    phase: int = 0
    target_phase: int = 0
    why: str = ""

    def sources(self) -> frozenset[int]:
        """Ranks that read `source`."""
        return self._ends[0]

    def targets(self) -> frozenset[int]:
        """Ranks that write `target`."""
        return self._ends[1]

    def renamed(self, **changes: Any) -> Comm:
        """The same transfers with another name, phase or place in the order."""
        found = replace(self, **changes)
        found.__dict__["_ends"] = self._ends
        return found

    def touched(self, rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that a rank reads and writes."""
        reads, writes = self._touched
        sources, targets = self._ends
        return reads if rank in sources else (), writes if rank in targets else ()

    @cached_property
    def _touched(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.source,), (self.target,)

    @cached_property
    def _ends(self) -> tuple[frozenset[int], frozenset[int]]:
        if self.kind is CommKind.ALL_REDUCE:
            return frozenset(self.ranks), frozenset(self.ranks)
        return (
            frozenset(transfer.source for transfer in self.transfers),
            frozenset(transfer.target for transfer in self.transfers),
        )


@dataclass(frozen=True)
class Compute:
    """A local node.

    Attributes:
        node: Reads and writes local values and local constants.
        origin: Name of the graph's node that it belongs to.
        phase: Number of cross-group hops from the inputs. With several requests in flight, round
            t runs phase p of request t - p.
        renames: (name inside the node's subgraphs, local name) of every captured value.
    """

    node: Node
    origin: str
    phase: int = 0
    renames: tuple[tuple[str, str], ...] = ()

    @cached_property
    def touched(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Local values that it reads and writes: one object for all ranks that share the step."""
        return self.node.reads, self.node.writes


@dataclass(frozen=True)
class Part:
    """A part of a named whole tensor: `region` of it (None: all), or zeros of its local shape."""

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
    """What one rank runs.

    Attributes:
        rank: The rank; it drives device `rank` of the cluster.
        inputs: Part of a graph input that each local value is fed with at every request.
        constants: Part of a graph constant by local value.
        literals: New small constants (localised shapes and the like) by local value.
        types: Type of every local value.
        steps: In the order of execution.
        outputs: Parts of graph outputs. Over all ranks they tile each output exactly once, or,
            in programs of a module, every rank has what it holds.
        backward: Number of the first step of the backward pass; None for inference.
    """

    rank: int
    inputs: Mapping[str, Part]
    constants: Mapping[str, Part]
    literals: Mapping[str, np.ndarray]
    types: Mapping[str, TensorType]
    steps: tuple[Compute | Comm, ...]
    outputs: tuple[Output, ...] = ()
    backward: int | None = None

    @property
    def comms(self) -> tuple[Comm, ...]:
        """Communications in order."""
        return tuple(step for step in self.steps if isinstance(step, Comm))


class ProgramError(IRError):
    """Rank programs that would deadlock or read what was not made."""


@dataclass(frozen=True)
class Home:
    """Where a graph value is made: its placement, and its local name on those ranks."""

    name: str
    placement: Placement


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks.

    Attributes:
        ranks: In order of rank.
        inputs: Whole types of the model's inputs.
        outputs: Whole types of the model's outputs.
        homes: Where each value of the graph is made.
    """

    ranks: tuple[RankProgram, ...]
    inputs: Mapping[str, TensorType]
    outputs: Mapping[str, TensorType]
    homes: Mapping[str, Home] = field(default_factory=dict)

    @cached_property
    def alike(self) -> bool:
        """Whether all ranks do the same in the same order, on parts of the same sizes.

        Then a backend may join communications: all ranks join the same ones.
        """
        return len({_outline(program) for program in self.ranks}) == 1

    def check(self) -> None:
        """Static proof that no rank waits for ever and nothing is read before it is made.

        Raises:
            ProgramError: A rank meets its communications out of the global order, a rank of a
                communication does not have it, two differ under one `seq`, or a value is missing.
        """
        seen: dict[int, Comm] = {}
        held: dict[int, set[int]] = {}
        checked: set[object] = set()
        for program in self.ranks:
            same = _identity(program)
            if same not in checked:
                _check_values(program)
                checked.add(same)
            last = -1
            for comm in program.comms:
                if comm.seq <= last:
                    raise ProgramError(
                        f"rank {program.rank}: communication {comm.seq} after {last}"
                    )
                last = comm.seq
                if not _same_comm(seen.setdefault(comm.seq, comm), comm):
                    raise ProgramError(f"communication {comm.seq} differs on rank {program.rank}")
                held.setdefault(comm.seq, set()).add(program.rank)
        for seq, comm in seen.items():
            if held[seq] != set(comm.ranks):
                raise ProgramError(
                    f"communication {seq} wants ranks {comm.ranks}, is on {sorted(held[seq])}"
                )


def _outline(program: RankProgram) -> tuple[object, ...]:
    """Which communications a rank has, in which order, and what reads their results.

    A group counts by when the rank meets it first; a part by its sizes. What is read counts, since
    a rank may hold zeros in the place of what another one waits for.
    """
    rank = program.rank
    groups: dict[tuple[int, ...], int] = {}
    found: list[object] = []
    for step in program.steps:
        if isinstance(step, Compute):
            found.append((step.origin, step.node.reads))
            continue
        sends, gets = rank in step.sources(), rank in step.targets()
        group = groups.setdefault(step.ranks, len(groups)) if len(step.ranks) > 1 else -1
        ends = ((step.source, sends), (step.target, gets))
        sizes = tuple(program.types[name].shape for name, has in ends if has)
        found.append((step.kind, group, sends and step.source, gets and step.target, sizes))
    return tuple(found)


def _same_comm(one: Comm, other: Comm) -> bool:
    """Whether two ranks mean one communication: local names may differ."""
    return one is other or replace(one, source="", target="") == replace(
        other, source="", target=""
    )


def _identity(program: RankProgram) -> object:
    """Equal for ranks whose steps read and write values of the same names."""
    rank = program.rank
    steps = tuple(
        [
            step.touched if isinstance(step, Compute) else step.touched(rank)
            for step in program.steps
        ]
    )
    given = frozenset((*program.inputs, *program.constants, *program.literals))
    made = tuple(output.value for output in program.outputs)
    return steps, given, frozenset(program.types), made


def _check_values(program: RankProgram) -> None:
    made = {*program.inputs, *program.constants, *program.literals}
    rank = program.rank
    for step in program.steps:
        reads, writes = step.touched if isinstance(step, Compute) else step.touched(rank)
        for value in reads:
            if value not in made:
                raise ProgramError(f"rank {rank}: {value!r} is read before it is made")
        for value in writes:
            if value in made:
                raise ProgramError(f"rank {rank}: {value!r} is made twice")
            if value not in program.types:
                raise ProgramError(f"rank {rank}: {value!r} has no type")
            made.add(value)
    for output in program.outputs:
        if output.value not in made:
            raise ProgramError(f"rank {rank}: output part {output.value!r} is not made")
