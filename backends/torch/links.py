"""Seconds of communications between processes, over gloo: of this machine, or of torchrun.

A communication is measured between products that take about a millisecond, as it is in a model:
its seconds are what it adds to theirs. One that is waited for at once follows its operand's product
and stops the next; one that passes beside compute is waited for behind the next products.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from partitioner.backends.launch import run_job
from partitioner.ir.program import CommKind

NAME = f"gloo, torch {torch.__version__}"
#: Bytes that are measured: of the whole tensor of a gather, else of the local one.
SIZES = tuple(1024 * 4**power for power in range(8))
#: Turns, and communications of each: one, but more of messages of up to so many bytes.
_TURNS, _REPEATS = 7, {2**18: 8, 2**20: 2}
_FLOAT_BYTES = 4
#: Seconds of the products between two communications: for one that passes beside compute at least
#: as many as it takes alone.
_BETWEEN_S = 1e-3
_SIDE = 192  #: Of the matrices that are multiplied.


class LinkGroup(NamedTuple):
    """Ranks whose communications are measured.

    Attributes:
        level: Name of the level of the network that they span; "" for the innermost.
        each: Number of them in every group of the level below.
        ranks: Their numbers; the first is 0.
    """

    level: str
    each: int
    ranks: tuple[int, ...]


#: A communication: its kind, its group, its bytes, and whether it passes beside compute.
Place = tuple[str, LinkGroup, int, bool]


class _Turns(NamedTuple):
    """Seconds of one rank in each turn, for each communication of it.

    Attributes:
        alone: Of the products alone.
        at_once: Of the products and the communication, waited for at once.
        later: The same, waited for behind the next products.
    """

    alone: list[float]
    at_once: list[float]
    later: list[float]


#: Starts a communication, and returns what waits for it; None on a rank that takes no part.
_Start = Callable[[], Any]
Ranks = tuple[int, ...]


def link_groups(levels: Sequence[tuple[str, int]]) -> tuple[LinkGroup, ...]:
    """The groups of ranks to measure on levels of these names and sizes, innermost first.

    Numbers of ranks double, up to all. Over a level with others below it, these are one rank of
    each of so many groups of the level below, and several of each: groups of both levels.

    >>> [(group.each, group.ranks) for group in link_groups((("node", 2), ("network", 4)))]
    [(1, (0, 1)), (1, (0, 2)), (2, (0, 1, 2, 3))]
    """
    (_, inner), *outer = levels
    groups = [LinkGroup("", 1, tuple(range(count))) for count in _doubling(inner)]
    for name, size in outer:
        groups += [
            LinkGroup(name, each, tuple(i * inner + k for i in range(count) for k in range(each)))
            for count in _doubling(size // inner)
            for each in (1, *_doubling(inner))
        ]
        inner = size
    return tuple(groups)


def _doubling(most: int) -> tuple[int, ...]:
    """2, 4, 8, ... and the most; nothing below 2."""
    powers = (2**power for power in range(1, most.bit_length()))
    return tuple(dict.fromkeys((*powers, most))) if most > 1 else ()


def measure_links(groups: Sequence[LinkGroup]) -> Mapping[Place, Sequence[float]]:
    """Seconds of each turn of each kind, group and size, between processes of this machine.

    All ranks begin a turn together, and it takes as long as its slowest rank, with communications
    and without. A communication takes the difference, so that what slows either rank for a moment
    is on both sides of it.

    Raises:
        BackendError: A rank raised or was killed.
    """
    ranks = 1 + max(rank for group in groups for rank in group.ranks)
    with tempfile.TemporaryDirectory(prefix="partitioner-links-") as name:
        folder = Path(name)
        run_job(folder, ranks, {"runner": __name__, "sizes": SIZES, "groups": groups})
        times = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    return added_seconds(groups, times)


def measure_links_together(groups: Sequence[LinkGroup]) -> Mapping[Place, Sequence[float]]:
    """The same between the processes of torch.distributed, which must be up; all must call it."""
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, list(_measured(dist.get_rank(), groups, SIZES)))
    return added_seconds(groups, times)


def added_seconds(
    groups: Sequence[LinkGroup], times: Sequence[Sequence[Any]]
) -> Mapping[Place, Sequence[float]]:
    """Seconds that each communication adds to each turn of the slowest rank.

    Args:
        times: Of each rank: kind, number of the group, bytes and `_Turns` of each communication.
    """
    of_ranks: dict[tuple[str, int, int], list[_Turns]] = defaultdict(list)
    for rank_times in times:
        for kind, group, nbytes, turns in rank_times:
            of_ranks[kind, group, nbytes].append(_Turns(*turns))
    known: dict[Place, Sequence[float]] = {}
    for (kind, group, nbytes), all_turns in of_ranks.items():
        alone, at_once, later = (
            [max(turn) for turn in zip(*of_all, strict=True)]
            for of_all in zip(*all_turns, strict=True)
        )
        for is_beside, seconds in ((False, at_once), (True, later)):
            known[kind, groups[group], nbytes, is_beside] = [
                max(0.0, turn_s - alone_s) for turn_s, alone_s in zip(seconds, alone, strict=True)
            ]
    return known


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`."""
    torch.set_num_threads(job["threads"])
    groups = [LinkGroup(level, each, tuple(ranks)) for level, each, ranks in job["groups"]]
    times = list(_measured(rank, groups, job["sizes"]))
    (folder / f"times-{rank}.json").write_text(json.dumps(times))


