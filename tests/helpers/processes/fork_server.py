"""Processes of the tests that begin with everything imported: forks of one that imports it once.

Most of the time of a small run on ranks is the import of PyTorch and of what compiles and runs
modules. So a server imports it, and a process that is asked of it, by the command of a Python
module or script, is a fork of it which runs that in a session of its own.

`ForkServer.popen` stands for `subprocess.Popen`, of which it takes what the tests give.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

#: The folder of the tests, in which `helpers` is found.
TESTS = str(Path(__file__).parents[2])
#: What the server imports; a part of it by name is imported late by those who use it.
IMPORTED = (
    "partitioner.backends.process_group",
    "partitioner.backends.onnx.rank",
    "partitioner.backends.torch.local",
    "partitioner.backends.torch.running.rank_module",
    "partitioner.api.compiler",
    "partitioner.api.compiled.module",
    "torch._dynamo",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.tensor",
    "torch.profiler",
    "torch.testing",
    "highspy",
    "pytest",
)
#: Seconds between two looks at forks that run.
_LOOK_S = 0.01
_CODE_BYTES = 8


class ForkServer:
    """A server, which is started with the first process that is asked of it."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int | IO[Any],
        stderr: int | IO[Any],
        text: bool = False,
        start_new_session: bool = True,
    ) -> Forked:
        """Start ``python -m MODULE ...`` or ``python SCRIPT ...``; `stdin` is a pipe."""
        assert start_new_session
        assert stdin == subprocess.PIPE
        python, *words = map(str, command)
        assert python == sys.executable
        read, write = os.pipe()
        theirs, opened = [read], [write]
        for stream in (stdout, stderr):
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                theirs.append(write)
                opened.append(read)
            else:
                assert not isinstance(stream, int)
                theirs.append(os.dup(stream.fileno()))
        own, status = socket.socketpair()
        request = json.dumps({"words": words, "env": dict(env), "cwd": str(Path.cwd())}).encode()
        control = self._started()
        with status:
            socket.send_fds(
                control, [len(request).to_bytes(_CODE_BYTES)], [*theirs, status.fileno()]
            )
            control.sendall(request)
        for fd in theirs:
            os.close(fd)
        files = [
            os.fdopen(fd, mode + ("" if text else "b"))
            for fd, mode in zip(opened, ("w", "r"), strict=False)
        ]
        return Forked(own, files[0], files[1] if len(files) > 1 else None)

    def _started(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            inherited = os.environ.get("PYTHONPATH")
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", "helpers.processes.fork_server", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(filter(None, (TESTS, inherited))),
                        "OMP_NUM_THREADS": "1",
                        "OPENBLAS_NUM_THREADS": "1",
                    },
                )
        return self._control

    def end(self) -> None:
        """End the server, if it was started."""
        if self._control is not None and self._server is not None:
            self._control.close()
            self._server.wait(60)


class Forked:
    """A fork of the server, as `subprocess.Popen` has it."""

    def __init__(self, status: socket.socket, stdin: IO[Any], stdout: IO[Any] | None) -> None:
        self.stdin, self.stdout, self._status = stdin, stdout, status
        self.returncode: int | None = None
        self.pid = self._received()

    def _received(self) -> int:
        data = self._status.recv(_CODE_BYTES, socket.MSG_WAITALL)
        assert len(data) == _CODE_BYTES, "the fork server has ended"
        return int.from_bytes(data, signed=True)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as soon as it has ended.

        Raises:
            TimeoutExpired: It runs on.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            with self._status:  # nothing else comes
                self.returncode = self._received()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[Any, None]:
        """Close its input, and read what it prints until it ends."""
        self.stdin.close()
        self.wait(timeout)
        return self.stdout and self.stdout.read(), None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdin, self.stdout):
            if file is not None:
                file.close()
        self.wait()


def serve(control: socket.socket) -> None:
    """Fork for each request, until the other side closes the connection."""
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    from helpers.plans import search_clock

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # as this does
    search_clock.count_computed_seconds()
    gc.collect()
    gc.freeze()  # forks neither go through what was there before them nor copy its pages
    forks: dict[int, socket.socket] = {}
    while True:
        if select.select([control], [], [], _LOOK_S if forks else None)[0]:
            size, fds, _, _ = socket.recv_fds(control, _CODE_BYTES, 4)
            if not size:
                return
            length = int.from_bytes(size)
            request = json.loads(control.recv(length, socket.MSG_WAITALL))
            *streams, status = fds
            connection = socket.socket(fileno=status)
            pid = _fork(request, streams, [control, connection, *forks.values()])
            connection.sendall(pid.to_bytes(_CODE_BYTES, signed=True))
            forks[pid] = connection
        while forks:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended = os.waitstatus_to_exitcode(code)
            with forks.pop(pid) as connection, suppress(BrokenPipeError):  # nobody may wait for it
                connection.sendall(ended.to_bytes(_CODE_BYTES, signed=True))


def _fork(
    request: Mapping[str, Any], streams: Sequence[int], connections: Sequence[socket.socket]
) -> int:
    """Fork; the child is in a session of its own when this returns."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        os.read(ready, 1)
        for fd in (ready, *streams):
            os.close(fd)
        return pid
    code = 1
    try:
        os.setsid()
        os.close(ready)
        os.close(tell)
        for connection in connections:
            connection.close()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        code = _run(request["words"])
    except BaseException:  # noqa: BLE001 (whatever it is, it is printed)
        traceback.print_exc()
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(words: Sequence[str]) -> int:
    """Run a module or a script as Python's command line does; its exit code."""
    sys.path[0] = str(Path.cwd() if words[0] == "-m" else Path(words[0]).parent)
    added = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in added if path not in sys.path]
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
