"""Compiled modules on ranks: training, evaluation, checkpoints, faults (jobs: module_jobs.py)."""

import re

import pytest
from torch_jobs import ROOT, run_jobs

JOBS = re.findall(
    r'^    "(\w+)": Job\(',
    (ROOT / "tests/jobs/module_jobs.py").read_text(encoding="utf-8"),
    re.MULTILINE,
)
pytestmark = pytest.mark.timeout(420)


def test_modules_on_ranks() -> None:
    run_jobs("module_jobs.py", JOBS, limit_s=400)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_graphs_give_the_same_results() -> None:
    run_jobs("module_jobs.py", ["compiled"], limit_s=580)
