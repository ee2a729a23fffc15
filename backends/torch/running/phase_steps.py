"""One step of a rank's phases: they run in their order, and messages pass between.

Messages are received one phase ahead and sent beside what follows. Each pair of phases has a
process group of its own for each pair of ranks, since NCCL carries what is sent between two ranks
of a group in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.backends.torch.agreeing.faults import Roll, telling
from partitioner.backends.torch.agreeing.groups import Link, resolved_link
from partitioner.backends.torch.graphs.messages import Message
from partitioner.backends.torch.graphs.phases import RankPhases
from partitioner.backends.torch.running.step_values import Run, StepValues
from partitioner.ir.program import Programs

#: Runs a phase on its arguments and sums, which it may take out of their list.
RunPhase = Callable[[Run, list[Tensor | None]], Sequence[Tensor]]
#: What surrounds the waiting for a message of a micro-batch (True), or its sending.
Around = Callable[[Message, int, bool], AbstractContextManager[object]]


def _plainly(_message: Message, _micro_batch: int, _receives: bool) -> AbstractContextManager[None]:
    return nullcontext()


def run_phases(
    values: StepValues, posts: Posts, run: RunPhase, wanted: Callable[[int], bool]
) -> None:
    """Run the phases of a step.

    Args:
        values: The values of the step, with its plan.
        posts: The messages of the rank.
        run: Runs a phase.
        wanted: Whether any rank runs a phase: nothing is sent to others.
    """
    runs = values.plan.runs
    for position, one in enumerate(runs):
        for ahead in runs[position : position + 2]:
            posts.post(ahead.phase, ahead.micro_batch)
        for message, tensor in posts.arrived(one.phase, one.micro_batch):
            values.receive(message, one.micro_batch, tensor)
        results = run(one, values.arguments(one))
        for message, tensor in values.finish(one, results):
            if not wanted(message.phases[1]):
                continue
            if message.target == posts.rank:
                values.receive(message, one.micro_batch, tensor)
            else:
                posts.send(message, one.micro_batch, tensor)
        del results
    posts.wait()


class Posts:
    """Messages that are on their way to and from a rank.

    Args:
        phases: The rank's phases, of each micro-batch.
        device: The device that it computes on.
        roll: The processes of all ranks.
        around: Surrounds what it does.
    """

    def __init__(
        self,
        phases: Sequence[RankPhases],
        device: torch.device,
        roll: Roll,
        around: Around = _plainly,
    ) -> None:
        self.rank = phases[0].rank
        self._phases = phases
        self._device = device
        self._roll = roll
        self._around = around
        self._posted: dict[tuple[int, int], list[tuple[Message, Tensor, Any]]] = {}
        self._sent: list[tuple[Message, Tensor, Any]] = []

    def post(self, phase: int, micro_batch: int) -> None:
        """Get ready to receive what a phase is called with, once."""
        if (phase, micro_batch) in self._posted:
            return
        posted = self._posted[phase, micro_batch] = []
        for message in self._phases[micro_batch].graphs[phase].receives:
            if message.source == self.rank:
                continue
            buffer = torch.empty(message.numel, dtype=message.dtype, device=self._device)
            link = resolved_link(_link(message))
            posted.append((message, buffer, dist.irecv(buffer, message.source, link, micro_batch)))

    def arrived(self, phase: int, micro_batch: int) -> list[tuple[Message, Tensor]]:
        """The messages that a phase is called with; waits for them."""
        arrived = []
        for message, buffer, work in self._posted.pop((phase, micro_batch)):
            with (
                telling(f"receiving from rank {message.source}", self.rank, self._roll),
                self._around(message, micro_batch, True),
            ):
                work.wait()
            arrived.append((message, buffer))
        return arrived

    def send(self, message: Message, micro_batch: int, tensor: Tensor) -> None:
        """Start to send; what has left is freed."""
        self._sent = [entry for entry in self._sent if not entry[2].is_completed()]
        dense = tensor.contiguous()
        link = resolved_link(_link(message))
        with (
            telling(f"sending to rank {message.target}", self.rank, self._roll),
            self._around(message, micro_batch, False),
        ):
            self._sent.append(
                (message, dense, dist.isend(dense, message.target, link, micro_batch))
            )

    def wait(self) -> None:
        """Wait until all has left."""
        for message, _, work in self._sent:
            with telling(f"sending to rank {message.target}", self.rank, self._roll):
                work.wait()
        self._sent = []


def _link(message: Message) -> Link:
    return (*message.phases, message.source, message.target)


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
