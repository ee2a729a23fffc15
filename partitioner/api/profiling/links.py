"""Seconds of communications between processes, over gloo: of this machine, or of torchrun.

A communication is measured between products that take about a millisecond, as it is in a model:
its seconds are what it adds to theirs. One that is waited for at once follows its operand's product
and stops the next; one that passes beside compute is waited for behind the next products. The
measurements are added to profiles.
"""

from __future__ import annotations

import itertools
import json
import pickle
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from partitioner.api.profiling.measure import Timing
from partitioner.backends.launch import run_job
from partitioner.backends.process_group import TIMEOUT, Start
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.database import (
    Profile,
    beside,
    check_writable,
    in_groups,
    over,
    write_entries,
)
from partitioner.cost_model.profiles.entries import LinkEntry
from partitioner.foundations import units
from partitioner.ir.program import CommKind
from partitioner.search.request import Say

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
_STAGES = "stages.pickle"  #: What is measured, in the folder of the job.
_SIDE = 192  #: Of the matrices that are multiplied.
#: The communications that are measured; a message is between two ranks.
_KINDS = tuple(
    kind.value
    for kind in (
        *(CommKind.ALL_REDUCE, CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER),
        *(CommKind.ALL_TO_ALL, CommKind.BROADCAST, CommKind.SEND),
    )
)


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
_Start = Callable[..., Any]


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
    """The communications of groups that are measured."""
    return tuple(
        (kind, group, nbytes)
        for nbytes in SIZES
        for group in groups
        for kind in _KINDS
        if group.each == 1 or kind != CommKind.SEND.value
    )


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
    """Seconds that each of `wanted` adds to each turn of the slowest rank; `times` are by rank."""
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
    stages = pickle.loads((folder / _STAGES).read_bytes())  # noqa: S301 (our own file)
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
    most = max(nbytes for *_, nbytes in wanted) // _FLOAT_BYTES
    products, ones, zeros = _Products(), torch.ones(most), torch.zeros(most)
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
                buffers = ones[:numel], zeros[:numel]
                start = _start_of(kind, rank, group.ranks, *buffers, process_group)
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

        def at_once() -> None:
            self.products(self.number)
            _wait(self.start())

        def later() -> None:
            work = self.start()
            self.products(self.number)
            _wait(work)

        runs: list[Callable[[], None]] = [partial(self.products, self.number), at_once, later]
        for seconds, run in zip(self.turns, runs, strict=True):
            dist.barrier(self.group)
            begin = time.perf_counter()
            for _ in range(self.repeats):
                run()
            seconds.append((time.perf_counter() - begin) / self.repeats)


def _agreed(seconds: float, group: Any = None) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _start_of(
    kind: str, rank: int, ranks: Sequence[int], ones: torch.Tensor, zeros: torch.Tensor, group: Any
) -> _Start:
    """The start of a communication from `ones` to `zeros`, which are as large as it is."""
    part = ones.numel() // len(ranks)
    whole = part * len(ranks)
    first, second, *_ = ranks
    starts: dict[str, _Start] = {
        CommKind.ALL_REDUCE.value: partial(dist.all_reduce, zeros),
        CommKind.ALL_GATHER.value: partial(dist.all_gather_single, zeros[:whole], ones[:part]),
        CommKind.REDUCE_SCATTER.value: partial(
            dist.reduce_scatter_single, zeros[:part], ones[:whole]
        ),
        CommKind.ALL_TO_ALL.value: partial(dist.all_to_all_single, zeros[:whole], ones[:whole]),
        CommKind.BROADCAST.value: partial(dist.broadcast, zeros, first),
    }
    if kind in starts:
        return partial(starts[kind], group=group, async_op=True)
    if rank == first:
        return partial(dist.isend, ones, second, group=group)
    return partial(dist.irecv, zeros, first, group=group) if rank == second else lambda: None


def groups_of(cluster: Cluster) -> tuple[LinkGroup, ...]:
    """The groups of a cluster's ranks whose communications are measured."""
    return link_groups([(level.name, level.size) for level in cluster.levels])


