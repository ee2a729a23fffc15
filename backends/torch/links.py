"""Seconds of communications between processes of this machine, over gloo."""

from __future__ import annotations

import json
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
#: Timed runs: so many, but of small messages more.
_REPEATS, _MORE_REPEATS, _SMALL_BYTES = 7, 31, 2**18
_FLOAT_BYTES = 4

#: A communication, by its kind, its number of ranks and its bytes.
Place = tuple[str, int, int]


def measure_links(ranks: int) -> Mapping[Place, Sequence[float]]:
    """Seconds of each repeat of each kind, number of ranks (2 to `ranks`, doubling) and size.

    All ranks begin a repeat together; it takes as long as its slowest rank.

    Raises:
        BackendError: A rank raised or was killed.
    """
    with tempfile.TemporaryDirectory(prefix="partitioner-links-") as name:
        folder = Path(name)
        run_job(folder, ranks, {"backend": "links"})
        times = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(ranks)]
    known: dict[Place, list[float]] = {}
    for of_rank in times:
        for kind, count, nbytes, seconds in of_rank:
            before = known.get((kind, count, nbytes), [0.0] * len(seconds))
            known[kind, count, nbytes] = list(map(max, before, seconds))
    return known


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`."""
    torch.set_num_threads(job["threads"])
    times = list(_measured(rank, job["ranks"]))
    (folder / f"times-{rank}.json").write_text(json.dumps(times))


def _measured(rank: int, ranks: int) -> Iterator[tuple[str, int, int, list[float]]]:
    count = 2
    while count <= ranks:
        group = dist.new_group(list(range(count)))
        for kind in _RUNS if rank < count else ():
            for nbytes in SIZES:
                repeats = _MORE_REPEATS if nbytes <= _SMALL_BYTES else _REPEATS
                run = _RUNS[kind](rank, count, nbytes, group)
                yield kind, count, nbytes, _seconds(run, repeats, group)
        dist.barrier()
        count = ranks if count < ranks < 2 * count else 2 * count


def _seconds(run: Callable[[], object], repeats: int, group: Any) -> list[float]:
    run()
    seconds = []
    for _ in range(repeats):
        dist.barrier(group)
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _all_reduce(_: int, __: int, nbytes: int, group: Any) -> Callable[[], object]:
    data = torch.ones(nbytes // _FLOAT_BYTES)
    return lambda: dist.all_reduce(data, group=group)


def _all_gather(_: int, count: int, nbytes: int, group: Any) -> Callable[[], object]:
    part = torch.ones(nbytes // _FLOAT_BYTES // count)
    whole = torch.empty(part.numel() * count)
    return lambda: dist.all_gather_single(whole, part, group=group)


def _reduce_scatter(_: int, count: int, nbytes: int, group: Any) -> Callable[[], object]:
    part = torch.empty(nbytes // _FLOAT_BYTES // count)
    whole = torch.ones(part.numel() * count)
    return lambda: dist.reduce_scatter_single(part, whole, group=group)


def _broadcast(_: int, __: int, nbytes: int, group: Any) -> Callable[[], object]:
    data = torch.ones(nbytes // _FLOAT_BYTES)
    return lambda: dist.broadcast(data, 0, group=group)


def _send(rank: int, _: int, nbytes: int, group: Any) -> Callable[[], object]:
    data = torch.ones(nbytes // _FLOAT_BYTES)
    if rank == 0:
        return lambda: dist.send(data, 1, group=group)
    return lambda: dist.recv(data, 0, group=group) if rank == 1 else None


_RUNS: Mapping[str, Callable[[int, int, int, Any], Callable[[], object]]] = {
    CommKind.ALL_REDUCE.value: _all_reduce,
    CommKind.ALL_GATHER.value: _all_gather,
    CommKind.REDUCE_SCATTER.value: _reduce_scatter,
    CommKind.BROADCAST.value: _broadcast,
    CommKind.SEND.value: _send,
}
