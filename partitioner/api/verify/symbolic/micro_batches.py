"""The micro-batches of a step: that each of them runs once, and that their sums are complete.

All micro-batches run the same phases, so one of them is followed for all. What is read of a sum
over them is marked as a term of a pending sum: only what is linear in a sum may read it, and only a
result that is to be a sum may be marked. A program tells which runs a rank makes; these are held
against what the phases read of each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from partitioner.api.verify.symbolic.held import Facts, Held, Types
from partitioner.api.verify.symbolic.nodes import LocalNode, Rank
from partitioner.api.verify.symbolic.parts import RefusedError
from partitioner.api.verify.symbolic.shares import ALL, Loop, times
from partitioner.ir.layout import Interval
from partitioner.ir.messages import Group, Link, endless_run
from partitioner.ir.phases import Part, Phases

#: A loop whose first iteration stands for the sum over micro-batches, the second for nothing.
_SUMS: Loop = ("", "micro-batches", 2)
#: The share of what is a sum over all micro-batches.
ADDED_UP = times(ALL, [(_SUMS, ((0, 1),))])


@dataclass(frozen=True)
class Rows:
    """The parts of a batch that the micro-batches of a step have."""

    count: int  #: Number of micro-batches.
    #: Start and length of the rows of each, of each input and output that is split.
    rows: Mapping[str, tuple[Interval, ...]]
    shares: tuple[float, ...]  #: What the gradient of the loss of each is multiplied by.

    @property
    def alike(self) -> tuple[int, ...]:
        """All micro-batches but the last one, if that is smaller."""
        is_uneven = any(rows[-1][1] < rows[0][1] for rows in self.rows.values())
        return tuple(range(self.count - is_uneven))

    def check(self, types: Types, own: Sequence[int], outputs: Collection[str]) -> None:
        """Compare with the model of the micro-batches `own`, or raise a RefusedError.

        A gradient of the batch is the mean of those of its rows, so the share of a micro-batch is
        that of its rows. The other `outputs`, which are no rows, are means too.
        """
        if not self.rows and not self.shares:
            return  # they are not known, as the note on the proof says
        if len(self.shares) != self.count:
            raise RefusedError(f"{len(self.shares)} of {self.count} have a share", is_wrong=True)
        for name in sorted({*outputs} - self.rows.keys() if self.count > 1 else ()):
            if types[name].shape or not types[name].dtype.startswith(("float", "bfloat")):
                raise RefusedError(f"{name!r} is {types[name]}, no rows and no mean", is_wrong=True)
        for name in self.rows:
            self._check_rows(name)
            self._check_shares(name)
            for index in own:
                size = self.rows[name][index][1]
                if name in types and types[name].shape[:1] != (size,):  # else nothing reads it
                    why = f"micro-batch {index} has {size} rows of {name!r}, {types[name]} there"
                    raise RefusedError(why, is_wrong=True)
        if not math.isclose(sum(self.shares), 1.0, rel_tol=1e-9):  # where none has rows, too
            why = f"the gradient of the loss is multiplied by {sum(self.shares):g} in all"
            raise RefusedError(why, is_wrong=True)

    def _check_rows(self, name: str) -> None:
        """Refuse rows that two micro-batches have, or none has."""
        end = 0
        if len(self.rows[name]) != self.count:
            raise RefusedError(f"not each has rows of {name!r}", is_wrong=True)
        for start, length in self.rows[name]:
            if start != end:
                what = "none of them has" if start > end else "two of them have"
                why = f"{what} row {min(start, end)} of {name!r}"
                raise RefusedError(why, is_wrong=True)
            end += length

    def _check_shares(self, name: str) -> None:
        size = sum(length for _, length in self.rows[name])
        for (_, length), share in zip(self.rows[name], self.shares, strict=True):
            if not math.isclose(share, length / size, rel_tol=1e-9):
                why = f"the gradient of {length} of {size} rows of {name!r} is multiplied by "
                raise RefusedError(f"{why}{share:g}", is_wrong=True)


@dataclass(frozen=True)
class Runs:
    """How a rank runs the phases of its program in the micro-batches of a step."""

    phases: Phases  #: What the numbers of phases mean.
    rows: Rows  #: What the micro-batches have of the batch.
    own: tuple[int, ...]  #: The micro-batches that the program is of.
    order: tuple[tuple[int, int], ...]  #: (phase, micro-batch) of all that the rank runs.
    made: Mapping[str, int]  #: The phase that makes each local value.
    reads: Mapping[int, frozenset[str]]  #: What each phase reads and does not make.
    inputs: frozenset[str]  #: Local values that each micro-batch is fed with.
    summed: frozenset[str]  #: Local values that are added up over the micro-batches.
    sends: Mapping[Hashable, int]  #: The phase that sends each message, by its name.
    receives: Mapping[Hashable, int]  #: The phase that reads each message, by its name.
    groups: frozenset[Group]  #: Ranks that it meets in each phase.

    @cached_property
    def _place(self) -> Mapping[tuple[int, int], int]:
        return {run: place for place, run in enumerate(self.order)}

    def check(self) -> None:
        """Prove that each phase runs once for each micro-batch, behind what it reads.

        Raises:
            RefusedError: A run is missing, is there twice, or comes too early.
        """
        self._check_counts()
        behind: dict[tuple[int, int], str] = {}
        for phase, names in self.reads.items():
            for name in names:
                self._check_own(phase, name)
                if name in self.made:
                    behind[self.made[name], phase] = name
        for (made, phase), name in behind.items():
            for index in range(self.rows.count):
                if self._at(made, index) >= self._at(phase, index):
                    why = f"{self.text(phase)} of micro-batch {index} runs before {name!r} is made"
                    raise RefusedError(why, is_wrong=True)

    def _check_counts(self) -> None:
        """Refuse a phase that does not run once for each micro-batch."""
        runs = Counter(self.order)
        if any(index >= self.rows.count for _, index in runs):
            raise RefusedError(f"it runs more than {self.rows.count}", is_wrong=True)
        for phase in self.reads:
            for index in (0,) if self.phases.is_once(phase) else range(self.rows.count):
                if runs[phase, index] != 1:
                    often = f"{runs[phase, index]} times" if runs[phase, index] else "never"
                    why = f"it runs {self.text(phase)} of micro-batch {index} {often}"
                    raise RefusedError(why, is_wrong=True)

    def _check_own(self, phase: int, name: str) -> None:
        """Refuse a phase of several micro-batches that reads what each of them has of its own."""
        if self.rows.count == 1:
            return
        made = self.made.get(name)
        is_own = name in self.inputs if made is None else not self.phases.is_once(made)
        if self.phases.is_once(phase) and is_own and name not in self.summed:
            why = f"{self.text(phase)} reads {name!r}, which each micro-batch has of its own"
            raise RefusedError(why, is_wrong=True)

    def _at(self, phase: int, index: int) -> int:
        return self._place[phase, 0 if self.phases.is_once(phase) else index]

    def check_written(self, stored: str, written: str) -> None:
        """Refuse a stored value that a micro-batch reads before the one before it writes it."""
        made = self.made.get(written)
        for phase, names in self.reads.items():
            if stored not in names or made is None or self.rows.count == 1:
                continue
            if self.phases.is_once(phase) or self.phases.is_once(made):
                why = f"{self.text(phase)} runs once, and each micro-batch writes {stored!r}"
                raise RefusedError(why, is_wrong=True)
            for index in range(1, self.rows.count):
                if self._at(made, index - 1) >= self._at(phase, index):
                    why = f"micro-batch {index} reads {stored!r} before {index - 1} writes it"
                    raise RefusedError(why, is_wrong=True)

    def text(self, phase: int) -> str:
        """The part of a step that a phase is, with its stage."""
        part, stage = self.phases.of(phase)
        is_of_stage = part not in (Part.SETUP, Part.DELIVER, Part.REDUCE)
        return f"{part} {stage}" if is_of_stage else str(part)


def check_together(runs: Sequence[Runs]) -> tuple[int, str] | None:
    """Find a rank that would wait for ever, in the orders of all ranks, and why.

    Ranks of one order are taken for one, which waits for all that any of them waits for.
    """
    first = dict[tuple[tuple[int, int], ...], int]()
    lanes = [first.setdefault(of.order, rank) for rank, of in enumerate(runs)]
    sends = {
        name: (lanes[rank], phase)
        for rank, of in enumerate(runs)
        for name, phase in of.sends.items()
    }
    links, groups, is_once = set[Link](), set[Group](), runs[0].phases.is_once
    for rank, of in enumerate(runs):
        for name, phase in of.receives.items():
            source, sent = sends.get(name, (lanes[rank], phase))
            if is_once(sent) != is_once(phase):
                return rank, f"{of.text(phase)} and {of.text(sent)} do not run as often"
            if name in sends:
                links.add((sent, phase, source, lanes[rank]))
        groups |= {
            (phase, tuple(sorted({lanes[one] for one in ranks}))) for phase, ranks in of.groups
        }
    endless = endless_run({lane: runs[lane].order for lane in {*lanes}}, links, groups)
    if endless is None:
        return None
    rank, (phase, index) = endless
    return rank, f"it waits for itself in {runs[rank].text(phase)} of micro-batch {index}"


def sum_of(value: str) -> str:
    """Local name of the sum of a value over micro-batches."""
    return f"{value} over micro-batches"


def added(value: str) -> LocalNode:
    """The sum of a local value over all micro-batches."""

    def move(_: Types, rank: Rank) -> Facts:
        return tuple(_marked(held) for held in rank.facts.get(value, ()))

    return LocalNode(
        sum_of(value), "sum of", (value,), (sum_of(value),), (), "", lambda _: False, move
    )


def _marked(held: Held) -> Held:
    share = times(held.share, [(_SUMS, ((0, 1),))])
    return replace(held, share=share, how="" if share == ALL else held.how or "sum")


def said(count: int, rows: Rows | None, *, trains: bool) -> str:
    """The note on a proof of a step that runs in micro-batches."""
    if count == 1:
        return "in one micro-batch"
    sums = "gradients are their sum" if trains else "results are joined"
    rest = "; which rows each has was not compared" if rows is None else ""
    return f"{count} micro-batches run once each and share the batch; {sums}{rest}"
