"""Compiled modules on ranks: training, evaluation, checkpoints, faults."""

import pytest

from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.modules.module_jobs import JOBS


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_modules_on_ranks(run_job: RunJob, job: str) -> None:
    run_job("modules/module_jobs.py", job)
