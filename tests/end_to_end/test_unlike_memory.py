"""Training on devices of unlike memory: parameters lie in parts that fit each."""

import pytest

from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.modules.unlike_memory_jobs import JOBS, program


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_is_trained_in_parts_that_follow_the_memory(ranks: int) -> None:
    compiled = program(ranks)
    needed = compiled.evaluation.needed_bytes
    assert all(
        n <= d.memory_bytes for n, d in zip(needed.values(), compiled.cluster.devices, strict=True)
    )
    assert compiled.verify()


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_train_to_the_same_weights_and_load_checkpoints(run_job: RunJob, job: str) -> None:
    run_job("modules/unlike_memory_jobs.py", job)
