"""Runs functions as ranks of a gloo group in forked processes, with one import of torch.

A script of jobs has a table `JOBS` and calls `main` with it. For each name that it reads from its
standard input, it runs the job and prints a line: the name and "" or what is wrong, as JSON. It
ends when its standard input closes.
"""

import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

#: What the ranks of a compiled module import when they first need it, which takes most of their
#: time: it is imported once, before they are forked.
LATE = (
    "partitioner.backends.torch.running.rank_module",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.profiler",
    "highspy",
)


class LeftError(Exception):
    """A rank that is to end without a word."""


@dataclass(frozen=True)
class Job:
    """A function that ranks run.

    Attributes:
        ranks: Number of processes.
        run: Called with the rank; the working folder is temporary and shared by the ranks.
        prepare: Called before the ranks are forked, so that they share the results.
        then: Job that runs afterwards in the same folder.
        timeout_s: How long calls of the group may wait.
        limit_s: How long the job may take.
        slow: Whether its test is marked slow.
        sweep: Whether its test is marked sweep.
    """

    ranks: int
    run: Callable[[int], object]
    prepare: Sequence[Callable[[], object]] = ()
    then: "Job | None" = None
    timeout_s: float = 60
    limit_s: float = 150
    slow: bool = False
    sweep: bool = False


def main(jobs: Mapping[str, Job]) -> None:
    torch.set_num_threads(1)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # its imports take a second

    def run(name: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return _problem(jobs[name], Path(folder))

    serve(run)


def fork_ranks(job: Job) -> str:
    """Run one job; "" or what is wrong."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return _problem(job, Path(folder))


def serve(run: Callable[[str], str]) -> None:
    """Run jobs by name, each of which returns "" or what is wrong."""
    for line in iter(sys.stdin.readline, ""):
        name = line.rstrip("\n")
        try:
            problem = run(name)
        except Exception:  # noqa: BLE001 (whatever it is, the test says it)
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)


def _problem(job: Job, folder: Path) -> str:
    if not torch.cuda.is_available():
        # Traces have PyTorch's CUDA build pretend a GPU, for which autograd starts threads: its
        # backward passes refuse to run in processes that are forked after that.
        torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[attr-defined]
    for prepare in job.prepare:
        prepare()
    if "partitioner.api.compiled.module" in sys.modules:
        for name in LATE:
            importlib.import_module(name)
    gc.freeze()  # the ranks neither go through what was there before them nor copy its pages
    ranks = folder / "ranks"
    ranks.mkdir()
    pids = {_fork(rank, job, folder): rank for rank in range(job.ranks)}
    until = time.monotonic() + job.limit_s
    said = ""
    try:
        while pids and time.monotonic() < until:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if status not in (0, signal.SIGKILL):  # jobs kill ranks; nothing else may
                said += f"rank {pids[ended]} died of signal {status}; "
            pids.pop(ended, None)
            time.sleep(0.01)
        said += f"ranks {sorted(pids.values())} hang; " if pids else ""
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    said += "".join(path.read_text() for path in sorted(ranks.glob("error-*")))
    if said or job.then is None:
        return said
    shutil.rmtree(ranks)
    return _problem(job.then, folder)


def _fork(rank: int, job: Job, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
        os.chdir(folder)
        store = dist.FileStore(str(folder / "ranks/store"), job.ranks)
        timeout = timedelta(seconds=job.timeout_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.ranks, timeout=timeout
        )
        dist.barrier()  # a rank with nothing to do does not leave while others still connect
        job.run(rank)
    except LeftError:
        pass
    except BaseException:  # noqa: BLE001 (whatever it is, the script prints it)
        (folder / f"ranks/error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(0)  # closes the connections
