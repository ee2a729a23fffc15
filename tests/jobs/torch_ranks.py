"""Runs functions as ranks of a gloo group in forked processes, with one import of torch.

A script calls `main` with its jobs; it prints a line a job: its name and "ok", or what is wrong.
"""

import ctypes
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


class LeftError(Exception):
    """A rank that is to end without a word."""


@dataclass(frozen=True)
class Job:
    """What ranks run, how long calls of the group may wait, and how long the job may take."""

    ranks: int
    run: Callable[[int], None]
    timeout_s: float = 60
    limit_s: float = 150


def main(jobs: dict[str, Job]) -> None:
    gc.freeze()  # the ranks neither go through what was there before them nor copy its pages
    torch.set_num_threads(1)
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # its imports take a second
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {_problem(jobs[name], Path(folder)) or 'ok'}", flush=True)


def _problem(job: Job, folder: Path) -> str:
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
    return said + "".join(path.read_text() for path in sorted(folder.glob("error-*")))


def _fork(rank: int, job: Job, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the parent
        store = dist.FileStore(str(folder / "store"), job.ranks)
        timeout = timedelta(seconds=job.timeout_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.ranks, timeout=timeout
        )
        dist.barrier()  # a rank with nothing to do does not leave while others still connect
        job.run(rank)
    except LeftError:
        pass
    except BaseException:  # noqa: BLE001 (whatever it is, the script prints it)
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(0)  # closes the connections
