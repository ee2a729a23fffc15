"""Bytes of the messages between phases that ranks of PyTorch hold on processors.

Messages are received one phase ahead, and sent beside the next one (`ir.messages`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from partitioner.cost_model.memory.lifetimes import Lifetime
from partitioner.cost_model.memory.lives import Numbers, StepLives
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import LocalKey
from partitioner.ir.messages import Group, Link, ends_of_messages
from partitioner.ir.types import item_bytes


@dataclass(frozen=True)
class RankMessages:
    """Messages between the phases of ranks."""

    schedule: Schedule
    nbytes: Mapping[Link, int]  #: Bytes of each message.
    own: Mapping[Link, int]  #: Those of a device's part of what it joins in a later phase.
    #: The tensors whose memory is a message, by link; other messages are copies of parts, which are
    #: made when the phase ends.
    alone: Mapping[Link, LocalKey]
    packed: Mapping[LocalKey, int]  #: The tensors that these are of, with the end of the phase.
    arrived: Sequence[frozenset[LocalKey]]  #: Tensors that are views of one message.

    @classmethod
    def of(
        cls, schedule: Schedule, roots: Mapping[LocalKey, LocalKey], last: Collection[LocalKey]
    ) -> RankMessages:
        """Read them from the tasks of a schedule; tensors in `last` are copied into their order."""
        nbytes, tensors = defaultdict[Link, int](int), defaultdict[Link, list[LocalKey]](list)
        arrived = defaultdict[Link, set[LocalKey]](set)
        for task in schedule.tasks:
            if task.comm is None or task.phase == task.target_phase:
                continue
            for transfer in task.comm.transfers:
                link = task.phase, task.target_phase, transfer.source, transfer.target
                nbytes[link] += round(transfer.numel * item_bytes(task.comm.dtype))
                tensors[link] += [
                    roots.get(read, read) for read in task.reads if read[0] == transfer.source
                ]
                arrived[link] |= {(to, key) for to, key, _ in task.writes if to == transfer.target}
        pairs = {link: of for link, of in tensors.items() if link[2] != link[3]}
        alone = {link: of[0] for link, of in tensors.items() if len(of) == 1 and of[0] not in last}
        ends = {task.phase: position for position, task in enumerate(schedule.tasks)}
        packed = {
            local: ends[link[0]]
            for link, of in sorted(pairs.items())
            for local in of
            if link not in alone
        }
        own = {link: count for link, count in nbytes.items() if link not in pairs}
        between = {link: count for link, count in nbytes.items() if link in pairs}
        views = [frozenset(arrived[link]) for link in between if link not in alone]
        return cls(schedule, between, own, alone, packed, views)

    def held(self, lives: Sequence[Lifetime]) -> Iterator[Lifetime]:
        """Hold what is packed until it is, and what arrives together until all of it may go."""
        last = {life.local: life.last for life in lives if not life.operand}
        until = {
            local: max(last.get(one, -1) for one in views)
            for views in self.arrived
            for local in views
        }
        for life in lives:
            end = max(self.packed.get(life.local, -1), until.get(life.local, -1))
            yield life if life.operand else life._replace(last=max(life.last, end))

    def copies(self, device: int) -> Iterator[tuple[int, int]]:
        """Yield where a device copies parts into messages, and their bytes."""
        for link, nbytes in self.nbytes.items():
            if link[2] == device and link not in self.alone:
                ends = (at for at, task in enumerate(self.schedule.tasks) if task.phase == link[0])
                yield max(ends), nbytes

    def by_run(self, device: int, lives: StepLives) -> tuple[Numbers, Numbers]:
        """Count what a device sends and is ready to receive in each of its runs, beside tensors.

        And what it has sent until it gets ready to receive for the next run, as each begins.
        """
        order, own = self.schedule.order, self._phases_of(device)
        runs = order.runs(device)
        held, leaving = np.zeros((2, len(runs)), np.int64)
        acting = [place for place, (phase, _) in enumerate(runs) if phase in own]
        for before, place in itertools.pairwise(acting):
            arriving = (link for link in self.nbytes if link[1::2] == (runs[place][0], device))
            held[before:place] += sum(map(self.nbytes.__getitem__, arriving))
        kept_rows = np.flatnonzero(lives.kept | lives.always).tolist()
        kept = {lives.tensors[row].local for row in kept_rows}
        places = {run: place for place, run in enumerate(runs)}
        ends = ends_of_messages(order, self.nbytes, device, self._groups)
        sent = defaultdict[tuple[Link | LocalKey, int], list[tuple[Link, int]]](list)
        for (link, micro_batch), end in ends.items():
            sent[self.alone.get(link, link), micro_batch].append((link, end))
        of_device = [link for link in self.own if link[2] == device]
        for (phase, micro_batch), link in itertools.product(places, of_device):
            joined = places.get((link[1], micro_batch))
            if phase == link[0] and joined is not None:
                sent[self.alone.get(link, link), micro_batch].append((link, joined + 1))
        sizes = {life.local: life.nbytes for life in lives.tensors}
        for (what, micro_batch), of in sent.items():
            if what in kept:
                continue
            nbytes = sum(self.nbytes.get(link, 0) or self.own[link] for link, _ in of)
            if len(of) > 1:  # messages of one tensor, or parts of it
                nbytes = min(nbytes, sizes.get(self.alone[of[0][0]], nbytes))
            end = max(end for _, end in of)
            held[places[of[0][0][0], micro_batch] + 1 : end] += nbytes
            if all(link in self.nbytes for link, until in of if until == end):
                leaving[next((place for place in acting if place >= end), 0)] += nbytes
        leaving[0] = 0  # those that leave behind the last run
        return held, leaving

    @cached_property
    def _groups(self) -> frozenset[Group]:
        return frozenset((t.phase, ranks) for t in self.schedule.tasks for ranks in t.meetings)

    def _phases_of(self, device: int) -> Collection[int]:
        own = {task.phase for task in self.schedule.tasks if device in task.devices}
        return own | {target for _, target, _, to in self.nbytes if to == device}
