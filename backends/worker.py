"""The process behind `run_job`: imports once, forks one process a rank, watches over them.

`python -m partitioner.backends.worker FOLDER`: FOLDER is private to one run and holds job.json and
each rank's inputs; ranks leave their outputs there, and failure.txt says what went wrong. The job
names its "runner", the module whose `run_files` runs a rank: from its inputs' file to its outputs'.
Its "device", if it has one, is the type of the device that ranks run on: "cpu" or "cuda".
The process ends, with all its ranks, when its standard input closes: when the process that wants
the run is gone.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partitioner.backends.errors import CommunicationError, one_line
from partitioner.backends.process_group import TIMEOUT
from partitioner.backends.waiting import STEPS, write_processes

#: Seconds between looks at the ranks.
_POLL_S = 0.01
#: Seconds after the first failure in which other ranks may name a better cause: a rank that is
#: gone makes communications of the others fail.
_GRACE_S = 0.3
_PR_SET_PDEATHSIG = 1


def main(folder: Path) -> int:
    """Run all ranks of a job; 0 if all succeed, else 1."""
    job = json.loads((folder / "job.json").read_text())
    importlib.import_module(job["runner"])  # once, for all ranks
    ranks = {_fork(rank, folder, job): rank for rank in range(job["ranks"])}
    write_processes(folder, ranks)
    failures = _watch(ranks, folder)
    if _input_closed():
        shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it
    elif failures:
        _, message = min(failures, key=itemgetter(0))
        (folder / "failure.txt").write_text(message)
    return 1 if failures else 0


def _input_closed(wait_s: float = 0.0) -> bool:
    """Test whether standard input was closed: nobody wants the run any more."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


def _watch(ranks: dict[int, int], folder: Path) -> list[tuple[int, str]]:
    """Wait for all ranks, after a failure kill the others; returns (order of cause, text)."""
    failures: list[tuple[int, str]] = []
    deadline = float("inf")
    while ranks:
        if _input_closed(_POLL_S) or time.monotonic() > deadline:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            for pid in ranks:
                os.waitpid(pid, 0)
            return failures or [(9, "the run was given up")]
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = ranks.pop(pid)
                if status:
                    failures.append(_failure(rank, status, folder))
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
    return failures


def _failure(rank: int, status: int, folder: Path) -> tuple[int, str]:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return 0, f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name})"
    report = folder / f"error-{rank}.json"
    if not report.is_file():
        return 1, f"rank {rank} exited with code {code}"
    data = json.loads(report.read_text())
    return 3 if data["communication"] else 2, data["message"]


def _fork(rank: int, folder: Path, job: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if sys.platform == "linux":  # die with the parent
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _run_rank(rank, folder, job)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the watcher hears of it)
        message = one_line(error)
        message = message if message.startswith(f"rank {rank}") else f"rank {rank}: {message}"
        report = {"message": message, "communication": isinstance(error, CommunicationError)}
        (folder / f"error-{rank}.json").write_text(json.dumps(report))
        os._exit(1)
    os._exit(0)


def _run_rank(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = job["ranks"]
    # A port is open to every user of the machine, the folder to this one alone.
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    carriers = "gloo"
    if job.get("device") == "cuda":
        torch.cuda.set_device(rank)
        carriers = "cpu:gloo,cuda:nccl"
    dist.init_process_group(carriers, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    STEPS.keep_in(folder, rank)
    runner = importlib.import_module(job["runner"])
    runner.run_files(rank, folder, job)
    dist.barrier()  # a rank that leaves closes connections that others may still use


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
