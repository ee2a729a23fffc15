"""The order in which data for later rounds comes from each rank.

Ranks match point-to-point data by its order alone. A sender posts in order of (round, seq); with
several requests in flight the receiver may want it in another order, so it posts its receives in
the sender's order, which it can compute.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from partitioner.backends.onnx.executor import round_of
from partitioner.backends.onnx.steps import Cut
from partitioner.ir.exchange import Transfer


@dataclass(frozen=True, eq=False)
class Message:
    """One transfer of one request; each is an object of its own."""

    cut: Cut
    request: int
    transfer: Transfer


class Ledger:
    """The messages that a rank will receive for later rounds of a run of several requests."""

    def __init__(self, cuts: Sequence[Cut], rank: int, requests: int) -> None:
        self._messages: dict[tuple[int, int], list[Message]] = defaultdict(list)
        arriving: dict[int, list[Message]] = defaultdict(list)
        for cut in cuts:
            for request in range(requests) if cut.pipelined else ():
                for transfer in cut.comm.transfers:
                    if transfer.target == rank and transfer.numel:
                        message = Message(cut, request, transfer)
                        self._messages[cut.comm.seq, request].append(message)
                        arriving[transfer.source].append(message)

        def sent_at(message: Message) -> tuple[int, int]:
            comm = message.cut.comm
            return round_of(comm.phase, message.request, requests), comm.seq

        self._queues = {
            source: deque(sorted(messages, key=sent_at)) for source, messages in arriving.items()
        }
        self._waiting = {message for messages in arriving.values() for message in messages}

    def messages(self, cut: Cut, request: int) -> Sequence[Message]:
        """The messages of a cut of a request, local copies included."""
        return self._messages[cut.comm.seq, request]

    def take_until(self, message: Message) -> Iterator[Message]:
        """The messages that its sender posts before this one, and this one; each only once."""
        queue = self._queues[message.transfer.source]
        while message in self._waiting:
            first = queue.popleft()
            self._waiting.discard(first)
            yield first
