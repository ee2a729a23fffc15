"""Whole copies of a module, which are called apart from each other: jobs of module_jobs.py."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partitioner
from partitioner.backends.errors import BackendError


class Layers(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def requests(rank: int, count: int, batch: int = 8) -> list[Tensor]:
    """Requests of one copy, which no other copy gets."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(batch, 16, generator=draw) for _ in range(count)]


@cache
def program(devices: int, per_copy: int = 1) -> partitioner.ModuleProgram:
    torch.manual_seed(0)
    model, memory = Layers().eval(), None
    if per_copy > 1:
        alone = partitioner.compile(model, torch.ones(8, 16), devices=1)
        memory = int(0.75 * alone.evaluation.needed_bytes[0])
    options = {"strategy": "copies", "memory": memory}
    made = partitioner.compile(model, torch.ones(8, 16), devices=devices, **options)
    assert isinstance(made, partitioner.ModuleProgram)
    return made


def serve_apart(rank: int) -> None:
    """Ranks call their copies with other data, as often as they have requests."""
    whole = program(2).whole
    module = program(2).module()
    for x in requests(rank, 1 + 3 * rank):
        torch.testing.assert_close(module(x), whole(x))
    x = requests(rank, 1, batch=4 + rank)[0]  # of other sizes: a graph of this copy alone
    torch.testing.assert_close(module(x), whole(x))
    dist.barrier()


def serve_in_groups(rank: int) -> None:
    """The ranks of a copy agree on its requests, and an idle rank has none."""
    whole = program(5, 2).whole
    module = program(5, 2).module(check_inputs=None)
    copies = program(5, 2).evaluation.copies
    assert copies is not None
    assert copies.devices == ((0, 1), (2, 3))
    if rank == 4:
        with pytest.raises(BackendError, match="rank 4 has no part in the 2 whole copies"):
            module(requests(0, 1)[0])
    else:
        for x in requests(rank // 2, 2 + rank // 2):
            torch.testing.assert_close(module(x), whole(x))
        with pytest.raises(BackendError, match=f"rank {rank | 1} has other data"):
            module(requests(10 + rank, 1)[0])
    dist.barrier()