def unknown_links(profiles: Iterable[Profile], groups: Sequence[LinkGroup]) -> tuple[Wanted, ...]:
    """The communications of groups that no profile has from this backend."""
    known = {
        (kind, ranks, entry.nbytes, profile.level)
        for profile in profiles
        for (kind, ranks), entries in profile.links.items()
        for entry in entries
        if entry.backend == NAME
    }
    return tuple(
        (kind, group, nbytes)
        for kind, group, nbytes in wanted_of(groups)
        if (in_groups(kind, group.each), len(group.ranks), nbytes, group.level) not in known
    )


def measure_here(known: Profile, wanted: Sequence[Wanted], end_s: float, say: Say) -> int:
    """Measure communications between processes of this machine until `end_s`; their number.

    All ranks begin a turn together, and it takes as long as its slowest rank, with communications
    and without. A communication takes the difference, so that what slows either rank for a moment
    is on both sides of it. What does not fit before `end_s` is left out: some sizes of all kinds,
    or everything. Each communication counts twice, with its seconds beside compute.
    """
    ranks = max(len(group.ranks) for _, group, _ in wanted)
    say(f"measuring communications between {ranks} processes")
    stages = _in_stages(wanted)
    with tempfile.TemporaryDirectory(prefix="partitioner-links-") as name:
        folder = Path(name)
        (folder / _STAGES).write_bytes(pickle.dumps(stages))
        run_job(folder, ranks, {"runner": __name__, "end_s": end_s})
        times = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    return _write(known, added_seconds([one for stage in stages for one in stage], times))


def measure_together(cluster: Cluster, end_s: float, say: Say) -> tuple[int, int]:
    """Measure those of all groups between torchrun's processes; counts of measured and unknown.

    Every process calls it; rank 0 adds the measurements of each level to the level's profile, and
    knows from these what is new.
    """
    profiles = {}
    for level in cluster.levels:
        if level.profile is None:
            raise CostError(
                f"cluster {cluster.name!r}: level {level.name!r} names no profile, which its "
                "communications would be added to"
            )
        profiles[level.profile.level] = level.profile
    with _started(len(cluster)):
        rank = dist.get_rank()
        if rank == 0:
            for profile in profiles.values():
                check_writable(profile.file)
            say(f"measuring communications between {len(cluster)} processes of torchrun")
        new = [unknown_links(profiles.values(), groups_of(cluster))]
        dist.broadcast_object_list(new)
        (wanted,) = new
        stages = _in_stages(wanted)
        measured: Mapping[Place, Sequence[float]] = {}
        if wanted:
            times: list[Any] = [None] * len(cluster)
            dist.all_gather_object(times, _measured(rank, stages, end_s))
            measured = added_seconds([one for stage in stages for one in stage], times)
    for name, profile in profiles.items():
        of_level = {place: seconds for place, seconds in measured.items() if place[1].level == name}
        if rank == 0:
            _write(profile, of_level)
    return len(measured), 2 * len(wanted) - len(measured)


@contextmanager
def _started(ranks: int) -> Iterator[None]:
    """torch.distributed over gloo between so many processes; it may be up already."""
    is_up = dist.is_initialized()
    if not is_up:
        start = Start.of_environment()
        dist.init_process_group(
            "gloo", store=start.store, rank=start.rank, world_size=start.ranks, timeout=TIMEOUT
        )
    try:
        if dist.get_world_size() != ranks:
            raise CostError(
                f"the cluster has {ranks} devices, torchrun started {dist.get_world_size()} "
                "processes"
            )
        yield
        dist.barrier()
    finally:
        if not is_up:
            dist.destroy_process_group()


def _write(known: Profile, measured: Mapping[Place, Sequence[float]]) -> int:
    """Add seconds of turns to a profile; their number."""
    entries = []
    for (kind, group, nbytes, is_beside), seconds in measured.items():
        grouped = in_groups(kind, group.each)
        entries.append(
            LinkEntry(
                over(beside(grouped) if is_beside else grouped, group.level),
                len(group.ranks),
                nbytes,
                *Timing.of(seconds),
                NAME,
                units.now(),
            )
        )
    write_entries(known.file, known.device, known.threads, entries)
    return len(entries)
