"""Rank programs with one communication wrong, on all its ranks alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.program import (
    REDUCING,
    Comm,
    CommKind,
    Compute,
    ProgramError,
    Programs,
    RankProgram,
)
from partitioner.ir.types import numpy_dtype

Step = Compute | Comm
#: Most pairs of transfers of a communication of which places are exchanged.
MOST_PAIRS = 2


@dataclass(frozen=True)
class Mutant:
    """A fault of programs; they are made when they are asked for."""

    kind: str  #: What is wrong: "dropped", "swapped", "group", "region", "reduction", "rank", ...
    what: str  #: The communication or the step.
    make: Callable[[], Programs]

    @property
    def programs(self) -> Programs:
        """Programs that differ from others in one thing."""
        return self.make()


def mutants(programs: Programs) -> Iterator[Mutant]:
    """Every mutation of every communication."""
    spaced = _changed(programs, lambda _, comm: [comm.renamed(seq=10 * comm.seq)])
    sides: dict[int, dict[int, Comm]] = {}
    for program in spaced.ranks:
        for comm in program.comms:
            sides.setdefault(comm.seq, {})[program.rank] = comm
    for seq, of in sides.items():
        one = _Mutations(spaced, seq, of)
        comm = next(iter(of.values()))
        others = ((other, theirs) for other, theirs in sides.items() if other > seq)
        for kind, found in (
            ("dropped", one.dropped()),
            ("reduction", one.reduced()),
            ("group", one.grouped()),
            ("region", one.moved()),
            ("rank", one.of_other_ranks()),
            ("swapped", one.swapped(others)),
        ):
            for mutated in found:
                yield Mutant(kind, f"{comm.kind} {seq // 10} for {comm.why}", mutated)


def _changed(programs: Programs, change: Callable[[RankProgram, Comm], Sequence[Step]]) -> Programs:
    return replace(
        programs,
        ranks=tuple(
            replace(
                program,
                steps=tuple(
                    itertools.chain.from_iterable(
                        change(program, step) if isinstance(step, Comm) else [step]
                        for step in program.steps
                    )
                ),
            )
            for program in programs.ranks
        ),
    )


def reading(program: RankProgram, old: str, new: str) -> RankProgram:
    """The program that reads another value in the place of one."""

    def named(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(new if name == old else name for name in names)

    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, Comm):
            (source,) = named([step.source])
            steps.append(step.renamed(source=source))
        else:
            inputs, captures = named(step.node.inputs), named(step.node.captures)
            node = replace(step.node, inputs=inputs, captures=captures)
            steps.append(replace(step, node=node))
    outputs = tuple(replace(out, value=named([out.value])[0]) for out in program.outputs)
    return replace(program, steps=tuple(steps), outputs=outputs)


def _with_zeros(program: RankProgram, name: str) -> RankProgram:
    """The program that has zeros under a name."""
    type_ = program.types[name]
    zeros = np.zeros(type_.shape, numpy_dtype(type_.dtype))
    return replace(program, literals={**program.literals, name: zeros})


def beside(region: Region, shape: Sequence[int]) -> Region | None:
    """A region of the same size, one element further; None if there is none."""
    for dim, (part, size) in enumerate(zip(region, shape, strict=True)):
        if len(part) == 1 and 0 < part[0][1] < size:
            start, length = part[0]
            at = start + 1 if start + length < size else start - 1
            return (*region[:dim], ((at, length),), *region[dim + 1 :])
    return None


def _sizes(region: Region) -> list[int]:
    return [sum(length for _, length in part) for part in region]


@dataclass(frozen=True)
class _Mutations:
    """The mutations of one communication."""

    programs: Programs
    seq: int
    sides: Mapping[int, Comm]

    @property
    def comm(self) -> Comm:
        return next(iter(self.sides.values()))

    def _with(self, change: Callable[[RankProgram, Comm], Sequence[Step]]) -> Programs:
        return _changed(
            self.programs, lambda of, comm: change(of, comm) if comm.seq == self.seq else [comm]
        )

    def _types(self, sides: Mapping[int, Comm]) -> list[object]:
        types = {program.rank: program.types for program in self.programs.ranks}
        return [
            (rank, [types[rank][name] for names in comm.touched(rank) for name in names])
            for rank, comm in sides.items()
        ]

    def dropped(self) -> Iterator[Callable[[], Programs]]:
        """Ranks keep their own values, where these have the right shape, or have zeros."""
        types = {program.rank: program.types for program in self.programs.ranks}
        if all(
            rank in comm.sources() and types[rank][comm.source] == types[rank][comm.target]
            for rank, comm in self.sides.items()
            if rank in comm.targets()
        ):
            yield partial(self._left_by, [*self.sides])
        yield self._with_zeros

    def _with_zeros(self) -> Programs:
        """Targets have zeros."""
        without = self._with(lambda _, __: [])
        programs = (
            _with_zeros(program, self.sides[program.rank].target)
            if program.rank in self.sides and program.rank in self.comm.targets()
            else program
            for program in without.ranks
        )
        return replace(without, ranks=tuple(programs))

    def _left_by(self, ranks: Sequence[int], rest: Comm | None = None) -> Programs:
        """These ranks read their own values; the others take part in `rest`."""

        def change(of: RankProgram, comm: Comm) -> list[Step]:
            others = [] if rest is None else [rest.renamed(source=comm.source, target=comm.target)]
            return [] if of.rank in ranks else others

        changed = self._with(change)
        programs = (
            reading(program, comm.target, comm.source)
            if program.rank in ranks and (comm := self.sides[program.rank]).target
            else program
            for program in changed.ranks
        )
        return replace(changed, ranks=tuple(programs))

    def reduced(self) -> Iterator[Callable[[], Programs]]:
        """Another reduction."""
        if self.comm.kind in REDUCING:
            other = "max" if self.comm.reduce == "sum" else "sum"
            yield partial(self._with, lambda _, comm: [replace(comm, reduce=other)])

    def grouped(self) -> Iterator[Callable[[], Programs]]:
        """A reduction without its last rank, and an all-reduce in two groups."""
        ranks = self.comm.ranks
        if self.comm.kind is CommKind.REDUCE_SCATTER and self.comm.transfers:
            kept = [t for t in self.comm.transfers if t.source != ranks[-1]]
            yield partial(self._transferred, kept)
        if self.comm.kind is not CommKind.ALL_REDUCE:
            return
        rest, half = ranks[:-1], len(ranks) // 2

        def in_two(of: RankProgram, comm: Comm) -> list[Step]:
            first = of.rank in ranks[:half]
            mine = ranks[:half] if first else ranks[half:]
            return [replace(comm, ranks=mine, seq=self.seq + (not first))]

        left = ranks if len(rest) == 1 else ranks[-1:]
        yield partial(self._left_by, left, replace(self.comm, ranks=rest))
        if half > 1:
            yield partial(self._with, in_two)

    def of_other_ranks(self) -> Iterator[Callable[[], Programs]]:
        """Two pieces that come from each other's ranks, and two that go to each other's."""
        transfers = self.comm.transfers
        for end, other_end in (("source", "target"), ("target", "source")):
            pairs = (
                (i, j)
                for (i, a), (j, b) in itertools.combinations(enumerate(transfers), 2)
                if getattr(a, end) != getattr(b, end)
                and (a.read, a.write) != (b.read, b.write)
                and getattr(a, other_end) == getattr(b, other_end)
                and self._type_of(end, a) == self._type_of(end, b)
                and (_sizes(a.read), _sizes(a.write)) == (_sizes(b.read), _sizes(b.write))
                and (self._is_read(a.target) or self._is_read(b.target))
            )
            for i, j in itertools.islice(pairs, MOST_PAIRS):
                changed = list(transfers)
                one, other = getattr(transfers[i], end), getattr(transfers[j], end)
                changed[i] = replace(transfers[i], **{end: other})
                changed[j] = replace(transfers[j], **{end: one})
                yield partial(self._transferred, changed)

    def _type_of(self, end: str, transfer: Transfer) -> object:
        rank = getattr(transfer, end)
        return self.programs.ranks[rank].types[getattr(self.sides[rank], end)]

    def moved(self) -> Iterator[Callable[[], Programs]]:
        """Places of two pieces exchanged, and a piece read beside its place."""
        transfers = self.comm.transfers
        pairs = (
            (i, j)
            for (i, a), (j, b) in itertools.combinations(enumerate(transfers), 2)
            if a.target == b.target
            and a.write != b.write
            and _sizes(a.write) == _sizes(b.write)
            and self._is_read(a.target)
        )
        for i, j in itertools.islice(pairs, MOST_PAIRS):
            changed = list(transfers)
            changed[i] = replace(transfers[i], write=transfers[j].write)
            changed[j] = replace(transfers[j], write=transfers[i].write)
            yield partial(self._transferred, changed)
        beside = (
            (i, at)
            for i, t in enumerate(transfers)
            if self._is_read(t.target) and (at := self._beside(t)) is not None
        )
        for i, read in itertools.islice(beside, 1):
            changed = list(transfers)
            changed[i] = replace(transfers[i], read=read)
            yield partial(self._transferred, changed)

    def _is_read(self, rank: int) -> bool:
        """Test whether a rank reads what it receives: one that adds zeros in its place does not."""
        program, value = self.programs.ranks[rank], self.sides[rank].target
        reads = (
            step.node.reads if isinstance(step, Compute) else step.touched(rank)[0]
            for step in program.steps
        )
        delivered = [output.value for output in program.outputs]
        return value in itertools.chain(delivered, *reads)

    def _transferred(self, transfers: Sequence[Transfer]) -> Programs:
        return self._with(lambda _, comm: [replace(comm, transfers=tuple(transfers))])

    def _beside(self, transfer: Transfer) -> Region | None:
        program = self.programs.ranks[transfer.source]
        return beside(transfer.read, program.types[self.sides[transfer.source].source].shape)

    def swapped(
        self, others: Iterator[tuple[int, Mapping[int, Comm]]]
    ) -> Iterator[Callable[[], Programs]]:
        """Sources, and targets, exchanged with a later communication of the same form."""
        for other, theirs in others:
            that = next(iter(theirs.values()))
            is_alike = that.kind == self.comm.kind and that.transfers == self.comm.transfers
            if not is_alike or self._types(theirs) != self._types(self.sides):
                continue
            for end in ("source", "target"):
                sides = {self.seq: theirs, other: self.sides}

                def change(of: RankProgram, comm: Comm, end: str = end) -> list[Step]:
                    if comm.seq not in sides:  # noqa: B023 - called at once
                        return [comm]
                    name = getattr(sides[comm.seq][of.rank], end)  # noqa: B023
                    return [comm.renamed(**{end: name})]

                mutated = _changed(self.programs, change)
                try:
                    mutated.check()
                except ProgramError:  # it would be read before it is made
                    continue
                yield partial(replace, mutated)
            return
