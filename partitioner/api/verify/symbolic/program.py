"""The program of a rank as the interpreter reads it, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from partitioner.api.verify.symbolic.collectives import Collective
from partitioner.api.verify.symbolic.micro_batches import Runs
from partitioner.api.verify.symbolic.nodes import LocalNode
from partitioner.api.verify.symbolic.sent_rows import Sending
from partitioner.ir.mesh import Copies
from partitioner.ir.program import BatchParts, Comm, Output, Part
from partitioner.ir.types import TensorType


class Side(Protocol):
    """A rank's side of a communication."""

    @property
    def comm(self) -> Comm:
        """The communication, with the transfers of this rank at least."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The local value that this rank reads, if it does."""

    @property
    def writes(self) -> tuple[str, ...]:
        """The local value that this rank writes, if it does."""

    @property
    def target(self) -> TensorType | None:
        """Type of what it writes; None if it writes nothing."""


@dataclass(frozen=True)
class Departure:
    """A message that leaves at once, and waits where it is read."""

    name: str  #: Name among the messages of all ranks.
    reads: str  #: Local value that it has.


@dataclass(frozen=True)
class Arrival:
    """A message that a rank waits for."""

    name: str  #: Name among the messages of all ranks.
    writes: str  #: Local value that it becomes.

    def __str__(self) -> str:
        return self.name


Step = LocalNode | Sending | Departure | Arrival | Collective | Side


@dataclass(frozen=True)
class Program:
    """The program of a rank."""

    rank: int
    steps: tuple[Step, ...]
    types: Mapping[str, TensorType]  #: Types that it states for local values.
    inputs: Mapping[str, Part]  #: Part of a whole input that each local value is fed with.
    outputs: tuple[Output, ...]
    constants: frozenset[str]  #: Local names of its constants.
    #: Part of the model's constant that each local one is said to be; None if it is not said.
    claims: Mapping[str, Part] | None
    #: Contents of a constant by local name, None of anything else or without values.
    contents: Callable[[str], np.ndarray | None]
    opsets: Mapping[str, int]
    batch: BatchParts | None = None  #: The micro-batches of a request, if it runs in such.
    copies: Copies | None = None
    stored: tuple[str, ...] = ()  #: Local values that are kept from step to step.
    #: What tells apart the contents of constants by local name, where ranks share local nodes.
    tokens: Mapping[str, Hashable] | None = None
    spelled: Mapping[str, str] = field(default_factory=dict)  #: As of `WholeModel`.
    unnamed: frozenset[str] = frozenset()  #: As of `WholeModel`.
    #: Whether each rank delivers the parts that it holds, also those that others deliver: all of a
    #: module's results.
    delivers_all: bool = False
    #: The outputs that are inputs of the next call, of which ranks deliver what they hold, too.
    fed: Collection[str] = ()
    #: Whether its constants will be cut from the model's: there is nothing to compare.
    cuts_constants: bool = False
    #: How its phases run in the micro-batches of a step; None if it runs as it is.
    runs: Runs | None = None

    @cached_property
    def form(self) -> Hashable:
        """Give what ranks have in common that may be followed together; None of one by itself."""
        if self.tokens is None:
            return None
        return tuple(
            (step.op, step.writes) if isinstance(step, LocalNode) else (step.reads, step.writes)
            for step in self.steps
            if not isinstance(step, Departure | Arrival)
        )

    @cached_property
    def last_reads(self) -> Mapping[str, int]:
        """The place of the last step that reads each value; behind all of them for outputs."""
        places = {name: at for at, step in enumerate(self.steps) for name in _reads(step)}
        return {**places, **{out.value: len(self.steps) for out in self.outputs}}

    @cached_property
    def ends(self) -> Sequence[int]:
        """The place of the next step that is no local node, from each step on."""
        ends, end = [0] * len(self.steps), len(self.steps)
        for place in range(len(self.steps) - 1, -1, -1):
            end = end if isinstance(self.steps[place], LocalNode) else place
            ends[place] = end
        return ends


def _reads(step: Step) -> Sequence[str]:
    if isinstance(step, Departure | Collective):
        return (step.reads,)
    return () if isinstance(step, Arrival) else step.reads
