"""Numbers drawn into and read of DTensors of some ranks: a job of module_jobs.py."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn import init

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensor_operators import correct_operators

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
    lambda w: torch.multinomial(w, 2),
    lambda w: torch.multinomial(w.T, 3, replacement=True),
    lambda w: F.rrelu(w - 0.5, training=True),
)


def _fills(w: Tensor) -> None:
    w[:, 1] = 7.0


def _fills_rows(w: Tensor) -> None:
    w[3] = 7.0


def _sets_a_row(w: Tensor) -> None:
    w[3] = torch.arange(3.0)


#: Writes along a cut dim, which PyTorch would make into a copy.
LOST: tuple[Callable[[Tensor], object], ...] = (
    _fills_rows,
    _sets_a_row,
    lambda w: w[1:4].zero_(),
    lambda w: w[3].fill_(1),
    lambda w: w[3].normal_(),
    lambda w: w[3].mul_(2),
    lambda w: operator.imul(w[3], 2),
    lambda w: w.data[0].mul_(0.5),
    lambda w: w[1:4].clamp_(max=0.1),
    lambda w: w[2:5][1].add_(1),
    lambda w: w[1:4].T.mul_(2),
    lambda w: w[1:4].detach().mul_(2),
    lambda w: w.T[:, 3].mul_(2),
    lambda w: w.narrow(0, 1, 2).add_(1),
    lambda w: w.split(2)[1].mul_(3),
    lambda w: w.diagonal().mul_(2),
    lambda w: torch._foreach_mul_([w[2]], 2.0),
    lambda w: w.unbind(0)[2].mul_(3),
    lambda w: torch.add(torch.ones(3), 1.0, out=w[4]),
)


#: Writes that give each rank its part of what they write into a whole tensor.
WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda w: w.copy_(torch.arange(15.0).reshape(5, 3)),
    lambda w: w.copy_(torch.arange(15).reshape(3, 5).T),
    lambda w: w.copy_(torch.arange(3.0)),
    lambda w: w.T.copy_(torch.arange(5.0)),
    init.eye_,
    init.orthogonal_,
    lambda w: operator.setitem(w, torch.tensor([1, 3]), 0.0),
    lambda w: operator.setitem(w, w > 0.5, 0.0),
    lambda w: w.clone()[3].requires_grad_(),
    lambda w: w[3].clone().mul_(2),  # a tensor of its own
    _fills,
)


def writes_of_whole_tensors(rank: int) -> None:
    """Five rows and three columns on three ranks, and rows on two of them."""
    correct_operators()
    for ranks, dim in (([0, 1, 2], 0), ([0, 1, 2], 1), ([0, 1], 0)):
        mesh = DeviceMesh("cpu", ranks)
        for write in WRITES:
            if dim == 1 and write is _fills:
                continue
            whole = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
            weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
            if rank not in ranks:
                with torch.no_grad():
                    weight.copy_(whole)
                continue
            for one in (weight, whole):
                torch.manual_seed(3)
                with torch.no_grad():
                    write(one)
            torch.testing.assert_close(weight.full_tensor(), whole)
        if rank in ranks and dim == 0:
            for write in LOST:
                with torch.no_grad(), pytest.raises(BackendError, match=r"to where it is cut: cha"):
                    write(weight)
            torch.testing.assert_close(weight.full_tensor(), whole)
            _reads_rows(weight, whole)


def _reads_rows(weight: nn.Parameter, whole: Tensor) -> None:
    """Rows and slices of a parameter are read, with gradients, as those of the whole tensor."""
    losses = []
    for one in (weight, whole.requires_grad_()):
        row, some = one[3], one[1:4]
        losses.append((row * 2).sum() + some.T.square().sum() + one[:, 1].exp().sum())
        losses[-1].backward()
    assert isinstance(weight.grad, DTensor)
    torch.testing.assert_close(weight.grad.full_tensor(), whole.grad)
    own = copy.deepcopy(weight.detach()[1:4]).mul_(2)
    torch.testing.assert_close(own.full_tensor(), whole.detach()[1:4] * 2)
    assert isinstance(losses[0], DTensor)
    torch.testing.assert_close(losses[0].full_tensor(), losses[1])


def of_whole_tensors(rank: int) -> None:
    """Five rows on two of three ranks."""
    correct_operators()
    mesh = DeviceMesh("cpu", [0, 1])
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
    with pytest.raises(RuntimeError, match="require placement changes are not supported"):
        weight.sum(0).normal_()
    assert weight.norm().item() == pytest.approx(whole.norm().item())
