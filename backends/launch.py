"""Runs a job on this machine, one process a rank; used by `onnx.local` and `torch.local`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from partitioner.backends.errors import BackendError
from partitioner.backends.messages import Arrays, receive_arrays, send_arrays
from partitioner.backends.observed import RankLog
from partitioner.backends.runtimes import check_installed
from partitioner.backends.waiting import LOOK_S, lookout_of

#: Files that a rank opens at most beside its connections, and connections to each other rank: one
#: in each of its process groups.
_FILES, _FILES_A_PEER = 40, 8
#: File of what a rank recorded.
_LOG = "log-{}.json"
#: Socket by which ranks that stay up are asked, in the folder of their job.
SOCKET = "ask"
#: Bytes that a connection takes at once though nobody reads them.
_BUFFERED = 32_768
#: Seconds that ranks have to end by themselves.
_END_S = 5.0
#: Seconds between two looks at a job that is watched.
_WATCH_S = 0.2


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A run of rank files on this machine, one process a rank."""

    #: Whole inputs, or arguments of the module, by name; None draws valid random ones.
    inputs: Mapping[str, np.ndarray] | None = None
    #: Number of requests in flight or, of a module, of requests or steps one after the other, at
    #: least 1; one more goes before them.
    requests: int = 1
    seed: int = 0  #: Seed of the drawn inputs and, of a module, of dropout.
    recorded: int = 0  #: Steps that are recorded before; 0 for none.
    #: Type of the device that each rank of a module runs on, "cpu" or "cuda".
    device: str = "cpu"


class LocalRun(NamedTuple):
    """The results of a run."""

    outputs: dict[str, np.ndarray]  #: Whole outputs of the last request, by name.
    seconds: float  #: Measured, of all requests together, after one request to warm up.
    logs: tuple[RankLog, ...] = ()  #: What each rank recorded; none if nothing was recorded.


def run_job(
    folder: Path,
    ranks: int,
    job: Mapping[str, Any],
    watch: Callable[[], object] | None = None,
) -> None:
    """Run a job of `partitioner.backends.worker` in its own folder, with a process a rank.

    Args:
        job: Has the name of its "runner", arguments of its `run_files` and, unless ranks run on
            the processor, the type of their "device".
        watch: Called now and then while the job runs, and once when it is over.

    Raises:
        BackendError: A rank raised or was killed. No process is left, also on any other exception.
        MissingRuntimeError: PyTorch, by which ranks send to each other, is not installed.
    """
    _prepare(folder, ranks, job)
    _run(folder, threads_per_rank(ranks), watch)


def _prepare(folder: Path, ranks: int, job: Mapping[str, Any]) -> None:
    """Check that a job can be run, and write it into its folder."""
    import resource  # Windows has none

    check_installed("torch")
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_A_PEER * ranks
    if allowed != resource.RLIM_INFINITY and allowed < needed:  # some would wait for ever
        raise BackendError(
            f"{ranks} ranks need some {needed} open files each, and {allowed} are allowed: raise "
            "the limit with `ulimit -n`"
        )
    job = {**job, "ranks": ranks, "threads": threads_per_rank(ranks)}
    (folder / "job.json").write_text(json.dumps(job))


