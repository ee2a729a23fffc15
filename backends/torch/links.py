"""Seconds of communications between processes of this machine, over gloo.

A communication is measured between products that take about a millisecond, as it is in a model:
its seconds are what it adds to theirs. One that is waited for at once follows its operand's product
and stops the next; one that passes beside compute is waited for behind the next products.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partitioner.backends.launch import run_job
from partitioner.ir.program import CommKind

NAME = f"gloo, torch {torch.__version__}"
#: Bytes that are measured: of the whole tensor of a gather, else of the local one.
SIZES = tuple(1024 * 4**power for power in range(8))
#: Turns, and communications of each: so many, but of small messages more.
_TURNS, _REPEATS, _MORE_REPEATS, _SMALL_BYTES = 7, 2, 8, 2**18
_FLOAT_BYTES = 4
#: Seconds of the products between two communications: for one that passes beside compute at least
#: as many as it takes alone.
_BETWEEN_S = 1e-3
_SIDE = 192  #: Of the matrices that are multiplied.

#: A communication: its kind, its number of ranks, its bytes, and whether it passes beside compute.
Place = tuple[str, int, int, bool]
#: Starts a communication, and returns what waits for it; None on a rank that takes no part.
_Start = Callable[[], Any]


def measure_links(ranks: int) -> Mapping[Place, Sequence[float]]:
    """Seconds of each turn of each kind, number of ranks (2 to `ranks`, doubling) and size.

    All ranks begin a turn together; it takes as long as its slowest rank.

    Raises:
        BackendError: A rank raised or was killed.
    """
    with tempfile.TemporaryDirectory(prefix="partitioner-links-") as name:
        folder = Path(name)
        run_job(folder, ranks, {"runner": __name__, "sizes": SIZES})
        times = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    known: dict[Place, list[float]] = {}
    for of_rank in times:
        for *place, seconds in of_rank:
            kind, count, nbytes, is_beside = place
            before = known.get((kind, count, nbytes, is_beside), [0.0] * len(seconds))
            known[kind, count, nbytes, is_beside] = list(map(max, before, seconds))
    return known


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`."""
    torch.set_num_threads(job["threads"])
    times = list(_measured(rank, job["ranks"], job["sizes"]))
    (folder / f"times-{rank}.json").write_text(json.dumps(times))


def _measured(
    rank: int, ranks: int, sizes: Sequence[int]
) -> Iterator[tuple[str, int, int, bool, list[float]]]:
    products = _Products()
    count = 2
    while count <= ranks:
        group = dist.new_group(list(range(count)))
        for kind in _STARTS if rank < count else ():
            for nbytes in sizes:
                start = _STARTS[kind](rank, count, nbytes, group)
                at_once, later = _seconds(start, nbytes, products, group)
                yield kind, count, nbytes, False, at_once
                yield kind, count, nbytes, True, later
        dist.barrier()
        count = ranks if count < ranks < 2 * count else 2 * count


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


def _seconds(
    start: _Start, nbytes: int, products: _Products, group: Any
) -> tuple[list[float], list[float]]:
    """Seconds that a communication adds to compute in each turn: waited for at once, and later."""
    repeats = _MORE_REPEATS if nbytes <= _SMALL_BYTES else _REPEATS
    _wait(start())
    dist.barrier(group)
    begin = time.perf_counter()
    _wait(start())
    number = products.number(_agreed(time.perf_counter() - begin + _BETWEEN_S, group))

    def without() -> None:
        for _ in range(repeats):
            products(number)

    def at_once() -> None:
        for _ in range(repeats):
            products(number)
            _wait(start())

    def later() -> None:
        for _ in range(repeats):
            work = start()
            products(number)
            _wait(work)

    runs = (without, at_once, later)
    took: list[list[float]] = [[] for _ in runs]
    for _ in range(_TURNS):
        for run, seconds in zip(runs, took, strict=True):
            dist.barrier(group)
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    alone_s = statistics.median(took[0])
    first, second = ([max(0.0, one - alone_s) / repeats for one in some] for some in took[1:])
    return first, second


def _agreed(seconds: float, group: Any) -> float:
    """The most of all ranks."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    return float(longest)


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _all_reduce(_: int, __: int, nbytes: int, group: Any) -> _Start:
    data = torch.ones(nbytes // _FLOAT_BYTES)
    return lambda: dist.all_reduce(data, group=group, async_op=True)


def _all_gather(_: int, count: int, nbytes: int, group: Any) -> _Start:
    part = torch.ones(nbytes // _FLOAT_BYTES // count)
    whole = torch.empty(part.numel() * count)
    return lambda: dist.all_gather_single(whole, part, group=group, async_op=True)


def _reduce_scatter(_: int, count: int, nbytes: int, group: Any) -> _Start:
    part = torch.empty(nbytes // _FLOAT_BYTES // count)
    whole = torch.ones(part.numel() * count)
    return lambda: dist.reduce_scatter_single(part, whole, group=group, async_op=True)


def _all_to_all(_: int, count: int, nbytes: int, group: Any) -> _Start:
    source = torch.ones(nbytes // _FLOAT_BYTES // count * count)
    target = torch.empty_like(source)
    return lambda: dist.all_to_all_single(target, source, group=group, async_op=True)


def _broadcast(_: int, __: int, nbytes: int, group: Any) -> _Start:
    data = torch.ones(nbytes // _FLOAT_BYTES)
    return lambda: dist.broadcast(data, 0, group=group, async_op=True)


def _send(rank: int, _: int, nbytes: int, group: Any) -> _Start:
    data = torch.ones(nbytes // _FLOAT_BYTES)
    if rank == 0:
        return lambda: dist.isend(data, 1, group=group)
    return lambda: dist.irecv(data, 0, group=group) if rank == 1 else None


_STARTS: Mapping[str, Callable[[int, int, int, Any], _Start]] = {
    CommKind.ALL_REDUCE.value: _all_reduce,
    CommKind.ALL_GATHER.value: _all_gather,
    CommKind.REDUCE_SCATTER.value: _reduce_scatter,
    CommKind.ALL_TO_ALL.value: _all_to_all,
    CommKind.BROADCAST.value: _broadcast,
    CommKind.SEND.value: _send,
}
