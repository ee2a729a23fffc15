"""Habits of training loops on ranks: the same weights as on one process, or a refusal by name."""

import pytest
from habits import JOBS
from torch_jobs import RunJob, job_parameters


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_habits_of_training(run_job: RunJob, job: str) -> None:
    run_job("habits.py", job)
