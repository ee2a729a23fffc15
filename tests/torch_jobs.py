"""Runs a script of jobs (see backends/torch_ranks.py) as a process and reads what it prints."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_jobs(script: str, limit_s: float = 100, *, slow: bool = False) -> None:
    """All jobs of a script, or all slow ones, must print "ok"; nothing is left running."""
    path = ROOT / "tests/backends" / script
    kind = "Slow" if slow else "Job"
    pattern = rf'^    "(\w+)": {kind}\('
    names = re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    process = subprocess.Popen(
        [sys.executable, path, *names],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
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
