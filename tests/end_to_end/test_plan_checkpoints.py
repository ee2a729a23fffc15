"""Checkpoints between plans: six plans on 2, 3 and 4 ranks save, and each loads all six."""

import pytest

from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.modules.plan_checkpoints import JOBS


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_each_plan_continues_from_each(run_job: RunJob, job: str) -> None:
    run_job("modules/plan_checkpoints.py", job)
