"""Numbers drawn into and read of DTensors of some ranks: a job of module_jobs.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn import init
from torch_ranks import Job

import partitioner
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensor_operators import correct_operators
from partitioner.compiled.module import ModuleProgram

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
    lambda w: w[torch.randperm(5)],
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


def _fills_chosen_rows(w: Tensor) -> None:
    w[[3, 0]] = torch.arange(6.0).reshape(2, 3)


def _fills_positives(w: Tensor) -> None:
    w[w > 0.5] = 0.0


def _adds_to_a_row(w: Tensor) -> None:
    w[3] += 1.0


def _scales_data(w: Tensor) -> None:
    w.data[0] *= 0.5


#: Writes to views along rows, which PyTorch makes into copies where rows are cut.
ROWS: tuple[Callable[[Tensor], object], ...] = (
    _fills_rows,
    _sets_a_row,
    _adds_to_a_row,
    _scales_data,
    lambda w: w[1:4].zero_(),
    lambda w: w[3].fill_(1),
    lambda w: w[3].normal_(),
    lambda w: w[2].clamp_(0, 0.1),
    lambda w: w[1:4][0].mul_(2),
    lambda w: w[1:4].data.mul_(2),
    lambda w: w.detach()[2:4].T.mul_(2),
    lambda w: w[3:4].squeeze(0).unsqueeze(1).mul_(2),
    lambda w: w[::2].masked_fill_(w[::2] > 0, 0.0),
    lambda w: w[1:3].index_put_((torch.tensor([0]),), torch.tensor(3.0)),
    lambda w: w[0:2].copy_(w[2:4]),
    lambda w: w.T[:, 1].zero_(),
    lambda w: w.select(0, 1).copy_(torch.ones(3)),
    lambda w: w.chunk(2)[0].zero_(),
    lambda w: w.split([2, 3])[1].mul_(2),
    lambda w: w.unbind()[1].mul_(2),
    lambda w: w.diagonal().fill_(0),
    lambda w: w[3].contiguous().mul_(2),
    lambda w: torch._foreach_mul_([w[3], w[1]], 2.0),
    lambda w: torch.mul(w[3], 2, out=w[3]),
    lambda w: w.reshape(3, 5).mul_(2),
    lambda w: w.view(-1)[5].fill_(0),
)


#: The same, and others, for matrices of all sizes.
SLICES: tuple[Callable[[Tensor], object], ...] = (
    *(_fills, _fills_rows, _adds_to_a_row, _scales_data, _fills_positives),
    lambda w: w[1:4].zero_(),
    lambda w: w[:, 2].clamp_(0, 0.1),
    lambda w: w.T[3].uniform_(),
    lambda w: w.chunk(2)[1].mul_(2),
    lambda w: w.chunk(2, 1)[1].mul_(2),
    lambda w: w.diagonal().fill_(0),
    lambda w: torch._foreach_mul_([w[3], w[:, 1]], 2.0),
    lambda w: w.view(-1)[5].fill_(0),
    lambda w: w.masked_fill_(w > 0, 0.0),
    lambda w: w.unbind(1)[1].mul_(2),
    lambda w: w.mul_(torch.linspace(-1, 1, w.numel()).reshape(w.shape)),
    lambda w: w.add_(torch.arange(float(w.shape[1]))),
    lambda w: w.triu_(),
    lambda w: w.random_(10),
    lambda w: torch._foreach_copy_([w], [torch.ones(w.shape)]),
)
#: What is read of views along rows.
READS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w[3] * w[1:3].sum(),
    lambda w: w.diagonal().exp(),
    lambda w: torch.cat([one.square() for one in w.chunk(2)]),
    lambda w: w.view(-1) * 2,
    lambda w: w.reshape(3, 5).sum(0),
    lambda w: sum(one.sum() for one in w.unbind()),
    lambda w: w[1:3] @ w.T,
    lambda w: w[3].clone().mul_(2),
    lambda w: torch.zeros_like(w[3]).add_(w[3]),
    lambda w: w * w[3],
)


#: A plain tensor, of which all ranks have the whole.
PLAIN = torch.rand(5, 3, generator=torch.Generator().manual_seed(9)) - 0.5
#: Results of a tensor in parts and a plain one, and of operators that PyTorch has no rule for.
RESULTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w * PLAIN + PLAIN,
    lambda w: PLAIN - w.T.T,
    lambda w: w @ PLAIN.T,
    lambda w: F.linear(PLAIN, w),
    lambda w: torch.where(PLAIN > 0, w, 0.0),
    lambda w: torch.cat([w, PLAIN]),
    lambda w: w.take(torch.tensor([1, 14])),
    lambda w: w.gather(0, torch.tensor([[1, 2, 0]])),
    lambda w: w.unfold(0, 2, 1) * 2,
    lambda w: w[w > 0.4].square(),
    lambda w: w.renorm(2, 0, 0.5),
    lambda w: F.mse_loss(w, PLAIN),
    lambda w: F.mse_loss(w, PLAIN, reduction="sum"),
    lambda w: F.mse_loss(w, PLAIN, reduction="none"),
    lambda w: F.smooth_l1_loss(w, w.detach() + PLAIN),
    lambda w: F.huber_loss(w, PLAIN),
    lambda w: F.binary_cross_entropy_with_logits(w, PLAIN.sigmoid()),
    lambda w: F.binary_cross_entropy(w.sigmoid(), PLAIN.sigmoid()),
    lambda w: F.soft_margin_loss(w, PLAIN.sign()),
    lambda w: F.cross_entropy(w, torch.tensor([0, 1, 2, 1, 0])),
    lambda w: w.mean(),
    lambda w: w.var(0),
    lambda w: w.amin(),
    lambda w: w.norm(torch.inf),
    lambda w: w.sum((), keepdim=True),
    lambda w: F.embedding(torch.tensor([1, 4, 1]), w),
    lambda w: w.gather(1, torch.tensor([[0], [2], [1], [2], [0]])),
    lambda w: F.conv1d(PLAIN[None].mT, w[:, :, None]),
    lambda w: F.cosine_embedding_loss(w, PLAIN, torch.ones(5)),
)
#: Plain tensors that are written to.
PLAIN_WRITES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: torch.ones(5, 3).lerp_(w, 0.1),
    lambda w: torch.ones(5, 3).copy_(w),
    lambda w: torch.ones(3).add_(w.sum(0)),  # its parts are terms
    lambda w: torch.ones(3).mul_(w[3]),
    lambda w: _adds_to_each([torch.ones(3), torch.ones(5)], [w.sum(0), w.sum(1)]),
    lambda w: torch.mul(w, PLAIN, out=torch.empty(5, 3)),
    lambda w: torch.mean(w, 0, out=torch.empty(3)),
    lambda w: torch.ones(3, 3).addmm_(PLAIN.T, w),
    lambda w: torch.ones(5, 3).masked_fill_(w > 0.3, 7.0),
)


def _adds_to_each(ones: list[Tensor], others: list[Tensor]) -> Tensor:
    torch._foreach_add_(ones, others)
    return torch.cat(ones)


#: Writes that give each rank its part of what they write into a whole tensor.
WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda w: w.copy_(torch.arange(15.0).reshape(5, 3)),
    lambda w: w.copy_(torch.arange(15).reshape(3, 5).T),
    lambda w: w.copy_(torch.arange(3.0)),
    lambda w: w.T.copy_(torch.arange(5.0)),
    init.eye_,
    init.orthogonal_,
    _fills,
    _fills_chosen_rows,
    _fills_positives,
    lambda w: w.add_(PLAIN),
    lambda w: w.mul_(PLAIN[0]),
    lambda w: w.T.div_(PLAIN.T),
    lambda w: w.data.sub_(PLAIN[:, :1]),
    lambda w: w.lerp_(PLAIN, 0.3),
    lambda w: w.masked_fill_(PLAIN > 0, 2.0),
    lambda w: w.index_add_(0, torch.tensor([1]), torch.ones(1, 3)),
    lambda w: w.scatter_(0, torch.tensor([[1, 2, 0]]), 1.0),
    lambda w: w.put_(torch.tensor([1]), torch.tensor([2.0])),
    lambda w: w.triu_(),
    lambda w: w.tril_(-1),
    lambda w: w.renorm_(2, 0, 0.5),
    lambda w: w.random_(10),
    lambda w: torch._foreach_copy_([w], [PLAIN]),
    lambda w: torch._foreach_copy_([w, w.T], [w * 2, PLAIN.T]),
    lambda w: torch._foreach_mul_([w, w.T], [PLAIN, PLAIN.T]),
    lambda w: torch.mul(w, PLAIN, out=w),
)


def writes_of_whole_tensors(rank: int) -> None:
    """Five rows and three columns on three ranks, and rows on two of them."""
    for ranks, dim in (([0, 1, 2], 0), ([0, 1, 2], 1), ([0, 1], 0)):
        mesh = DeviceMesh("cpu", ranks)
        correct_operators([mesh])
        for write in WRITES:
            if dim == 1 and write is _fills:
                continue
            whole = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
            weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
            if rank not in ranks:
                with torch.no_grad():
                    weight.copy_(whole)
                    weight[3] = 0.0
                    weight[[0, 2]] = 0.0
                    weight.mul_(PLAIN).triu_()
                assert weight.view(-1).shape == (15,)
                assert torch.poisson(weight).shape == (5, 3)
                with pytest.raises(BackendError, match=r"^rank 2 has no .* compute it on ranks 0"):
                    torch.ones(5, 3).lerp_(weight.detach(), 0.1)
                assert weight.unfold(0, 3, 1).shape == (3, 3, 3)
                continue
            for one in (weight, whole):
                torch.manual_seed(3)
                with torch.no_grad():
                    write(one)
            torch.testing.assert_close(weight.full_tensor(), whole)
        if rank in ranks:
            refused = [is_refused(write, weight, whole) for write in ROWS]
            assert all(refused) if dim == 0 else not any(refused[:9])
            reads(weight, whole.requires_grad_())


def leaves_other_tensors_alone(_: int) -> None:
    """Those of the user's own meshes, which were there before, are as in PyTorch."""
    whole = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    users = DeviceMesh("cpu", [0, 1], mesh_dim_names=("mine",))
    theirs = distribute_tensor(whole, users, [Shard(0)])
    theirs.add_(theirs)
    mesh = DeviceMesh("cpu", [0, 1])
    correct_operators([mesh])
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        theirs * PLAIN
    with pytest.raises(NotImplementedError, match=r"aten\.triu_"):
        theirs.triu_()
    with implicit_replication():
        torch.testing.assert_close((theirs + PLAIN).full_tensor(), 2 * whole + PLAIN)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        theirs - PLAIN
    ours = distribute_tensor(whole, mesh, [Shard(0)])
    torch.testing.assert_close((ours - PLAIN).full_tensor(), whole - PLAIN)
    for write in PLAIN_WRITES:
        torch.testing.assert_close(write(ours), write(whole))


