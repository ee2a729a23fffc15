"""Rare and random modules trained for some steps: as in one process, or refused by a known line."""

import pytest

from helpers.drawn.drawn_training import FURTHER, outcome, refused
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.kinds.drawn_jobs import JOBS


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_train_as_one_process(run_job: RunJob, job: str) -> None:
    run_job("kinds/drawn_jobs.py", job)


@pytest.mark.parametrize(
    ("first", "count", "least"),
    [
        pytest.param(0, 8, 8, marks=pytest.mark.slow),
        pytest.param(60, 1, 1, marks=pytest.mark.slow),  # a weight norm of a gradient by columns
        pytest.param(8, 96, 90, marks=pytest.mark.sweep),
        pytest.param(104, 96, 90, marks=pytest.mark.sweep),
        pytest.param(FURTHER, 8, 7, marks=pytest.mark.slow),  # experts, micro-batches
        pytest.param(FURTHER + 8, 92, 80, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_modules_in_training(first: int, count: int, least: int) -> None:
    equal = 0
    for seed in range(first, first + count):
        said = outcome(seed)
        kind, _, text = said.partition(": ")
        assert said == "equal" or (kind == "refused" and refused(text)), (seed, said)
        equal += said == "equal"
    assert equal >= least
