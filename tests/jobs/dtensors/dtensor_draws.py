"""Random numbers drawn into DTensors, and numbers read of them: jobs of module_jobs.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F  # noqa: N812 - the usual name

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.dispatch import correct_operators

DRAWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: torch.empty_like(w).exponential_(),
    lambda w: torch.empty_like(w).log_normal_(),
    lambda w: torch.empty_like(w).geometric_(0.3),
    lambda w: torch.empty_like(w).cauchy_(),
    lambda w: torch.empty_like(w).T.uniform_(),
    torch.bernoulli,
    lambda w: torch.native_dropout(w, 0.5, True)[0],
    lambda w: torch.randn_like(w.sum(0)),  # its parts are terms
    lambda w: torch.randint_like(w.sum(0), 10),
    F.dropout,
    F.gumbel_softmax,
    torch.poisson,
    lambda w: torch.normal(w, 1.0),
    lambda w: torch.binomial((w * 9).round(), w),
    lambda w: torch.empty_like(w).random_(),
    lambda w: torch.empty_like(w).random_(3, 10),
    lambda w: torch.empty_like(w).bernoulli_(w),
    lambda w: w.sum(0).normal_(),
    lambda w: w.mean(0).uniform_(),
    lambda w: w[torch.randperm(5)],
    lambda w: torch.multinomial(w, 2),
    lambda w: torch.multinomial(w.T, 3, replacement=True),
    lambda w: F.rrelu(w - 0.5, training=True),
)


def of_whole_tensors(rank: int) -> None:
    """Five rows on two of three ranks."""
    mesh = DeviceMesh("cpu", [0, 1])
    correct_operators([mesh])
    whole = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    if rank == 2:
        with pytest.raises(BackendError, match=r"^rank 2 has no part .*: read it on ranks 0, 1$"):
            weight.norm().item()
        weight.normal_()
        return
    for draw in DRAWS:
        results = []
        for one in (weight, whole):
            torch.manual_seed(3)
            result = draw(one)
            results.append(result.full_tensor() if isinstance(result, DTensor) else result)
            results.append(torch.rand(()))  # what is drawn next
        torch.testing.assert_close(results[:2], results[2:])
    assert weight.norm().item() == pytest.approx(whole.norm().item())
