"""`partitioner.Chain`: a model split by hand trains as in one process."""

import pytest

import partitioner
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.by_hand.chain_jobs import JOBS
from partitioner.backends.errors import BackendError


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_chains_on_ranks(run_job: RunJob, job: str) -> None:
    run_job("by_hand/chain_jobs.py", job)


def test_a_chain_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(BackendError, match=r"^Chain: no process group; call torch.distributed"):
        partitioner.Chain()
