"""The order in which the ranks of an ONNX plan run the phases of requests.

A turn of a rank is what it runs at a time: a round of requests in flight, or one phase of one
micro-batch. Turns count from 0, on each rank by itself. The passes through a rank's steps are
numbered: one a request or, of requests in micro-batches, one a micro-batch, that of micro-batch m
of request r being r * M + m.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from partitioner.backends.header import Batch
from partitioner.ir.phases import RunOrder
from partitioner.ir.program import Comm


class Role(IntEnum):
    """A rank's roles in a step, in the order in which it does them."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2


@dataclass(frozen=True, eq=False)
class Action:
    """A rank's part in one step, done in every pass; each is an object of its own."""

    index: int  #: Of the step.
    role: Role  #: Computing, sending or receiving.
    phase: int  #: Pipeline phase it happens in.
    reads: tuple[str, ...]  #: Values that must be there.
    writes: tuple[str, ...]  #: Values that are there afterwards.


@dataclass(frozen=True)
class Turn:
    """A turn of a rank."""

    #: What it runs, in order, each with the number of the pass.
    actions: Sequence[tuple[Action, int]]
    #: The request that is done on the rank behind the turn; None if none is.
    done: int | None = None


@dataclass(frozen=True)
class Turns:
    """The turns of all ranks: here of requests in flight, in rounds.

    Round t runs phase p of request t - p, and all ranks are in the same round; a single request has
    one round.
    """

    requests: int  #: Number of requests.

    @staticmethod
    def of(batch: Batch | None, requests: int) -> Turns:
        """The turns of requests, which run in micro-batches if there is a batch."""
        return Turns(requests) if batch is None else MicroBatchTurns(requests, batch.order)

    @property
    def passes(self) -> int:
        """Number of passes."""
        return self.requests

    def of_rank(self, rank: int, actions: Sequence[Action]) -> Iterator[Turn]:
        """The turns of a rank, whose actions are in the order of steps."""
        last = max((action.phase for action in actions), default=0)
        for turn in range(self.turn(rank, last, self.requests - 1) + 1):
            numbered = ((action, turn - self.turn(rank, action.phase, 0)) for action in actions)
            done = turn - self.turn(rank, last, 0)
            yield Turn(
                [(action, number) for action, number in numbered if 0 <= number < self.requests],
                done if done >= 0 else None,
            )

    def turn(self, rank: int, phase: int, number: int) -> int:
        """The turn in which a rank runs a phase of a pass."""
        del rank
        return number + phase if self.requests > 1 else 0

    def is_expected(self, rank: int, comm: Comm, number: int, now: int) -> bool:
        """Tell whether a rank in turn `now` prepares to receive: all that is sent up to it."""
        return self.turn(rank, comm.phase, number) <= now

    def taken(self, rank: int, comm: Comm, number: int) -> int:
        """The sender's first turn behind which waiting is no deadlock: the receiver's own."""
        return self.turn(rank, comm.target_phase, number)


@dataclass(frozen=True)
class MicroBatchTurns(Turns):
    """Requests one after the other, each in micro-batches in the order of a schedule."""

    order: RunOrder  #: The order of a request.
    _indices: dict[int, Mapping[tuple[int, int], int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def passes(self) -> int:
        """See `Turns`."""
        return self.requests * self._count

    @property
    def _count(self) -> int:
        return self.order.table.micro_batches

    def of_rank(self, rank: int, actions: Sequence[Action]) -> Iterator[Turn]:
        """See `Turns`."""
        by_phase: dict[int, list[Action]] = defaultdict(list)
        for action in actions:
            by_phase[action.phase].append(action)
        runs = self.order.runs(rank)
        for request in range(self.requests):
            for index, (phase, micro_batch) in enumerate(runs, 1):
                number = request * self._count + micro_batch
                numbered = [(action, number) for action in by_phase.get(phase, ())]
                yield Turn(numbered, request if index == len(runs) else None)

    def turn(self, rank: int, phase: int, number: int) -> int:
        """See `Turns`."""
        if rank not in self._indices:
            self._indices[rank] = {run: at for at, run in enumerate(self.order.runs(rank))}
        index = self._indices[rank]
        request, micro_batch = divmod(number, self._count)
        return request * len(index) + index[phase, micro_batch]

    def is_expected(self, rank: int, comm: Comm, number: int, now: int) -> bool:
        """See `Turns`: what this turn and the next one take."""
        return self.turn(rank, comm.target_phase, number) <= now + 1

    def taken(self, rank: int, comm: Comm, number: int) -> int:
        """See `Turns`: the end of the request, as receivers may be behind up to there."""
        del comm
        runs = len(self.order.runs(rank))
        return (number // self._count + 1) * runs - 1
