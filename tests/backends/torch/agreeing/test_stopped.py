"""Ranks of a module name one that is stopped, and go on when it does."""

import pytest
from stopped_jobs import JOBS
from torch_jobs import RunJob, job_parameters


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_a_stopped_rank_is_named(job: str, run_job: RunJob) -> None:
    run_job("stopped_jobs.py", job)