def is_refused(write: Callable[[Tensor], object], weight: Tensor, whole: Tensor) -> bool:
    """Whether a write is refused; the weight is as the whole one after it, or as it was."""
    before = whole.detach().clone()
    refused = False
    with torch.no_grad():
        torch.manual_seed(3)
        write(whole)
        torch.manual_seed(3)
        try:
            write(weight)
        except BackendError as error:
            assert re.search(r"^a part of a tensor .* where it is cut: cha", str(error))  # noqa: PT017
            refused = True
            whole.copy_(before)
        ours = weight.full_tensor() if isinstance(weight, DTensor) else weight
    torch.testing.assert_close(ours, whole.detach())
    return refused


def reads(weight: DTensor, whole: Tensor) -> None:
    """Views and other results are those of the whole tensor, and so are their gradients."""
    with torch.no_grad():
        for one in (weight, whole):
            one.copy_(PLAIN.T.reshape(5, 3).abs())
    for write in PLAIN_WRITES:
        torch.testing.assert_close(write(weight.detach()), write(whole.detach()))
    for read in (*READS, *RESULTS):
        results = read(weight), read(whole)
        grads = [
            torch.autograd.grad(r.sum(), w)[0]
            for r, w in zip(results, (weight, whole), strict=True)
        ]
        for ours, theirs in (results, grads):
            torch.testing.assert_close(ours.full_tensor(), theirs)