@contextlib.contextmanager
def serving_job(folder: Path, ranks: int, job: Mapping[str, Any]) -> Iterator[Serving]:
    """Start a job whose ranks answer what they are sent, until the context ends.

    Args:
        job: As of `run_job`. Each rank connects to the socket `SOCKET` in the job's folder.

    Raises:
        BackendError: It cannot be started. No process is left after the context.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(str(folder / SOCKET))
        except OSError as error:  # the system has at most some 100 characters for it
            where = folder / SOCKET
            raise BackendError(f"{where}: {error}; set TMPDIR to another folder") from None
        listener.listen(ranks)
        _prepare(folder, ranks, {**job, "answers": True})
        process = stack.enter_context(_worker(folder, threads_per_rank(ranks)))
        serving = Serving(folder, process, {})
        serving.meet(listener, ranks)
        yield serving
        serving.end()


@dataclass
class Serving:
    """The ranks of a job that answer what they are sent."""

    folder: Path
    process: subprocess.Popen[bytes]
    connections: dict[int, Connection]  #: To each rank.

    def meet(self, listener: socket.socket, ranks: int) -> None:
        """Wait until so many ranks have connected, which they do when they are ready."""
        listener.settimeout(_WATCH_S)
        while len(self.connections) < ranks:
            try:
                connection = Connection(listener.accept()[0].detach())
                self.connections[int(connection.recv_bytes())] = connection
            except TimeoutError:
                if self.process.poll() is not None:
                    self._raise()
            except (EOFError, OSError):
                self._raise()

    def ask(self, requests: Mapping[int, Arrays]) -> dict[int, list[dict[str, np.ndarray]]]:
        """Send ranks the arrays of requests, and wait for all that they answer.

        Raises:
            BackendError: A rank raised or was killed; the job has ended.
        """
        try:
            self._send(requests)
            return {rank: self._answer(rank) for rank in requests}
        except (EOFError, OSError):
            self._raise()

    def _raise(self) -> NoReturn:
        """Raise the error of a rank that is gone, once the others have followed it."""
        self.process.wait()
        raise _failure(self.folder, self.process.returncode) from None

    def _send(self, requests: Mapping[int, Arrays]) -> None:
        """Send ranks their arrays; many bytes in a thread, since a stopped rank reads none."""

        def send() -> None:
            for rank, arrays in requests.items():
                send_arrays(self.connections[rank], arrays)

        arrays = (array for some in requests.values() for one in some for array in one.values())
        if sum(array.nbytes for array in arrays) <= _BUFFERED:
            send()
            return
        sent = Future[None]()

        def tell() -> None:
            try:
                send()
            except Exception as error:  # noqa: BLE001 - raised by the thread that waits
                sent.set_exception(error)
            else:
                sent.set_result(None)

        threading.Thread(target=tell, daemon=True).start()  # it ends with the ranks
        self._watched(lambda: bool(wait([sent], LOOK_S).done))
        sent.result()

    def _answer(self, rank: int) -> list[dict[str, np.ndarray]]:
        self._watched(lambda: self.connections[rank].poll(LOOK_S))
        return receive_arrays(self.connections[rank])

    def _watched(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is done, and name ranks that do not run meanwhile."""
        lookout = None
        while not is_done():
            lookout = lookout or lookout_of(self.folder)
            if lookout is not None:
                lookout.look()

    def end(self) -> None:
        """Let the ranks end, which they do when nobody can ask them any more."""
        for connection in self.connections.values():
            connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a rank that was stopped is killed
            self.process.wait(_END_S)


def threads_per_rank(ranks: int) -> int:
    """Cores of this machine that each of its ranks may use."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _run(folder: Path, threads: int, watch: Callable[[], object] | None) -> None:
    lookout, looked_s = None, time.monotonic()
    with _worker(folder, threads) as process:
        while True:
            try:
                code = process.wait(LOOK_S if watch is None else _WATCH_S)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() >= looked_s + LOOK_S:
                    looked_s, lookout = time.monotonic(), lookout or lookout_of(folder)
                    if lookout is not None:
                        lookout.look()
            finally:
                if watch is not None:
                    watch()
    if code:
        raise _failure(folder, code)


def _failure(folder: Path, code: int) -> BackendError:
    failure = folder / "failure.txt"
    if failure.is_file():
        return BackendError(failure.read_text())
    log = folder / "log.txt"
    if not log.is_file():  # somebody cleared the system's folder of temporary files
        return BackendError(f"ranks ended, and what they said is lost: {folder} was removed")
    lines = log.read_text(errors="replace").strip().splitlines()
    last_line = f": {lines[-1]}" if lines else ""
    return BackendError(f"the process that watches the ranks ended with code {code}{last_line}")


@contextlib.contextmanager
def _worker(folder: Path, threads: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process that forks the ranks, in a process group of its own, killed at the end."""
    command = [sys.executable, "-m", "partitioner.backends.worker", str(folder)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        # `-m` alone puts the current folder first on the path, and that may be a stranger's.
        "PYTHONSAFEPATH": "1",
    }
    home = str(Path(__file__).parents[2])
    if home not in (*site.getsitepackages(), site.getusersitepackages()):  # a clone
        paths = (os.environ.get("PYTHONPATH"), home)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 (our own module)
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def save_log(folder: Path, rank: int, log: RankLog) -> None:
    """Leave what a rank recorded in the folder of its job."""
    (folder / _LOG.format(rank)).write_text(json.dumps(asdict(log)))


def load_logs(folder: Path, ranks: int) -> tuple[RankLog, ...]:
    """The records of the ranks of a job; none if they recorded nothing."""
    files = [folder / _LOG.format(rank) for rank in range(ranks)]
    return tuple(RankLog.load(file) for file in files if file.is_file())
