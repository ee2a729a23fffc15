"""Steps of micro-batches on ranks of a gloo group, against one process."""

import pytest

from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.stages.pipeline_jobs import JOBS


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_in_stages(run_job: RunJob, job: str) -> None:
    run_job("stages/pipeline_jobs.py", job)
