"""Process groups of programs."""

import pytest
import torch
from torch import nn

import partitioner
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing.groups import check_groups, group_ranks


def test_a_copy_makes_no_groups_by_itself() -> None:
    """All ranks make a group together, and those of other copies are not called."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).eval(), torch.randn(8, 16)
    made = partitioner.compile(model, x, 2, strategy="copies").programs
    shared = partitioner.compile(model, x, 2, parallel="tp", time_limit_s=5).programs
    assert group_ranks(made) == []
    assert group_ranks(shared) == [(0, 1)]
    check_groups(shared, shared)
    with pytest.raises(
        BackendError, match=r"call of these sizes communicates among ranks \(0, 1\)"
    ):
        check_groups(shared, made)
