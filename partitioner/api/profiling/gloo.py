"""Seconds of communications between processes, over gloo: of this machine, or of torchrun.

A communication is measured between products that take about a millisecond, as it is in a model:
its seconds are what it adds to theirs. One that is waited for at once follows its operand's product
and stops the next; one that passes beside compute is waited for behind the next products.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
#: Every so many of the sizes are measured before the others: a table of them alone is of use.
_ROUGHLY = 3
#: Turns, the fewest if time runs out, and communications of each: one, but more of messages of up
#: to so many bytes.
_TURNS, _LEAST_TURNS, _REPEATS = 7, 3, {2**18: 8, 2**20: 2}
_FLOAT_BYTES = 4
#: Seconds of the products between two communications: for one that passes beside compute at least
#: as many as it takes alone.
_BETWEEN_S = 1e-3
_SIDE = 192  #: Of the matrices that are multiplied.


class LinkGroup(NamedTuple):
    """Ranks whose communications are measured."""

    level: str  #: Name of the level of the network that they span; "" for the innermost.
    each: int  #: Number of them in every group of the level below.
    ranks: tuple[int, ...]  #: Their numbers; the first is 0.


#: A communication to measure: its kind, its group, its bytes.
Wanted = tuple[str, LinkGroup, int]
#: A communication that was measured: the same, and whether it passes beside compute.
Place = tuple[str, LinkGroup, int, bool]


class _Turns(NamedTuple):
    """Seconds of one rank in each turn, for each communication of it."""

    alone: list[float]  #: Of the products alone.
    at_once: list[float]  #: Of the products and the communication, waited for at once.
    later: list[float]  #: The same, waited for behind the next products.


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


def wanted_of(groups: Sequence[LinkGroup]) -> tuple[Wanted, ...]:
    """The communications of groups that are measured; a message is between two ranks."""
    return tuple(
        (kind, group, nbytes)
        for nbytes in SIZES
        for group in groups
        for kind in _STARTS
        if group.each == 1 or kind != CommKind.SEND.value
    )


def measure_links(wanted: Sequence[Wanted], end_s: float) -> Mapping[Place, Sequence[float]]:
    """Seconds of each turn of communications between processes of this machine.

    All ranks begin a turn together, and it takes as long as its slowest rank, with communications
    and without. A communication takes the difference, so that what slows either rank for a moment
    is on both sides of it.

    Args:
        end_s: Time of `time.perf_counter` at which the measurement ends. What does not fit is left
            out: some sizes of all kinds, or everything.

    Raises:
        BackendError: A rank raised or was killed.
    """
    ranks = 1 + max(rank for _, group, _ in wanted for rank in group.ranks)
    stages = _in_stages(wanted)
    with tempfile.TemporaryDirectory(prefix="partitioner-links-") as name:
        folder = Path(name)
        run_job(folder, ranks, {"runner": __name__, "stages": stages, "end_s": end_s})
        times = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    return added_seconds([one for stage in stages for one in stage], times)


def measure_links_together(
    wanted: Sequence[Wanted], end_s: float
) -> Mapping[Place, Sequence[float]]:
    """The same between the processes of torch.distributed, which must be up; all must call it."""
    stages = _in_stages(wanted)
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, _measured(dist.get_rank(), stages, end_s))
    return added_seconds([one for stage in stages for one in stage], times)


def _in_stages(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Communications of a few sizes, then those of each other size, the largest first."""
    rough = SIZES[::_ROUGHLY]
    others = sorted({nbytes for *_, nbytes in wanted}.difference(rough), reverse=True)
    of_stages = [
        [one for one in wanted if one[2] in sizes]
        for sizes in (rough, *((nbytes,) for nbytes in others))
    ]
    return [stage for stage in of_stages if stage]


