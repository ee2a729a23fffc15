"""Compiled modules on ranks: training, evaluation, checkpoints, faults (jobs: module_jobs.py)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from restarted import STEPS, compiled
from torch_jobs import ROOT, run_jobs
from trained import Mlp

JOBS = re.findall(
    r'^    "(\w+)": Job\(',
    (ROOT / "tests/backends/module_jobs.py").read_text(encoding="utf-8"),
    re.MULTILINE,
)
pytestmark = pytest.mark.timeout(300)


def test_modules_on_ranks() -> None:
    run_jobs("module_jobs.py", JOBS, limit_s=280)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_graphs_give_the_same_results() -> None:
    run_jobs("module_jobs.py", ["compiled"], limit_s=580)


@pytest.mark.slow
def test_torchrun_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "2"]
    command += [str(ROOT / "tests/restarted.py"), str(tmp_path)]
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lives = [line for line in done.stdout.splitlines() if line.startswith("life")]
    assert lives == [f"life {life} starts at step {at}" for life, at in ((0, 0), (1, 2), (2, 4))]
    assert "ValueError: rank 1 has had enough" in done.stderr
    assert "rank 1: waiting for the other ranks before training step 4" in done.stderr
    torch.manual_seed(0)
    whole = Mlp(dropout=0.3).double()
    one = compiled(whole)
    update = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    names = dict(whole.named_parameters())
    for step in range(STEPS):
        for name, gradient in one.gradients(*Mlp.batch(step), seed=step)[1].items():
            names[name].grad = gradient
        update.step()
    found = torch.load(tmp_path / "weights.pt")
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach())
