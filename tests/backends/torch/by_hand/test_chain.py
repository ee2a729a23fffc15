"""`partitioner.Chain`: a model split by hand trains as in one process (jobs: chain_jobs.py)."""

import pytest
from torch_jobs import run_jobs

import partitioner
from partitioner.backends.errors import BackendError


def test_chains_on_ranks() -> None:
    run_jobs("chain_jobs.py")


def test_a_chain_without_a_process_group_says_what_to_call() -> None:
    with pytest.raises(BackendError, match=r"^Chain: no process group; call torch.distributed"):
        partitioner.Chain()
