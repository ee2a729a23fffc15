"""Jobs of the scripts in tests/jobs as tests: a script's process runs the jobs asked of it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import pytest

ROOT = Path(__file__).parents[3]


class RunJob(Protocol):
    def __call__(self, script: str, job: str) -> None:
        """Run a job of a script, and fail if it does."""


def job_parameters(jobs: Mapping[str, Any]) -> list[Any]:
    """The names of jobs (`torch_ranks.Job`) as parameters of a test, with their marks."""
    return [
        pytest.param(
            name,
            marks=[
                pytest.mark.timeout(job.limit_s + 150),
                *([pytest.mark.slow] if job.slow else []),
                *([pytest.mark.sweep] if job.sweep else []),
            ],
        )
        for name, job in jobs.items()
    ]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """torchrun's environment of a rank that is alone on its host."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_script(
    folder: Path, *arguments: str, limit_s: float = 250, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments in a folder, such as torchrun as a module, and fail if it does."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            process.communicate()
    assert process.returncode == 0, out + err[-4000:]
    return subprocess.CompletedProcess(process.args, 0, out, err)


@contextmanager
def job_scripts(popen: Callable[..., Any]) -> Iterator[RunJob]:
    """Runs jobs; a script is started by `popen` when the first of its jobs is to run."""
    scripts: dict[str, _Script] = {}

    def run(script: str, job: str) -> None:
        process = scripts.pop(script, None) or _Script(script, errors, popen)
        try:
            problem = process.answer(job)
        except BaseException:  # such as the end of the test's time: the next line is not awaited
            process.kill()
            raise
        scripts[script] = process
        assert not problem, problem

    with tempfile.TemporaryFile("w+") as errors:
        try:
            yield run
            for process in scripts.values():
                process.end()
        finally:
            for process in scripts.values():
                process.kill()


class _Script:
    """A running script of jobs."""

    def __init__(self, script: str, errors: TextIO, popen: Callable[..., Any]) -> None:
        self.errors = errors
        self.process = popen(
            [sys.executable, ROOT / "tests/jobs" / script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            },
            start_new_session=True,
        )

    def answer(self, job: str) -> str:
        """What is wrong with a job, "" for nothing; the script must print nothing else."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(job, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        try:
            name, problem = json.loads(line)
        except ValueError:
            self.errors.seek(0)
            pytest.fail(f"printed {line!r}\n{self.errors.read()[-2000:]}")
        assert name == job
        return str(problem)

    def end(self) -> None:
        """Let the script end, well and without another word."""
        rest, _ = self.process.communicate(timeout=60)
        assert (self.process.returncode, rest) == (0, "")

    def kill(self) -> None:
        """Leave nothing of it running."""
        with self.process:  # closes the pipes and waits
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