def _measured(
    rank: int, groups: Sequence[LinkGroup], sizes: Sequence[int]
) -> Iterator[tuple[str, int, int, _Turns]]:
    """The kind, the group's number, the bytes, and seconds of turns.

    In a turn all kinds, groups and sizes are measured once, so that what else the machine does for
    seconds falls on one turn of each, not on all turns of some.
    """
    products, buffers = _Products(), _Buffers(max(sizes))
    measured: list[tuple[str, int, int, _Communication]] = []
    for number, (_, each, ranks) in enumerate(groups):
        group = dist.new_group(list(ranks))
        for kind in _STARTS if rank in ranks else ():
            if each > 1 and kind == CommKind.SEND.value:
                continue  # a message is between two ranks
            for nbytes in sizes:
                start = _STARTS[kind](rank, ranks, buffers, nbytes // _FLOAT_BYTES, group)
                one = _Communication.begun(start, nbytes, products, group)
                measured.append((kind, number, nbytes, one))
        dist.barrier()
    for _ in range(_TURNS):
        for *_place, one in measured:
            one.turn()
    for kind, number, nbytes, one in measured:
        yield kind, number, nbytes, one.turns
    dist.barrier()


class _Buffers:
    """What all communications read and write."""

    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes // _FLOAT_BYTES)
        self._target = torch.zeros(nbytes // _FLOAT_BYTES)

    def source(self, numel: int) -> torch.Tensor:
        return self._source[:numel]

    def target(self, numel: int) -> torch.Tensor:
        return self._target[:numel]


class _Products:
    """Products of matrices, whose seconds are known."""

    def __init__(self) -> None:
        self._matrix = torch.ones(_SIDE, _SIDE)
        self._result = torch.empty(_SIDE, _SIDE)
        self(32)
        begin = time.perf_counter()
        self(32)
        self._one_s = (time.perf_counter() - begin) / 32

    def __call__(self, number: int) -> None:
        for _ in range(number):
            torch.mm(self._matrix, self._matrix, out=self._result)

    def number(self, seconds: float) -> int:
        """Number of products that take about so long."""
        return max(1, round(seconds / self._one_s))


@dataclass
class _Communication:
    """One kind of communication of one size, between products.

    Attributes:
        start: Starts it.
        repeats: How often a turn has it.
        number: Products between two of it.
        group: The process group.
        products: Computes the products.
        turns: Seconds of the turns until now.
    """

    start: _Start
    repeats: int
    number: int
    group: Any
    products: _Products
    turns: _Turns = field(default_factory=lambda: _Turns([], [], []))

    @classmethod
    def begun(cls, start: _Start, nbytes: int, products: _Products, group: Any) -> _Communication:
        """Run it twice, to warm up and to agree on the number of products."""
        _wait(start())
        dist.barrier(group)
        begin = time.perf_counter()
        _wait(start())
        number = products.number(_agreed(time.perf_counter() - begin + _BETWEEN_S, group))
        repeats = next((n for most, n in _REPEATS.items() if nbytes <= most), 1)
        return cls(start, repeats, number, group, products)

    def turn(self) -> None:
        """Run the products of a turn without it, with it, and with it beside them."""
        runs = self._without, self._at_once, self._later
        for seconds, run in zip(self.turns, runs, strict=True):
            seconds.append(self._timed(run) / self.repeats)

    def _timed(self, run: Callable[[], None]) -> float:
        dist.barrier(self.group)
        begin = time.perf_counter()
        for _ in range(self.repeats):
            run()
        return time.perf_counter() - begin

    def _without(self) -> None:
        self.products(self.number)

    def _at_once(self) -> None:
        self.products(self.number)
        _wait(self.start())

    def _later(self) -> None:
        work = self.start()
        self.products(self.number)
        _wait(work)


def _agreed(seconds: float, group: Any) -> float:
    """The most of all ranks."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _all_reduce(_: int, __: Ranks, buffers: _Buffers, numel: int, group: Any) -> _Start:
    data = buffers.target(numel)
    return lambda: dist.all_reduce(data, group=group, async_op=True)


def _all_gather(_: int, ranks: Ranks, buffers: _Buffers, numel: int, group: Any) -> _Start:
    part = buffers.source(numel // len(ranks))
    whole = buffers.target(part.numel() * len(ranks))
    return lambda: dist.all_gather_single(whole, part, group=group, async_op=True)


def _reduce_scatter(_: int, ranks: Ranks, buffers: _Buffers, numel: int, group: Any) -> _Start:
    part = buffers.target(numel // len(ranks))
    whole = buffers.source(part.numel() * len(ranks))
    return lambda: dist.reduce_scatter_single(part, whole, group=group, async_op=True)


def _all_to_all(_: int, ranks: Ranks, buffers: _Buffers, numel: int, group: Any) -> _Start:
    source = buffers.source(numel // len(ranks) * len(ranks))
    target = buffers.target(source.numel())
    return lambda: dist.all_to_all_single(target, source, group=group, async_op=True)


def _broadcast(_: int, ranks: Ranks, buffers: _Buffers, numel: int, group: Any) -> _Start:
    data = buffers.target(numel)
    return lambda: dist.broadcast(data, ranks[0], group=group, async_op=True)


def _send(rank: int, ranks: Ranks, buffers: _Buffers, numel: int, group: Any) -> _Start:
    first, second, *_ = ranks
    if rank == first:
        data = buffers.source(numel)
        return lambda: dist.isend(data, second, group=group)
    data = buffers.target(numel)
    return lambda: dist.irecv(data, first, group=group) if rank == second else None


_STARTS: Mapping[str, Callable[[int, Ranks, _Buffers, int, Any], _Start]] = {
    CommKind.ALL_REDUCE.value: _all_reduce,
    CommKind.ALL_GATHER.value: _all_gather,
    CommKind.REDUCE_SCATTER.value: _reduce_scatter,
    CommKind.ALL_TO_ALL.value: _all_to_all,
    CommKind.BROADCAST.value: _broadcast,
    CommKind.SEND.value: _send,
}
