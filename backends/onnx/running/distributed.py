"""Communication between processes through torch.distributed: gloo on the CPU, NCCL on GPUs.

Data that is not reduced travels as bytes, so that every element type does. Sums and the like use
the library's all-reduce where it takes the type; else parts are exchanged and combined here, in
ascending order of rank.

What is no collective is posted without waiting. Ranks match point-to-point data by its order
alone: a sender posts in order of (turn, seq); with several requests or micro-batches in flight the
receiver may want it in another order, so it posts its receives in the sender's order, which it can
compute. On the CPU it posts those for later turns of a whole turn at once, a turn ahead: data
arrives while it computes, at its place in the value that it is a part of, if it lies together
there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from partitioner.backends.onnx.files.steps import Cut, RankModel
from partitioner.backends.onnx.running.executor import write_parts
from partitioner.backends.onnx.running.turns import Turns
from partitioner.backends.process_group import REDUCTIONS, Group, Groups
from partitioner.backends.regions import box_view, packed, region_shape, view_within, write_region
from partitioner.backends.tensors import REDUCIBLE, bytes_of, combine, torch_dtype
from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.program import CommKind


@dataclass(frozen=True)
class _Sent:
    """Data on its way: `buffer` must live until `work` is done, at the latest in turn `due`."""

    work: Any
    buffer: torch.Tensor
    due: int


@dataclass(frozen=True, eq=False)
class _Message:
    """A transfer of a pass from another rank; each is an object of its own."""

    cut: Cut
    number: int
    transfer: Transfer


class DistributedCommunicator:
    """A rank's side of all communications: a `Communicator`, with groups of `rank_sets`."""

    def __init__(self, model: RankModel, groups: Groups, device: torch.device) -> None:
        self._rank = model.rank
        self._device = device
        self._groups = groups
        self._cuts = tuple(step for step in model.steps if isinstance(step, Cut))
        self._turns = Turns(0)
        #: Messages by (seq, pass), and by source in the order in which it sends them.
        self._messages: dict[tuple[int, int], list[_Message]] = {}
        self._queues: dict[int, deque[_Message]] = {}
        #: Of posted receives: their work, and the data if it is not at its place in the value.
        self._arriving: dict[_Message, tuple[Any, torch.Tensor | None]] = {}
        #: Values that data arrives in, by (seq, pass).
        self._filling: dict[tuple[int, int], torch.Tensor] = {}
        self._sources: dict[tuple[int, int], torch.Tensor] = {}
        self._sent: deque[_Sent] = deque()

    def begin(self, turns: Turns) -> None:
        """Forget the last run and compute in which order the other ranks will send."""
        messages = [
            _Message(cut, number, transfer)
            for cut in self._cuts
            if not _is_collective(cut)
            for number in range(turns.passes)
            for transfer in _moving(cut)
            if transfer.target == self._rank != transfer.source
        ]
        self._turns = turns
        self._messages = defaultdict(list)
        for message in messages:
            self._messages[message.cut.comm.seq, message.number].append(message)
        self._queues = defaultdict(deque)

        def sent_in(message: _Message) -> tuple[int, int]:
            source, comm = message.transfer.source, message.cut.comm
            return turns.turn(source, comm.phase, message.number), comm.seq

        for message in sorted(messages, key=sent_in):
            self._queues[message.transfer.source].append(message)
        self._arriving.clear()
        self._filling.clear()
        self._sources.clear()
        self._expect(0)

    def send(self, cut: Cut, number: int, source: torch.Tensor) -> None:
        """Post data for other ranks; of a collective keep it for `receive`, or exchange it now."""
        receives = cut.target is not None and not cut.keeps_all
        if receives:
            self._sources[cut.comm.seq, number] = source
        if not _is_collective(cut):
            self._post(cut, number, source)
        elif not receives:
            self._exchange(cut, source, None)

    def receive(self, cut: Cut, number: int, target: torch.Tensor) -> torch.Tensor:
        """The value: `target`, or a tensor of its own for data that was expected before."""
        source = self._sources.pop((cut.comm.seq, number), None)
        if not _is_collective(cut):
            return self._collect(cut, number, source, target)
        self._exchange(cut, source, target)
        return target

    def finish(self) -> None:
        """Wait until all sends have completed."""
        while self._sent:
            self._sent.popleft().work.wait()

    # Data from rank to rank ------------------------------------------------------------------

    def _post(self, cut: Cut, number: int, source: torch.Tensor) -> None:
        now = self._turns.turn(self._rank, cut.comm.phase, number)
        due = self._turns.taken(self._rank, cut.comm, number) if cut.pipelined else now
        self._reap(now)
        for transfer in _moving(cut):
            if transfer.source == self._rank != transfer.target:
                data = bytes_of(packed(source, transfer.read))
                group = self._groups.mail(self._rank, transfer.target)
                work = dist.isend(data, transfer.target, group=group)
                self._sent.append(_Sent(work, data, due))

    def _reap(self, now: int) -> None:
        """Drop completed sends; wait for those that receivers have taken before turn `now`."""
        waiting: deque[_Sent] = deque()
        for sent in self._sent:
            if sent.due < now:
                sent.work.wait()
            elif not sent.work.is_completed():
                waiting.append(sent)
        self._sent = waiting

    def _collect(
        self, cut: Cut, number: int, source: torch.Tensor | None, target: torch.Tensor
    ) -> torch.Tensor:
        key = cut.comm.seq, number
        messages = self._messages[key]
        target = self._filling.setdefault(key, target)
        for message in messages:
            while message not in self._arriving:
                self._get_ready(self._queues[message.transfer.source].popleft())
        del self._filling[key]
        arrived = {}
        for message in messages:
            work, arrived[message.transfer] = self._arriving.pop(message)
            work.wait()
        parts: list[tuple[Region, torch.Tensor]] = []
        for transfer in _moving(cut):
            if transfer.source == transfer.target == self._rank:
                assert source is not None
                parts.append((transfer.write, packed(source, transfer.read)))
            elif (buffer := arrived.get(transfer)) is not None:
                parts.append((transfer.write, buffer))
        write_parts(cut, parts, target)
        self._expect(self._turns.turn(self._rank, cut.comm.target_phase, number))
        return target

    def _expect(self, now: int) -> None:
        """Post the receives for later turns; not on GPUs, where such a kernel would wait there.

        Of a single pass one message a rank is expected at a time, so that buffers do not add up.
        """
        if self._device.type != "cpu":
            return
        coming = {message.transfer.source for message in self._arriving}
        for source, queue in self._queues.items():
            while (
                queue
                and queue[0].cut.pipelined
                and self._turns.is_expected(self._rank, queue[0].cut.comm, queue[0].number, now)
            ):
                if self._turns.passes == 1 and source in coming:
                    break
                coming.add(source)
                self._get_ready(queue.popleft())

    def _get_ready(self, message: _Message) -> None:
        """Post the receive of the next data from a rank: ranks match data in the order sent."""
        cut, source, region = message.cut, message.transfer.source, message.transfer.write
        place = apart = None
        if not cut.reduces:  # where the data belongs in the value, if it lies together there
            assert cut.target is not None
            key = cut.comm.seq, message.number
            if key not in self._filling:
                self._filling[key] = self._empty(cut, cut.target.shape)
            place = view_within(self._filling[key], region)
        if place is None:
            place = apart = self._empty(cut, region_shape(region))
        group = self._groups.mail(source, self._rank)
        self._arriving[message] = dist.irecv(bytes_of(place), source, group=group), apart

    def _empty(self, cut: Cut, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch_dtype(cut.comm.dtype), device=self._device)

    # Collectives -----------------------------------------------------------------------------

    def _exchange(self, cut: Cut, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        group = self._groups.of[cut.active]
        if cut.comm.kind is CommKind.BROADCAST:
            _broadcast(cut, source, target, group)
            return
        assert source is not None
        assert target is not None
        if cut.comm.kind is CommKind.ALL_REDUCE:
            _all_reduce(cut, source, target, group)
        else:
            _all_gather(cut, source, target, group)


def rank_sets(model: RankModel) -> list[tuple[int, ...]]:
    """Ranks of the collectives: each set needs a process group."""
    cuts = (step for step in model.steps if isinstance(step, Cut))
    return sorted({cut.active for cut in cuts if _is_collective(cut)})


def _is_collective(cut: Cut) -> bool:
    is_one = cut.uniform or cut.comm.kind is CommKind.ALL_REDUCE
    return is_one and not cut.pipelined


def _moving(cut: Cut) -> Iterator[Transfer]:
    return (transfer for transfer in cut.comm.transfers if transfer.numel)


def _all_reduce(cut: Cut, source: torch.Tensor, target: torch.Tensor, group: Group) -> None:
    reduce = cut.comm.reduce
    if target.dtype in REDUCIBLE and reduce in REDUCTIONS:
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
        dist.all_reduce(target, REDUCTIONS[reduce], group=group)
        return
    parts = target.new_empty((len(cut.active), *target.shape))
    dist.all_gather_single(bytes_of(parts), bytes_of(source), group=group)
    target.copy_(combine(tuple(parts), reduce))


def _broadcast(
    cut: Cut, source: torch.Tensor | None, target: torch.Tensor | None, group: Group
) -> None:
    transfer = next(_moving(cut))
    if source is not None:
        part = packed(source, transfer.read)
    else:
        assert target is not None
        part = target.new_empty(region_shape(transfer.write))
    dist.broadcast(bytes_of(part), transfer.source, group=group)
    if target is not None:
        arriving = next(t for t in _moving(cut) if t.target == cut.rank)
        write_region(target, arriving.write, part)


def _all_gather(cut: Cut, source: torch.Tensor, target: torch.Tensor, group: Group) -> None:
    """Equal parts: gathered in order of rank, straight into the target if they are its rows."""
    moving = list(_moving(cut))
    part = packed(source, next(t for t in moving if t.source == cut.rank).read)
    arriving = sorted((t for t in moving if t.target == cut.rank), key=lambda t: t.source)
    if _are_rows(arriving, target):
        dist.all_gather_single(bytes_of(target), bytes_of(part), group=group)
        return
    parts = target.new_empty((len(arriving), part.numel()))
    dist.all_gather_single(bytes_of(parts), bytes_of(part), group=group)
    for transfer, data in zip(arriving, parts, strict=True):
        write_region(target, transfer.write, data.view(region_shape(transfer.write)))


def _are_rows(arriving: list[Transfer], target: torch.Tensor) -> bool:
    """Test whether parts in this order fill the target's memory one after the other."""
    at = target.data_ptr()
    for transfer in arriving:
        view = box_view(target, transfer.write)
        if view is None or not view.is_contiguous() or view.data_ptr() != at:
            return False
        at += view.nbytes
    return at == target.data_ptr() + target.nbytes
