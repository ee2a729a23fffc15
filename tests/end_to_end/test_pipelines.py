"""Pipelines on gloo ranks train as one process that accumulates gradients."""

import pytest
from pipeline_model_jobs import JOBS
from torch_jobs import RunJob, job_parameters


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ten_steps_are_those_of_one_process(run_job: RunJob, job: str) -> None:
    run_job("pipeline_model_jobs.py", job)
