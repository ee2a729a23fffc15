"""Runs a script of jobs (jobs/torch_ranks.py) as a process, and reads what it prints."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def job_names(script: str) -> list[str]:
    """Names of a script's jobs, in order."""
    text = (ROOT / "tests/jobs" / script).read_text(encoding="utf-8")
    table = text.partition("\nJOBS = ")[2] or text
    return re.findall(r'^    "(\w+)": (?:lambda: )?[A-Za-z]\w+\(', table, re.MULTILINE)


def run_jobs(script: str, only: Sequence[str] = (), limit_s: float = 280) -> None:
    """All jobs of a script, or some, must print "ok"; nothing is left running."""
    path = ROOT / "tests/jobs" / script
    names = [name for name in job_names(script) if not only or name in only]
    assert names
    assert set(only) <= set(names)
    process = subprocess.Popen(
        [sys.executable, path, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/helpers'}",
        },
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert out.splitlines() == [f"{name}: ok" for name in names], out + err[-2000:]
