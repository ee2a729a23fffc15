"""Habits of training loops on ranks: the same weights as on one process, or a refusal by name."""

import pytest

from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.modules.habits import JOBS


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_habits_of_training(run_job: RunJob, job: str) -> None:
    run_job("modules/habits.py", job)