def added_seconds(
    wanted: Sequence[Wanted], times: Sequence[Sequence[tuple[int, Sequence[list[float]]]]]
) -> Mapping[Place, Sequence[float]]:
    """Seconds that each communication adds to each turn of the slowest rank.

    Args:
        times: Of each rank: the number in `wanted`, and `_Turns`, of each that was measured.
    """
    of_ranks: dict[int, list[_Turns]] = defaultdict(list)
    for rank_times in times:
        for number, turns in rank_times:
            of_ranks[number].append(_Turns(*turns))
    known: dict[Place, Sequence[float]] = {}
    for number, all_turns in of_ranks.items():
        alone, at_once, later = (
            [max(turn) for turn in zip(*of_all, strict=True)]
            for of_all in zip(*all_turns, strict=True)
        )
        for is_beside, seconds in ((False, at_once), (True, later)):
            known[(*wanted[number], is_beside)] = [
                max(0.0, turn_s - alone_s) for turn_s, alone_s in zip(seconds, alone, strict=True)
            ]
    return known


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`."""
    torch.set_num_threads(job["threads"])
    stages = [
        [
            (kind, LinkGroup(level, each, tuple(ranks)), nbytes)
            for kind, (level, each, ranks), nbytes in stage
        ]
        for stage in job["stages"]
    ]
    times = _measured(rank, stages, job["end_s"])
    (folder / f"times-{rank}.json").write_text(json.dumps(times))


def _measured(
    rank: int, stages: Sequence[Sequence[Wanted]], end_s: float
) -> list[tuple[int, _Turns]]:
    """The number among all stages, and seconds of turns, of the rank's communications.

    In a turn all communications are measured once, so that what else the machine does for seconds
    falls on one turn of each, not on all turns of some. A stage is left out, with those behind it,
    if the fewest turns of it do not fit before `end_s`.
    """
    wanted = [one for stage in stages for one in stage]
    products, buffers = _Products(), _Buffers(max(nbytes for *_, nbytes in wanted))
    groups = {
        group: dist.new_group(list(group.ranks))
        for group in dict.fromkeys(group for _, group, _ in wanted)
    }

    def begun(some: Sequence[tuple[int, Wanted]]) -> dict[int, _Communication] | None:
        """The rank's communications, by number; None if the time is over before all are begun."""
        own: dict[int, _Communication] = {}
        for number, (kind, group, nbytes) in some:
            if _agreed(time.perf_counter() - end_s) > 0:
                return None
            if rank in group.ranks:
                process_group, numel = groups[group], nbytes // _FLOAT_BYTES
                start = _STARTS[kind](rank, group.ranks, buffers, numel, process_group)
                own[number] = _Communication.begun(start, nbytes, products, process_group)
        return own

    kept: dict[int, _Communication] = {}
    numbers = itertools.count()
    for stage in stages:
        more = begun([*zip(itertools.islice(numbers, len(stage)), stage, strict=True)])
        if more is None:
            break
        turn_s = sum(one.turn_s for one in (*kept.values(), *more.values()))
        if _agreed(time.perf_counter() + _LEAST_TURNS * turn_s - end_s) > 0:
            break
        kept |= more
    _take_turns([*kept.values()], end_s)
    dist.barrier()
    return [(number, one.turns) for number, one in kept.items()]


def _take_turns(some: Sequence[_Communication], end_s: float) -> None:
    """Turns of a rank's communications, up to all; after the fewest none that ends late."""
    turn_s = 0.0
    for turn in range(_TURNS):
        begin_s = time.perf_counter()
        if turn >= _LEAST_TURNS and _agreed(begin_s + turn_s - end_s) > 0:
            break
        for one in some:
            one.turn()
        turn_s = time.perf_counter() - begin_s


class _Buffers:
    def __init__(self, nbytes: int) -> None:
        self._source = torch.ones(nbytes // _FLOAT_BYTES)
        self._target = torch.zeros(nbytes // _FLOAT_BYTES)

    def source(self, numel: int) -> torch.Tensor:
        return self._source[:numel]

    def target(self, numel: int) -> torch.Tensor:
        return self._target[:numel]


class _Products:
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
        return max(1, round(seconds / self._one_s))


@dataclass
class _Communication:
    """Repeat one kind of communication, of one size, between products."""

    start: _Start
    repeats: int  #: How often a turn has it.
    number: int  #: Products between two of it.
    turn_s: float  #: Seconds that a turn takes, about.
    group: Any
    products: _Products
    #: Seconds of the turns until now.
    turns: _Turns = field(default_factory=lambda: _Turns([], [], []))

    @classmethod
    def begun(cls, start: _Start, nbytes: int, products: _Products, group: Any) -> _Communication:
        """Run it twice, to warm up and to agree on the number of products."""
        _wait(start())
        dist.barrier(group)
        begin = time.perf_counter()
        _wait(start())
        alone_s = _agreed(time.perf_counter() - begin, group)
        between_s = alone_s + _BETWEEN_S
        repeats = next((n for most, n in _REPEATS.items() if nbytes <= most), 1)
        turn_s = repeats * (3 * between_s + 2 * alone_s)
        return cls(start, repeats, products.number(between_s), turn_s, group, products)

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


def _agreed(seconds: float, group: Any = None) -> float:
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


def _exchange(
    call: Callable[..., Any], *, reads_whole: bool, writes_whole: bool
) -> Callable[[int, Ranks, _Buffers, int, Any], _Start]:
    """A collective that reads and writes a whole tensor, or a rank's part of one."""

    def start(_: int, ranks: Ranks, buffers: _Buffers, numel: int, group: Any) -> _Start:
        part = numel // len(ranks)
        whole = part * len(ranks)
        source = buffers.source(whole if reads_whole else part)
        target = buffers.target(whole if writes_whole else part)
        return lambda: call(target, source, group=group, async_op=True)

    return start


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
    CommKind.ALL_GATHER.value: _exchange(
        dist.all_gather_single, reads_whole=False, writes_whole=True
    ),
    CommKind.REDUCE_SCATTER.value: _exchange(
        dist.reduce_scatter_single, reads_whole=True, writes_whole=False
    ),
    CommKind.ALL_TO_ALL.value: _exchange(
        dist.all_to_all_single, reads_whole=True, writes_whole=True
    ),
    CommKind.BROADCAST.value: _broadcast,
    CommKind.SEND.value: _send,
}
