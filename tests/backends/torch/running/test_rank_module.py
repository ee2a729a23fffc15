"""Compiled modules on ranks: training, evaluation, checkpoints, faults."""

import pytest
from module_jobs import JOBS
from torch_jobs import RunJob, job_parameters


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_modules_on_ranks(run_job: RunJob, job: str) -> None:
    run_job("module_jobs.py", job)
