"""Ranks of a module name one that is stopped, and go on when it does."""

import pytest

from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.processes.stopped_jobs import JOBS


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_a_stopped_rank_is_named(job: str, run_job: RunJob) -> None:
    run_job("processes/stopped_jobs.py", job)