class Net(nn.Module):
    """Sizes that 2 and 3 ranks cut evenly, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 12), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@cache
def program(parallel: str, ranks: int) -> ModuleProgram:
    torch.manual_seed(0)
    options: dict[str, Any] = {"devices": ranks, "training": True, "cluster": "ideal"}
    compiled = partitioner.compile(Net(), torch.ones(6, 6), parallel=parallel, **options)
    assert isinstance(compiled, ModuleProgram)
    return compiled


def writes_to_parameters(parallel: str, ranks: int, _: int) -> None:
    """A write to a part of a parameter or its gradient is that of one device, or refused."""
    torch.manual_seed(0)
    module, whole = program(parallel, ranks).module(), Net()
    for one in (module, whole):
        one(torch.ones(6, 6)).backward()
    refused = {}
    for (name, ours), theirs in zip(module.named_parameters(), whole.parameters(), strict=True):
        if ours.ndim == 2:
            refused[name] = [
                is_refused(write, *pair)
                for pair in ((ours, theirs), (ours.grad, theirs.grad))
                for write in SLICES
            ]
    assert any(any(one) for one in refused.values()) is (parallel != "dp")
    assert not all(all(one) for one in refused.values())
    losses = [one(torch.ones(6, 6)) for one in (module, whole)]
    torch.testing.assert_close(*losses)


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
    with pytest.raises(RuntimeError, match="require placement changes are not supported"):
        weight.sum(0).normal_()
    assert weight.norm().item() == pytest.approx(whole.norm().item())


#: Jobs by name.
WRITES_TO_PARAMETERS = {
    f"writes_{parallel}_{ranks}": Job(
        ranks, partial(writes_to_parameters, parallel, ranks), [partial(program, parallel, ranks)]
    )
    for parallel in ("zero3", "tp", "dp")
    for ranks in (2, 3)
}
