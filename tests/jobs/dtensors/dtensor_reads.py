"""What is computed of DTensors of some ranks and plain tensors: jobs of module_jobs.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F  # noqa: N812 - the usual name

from partitioner.backends.torch.dtensors.dispatch import correct_operators

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
    # terms of norms, and of several kinds
    lambda w: w.norm(dim=0).sum() + w.norm(dim=1).sum(),
    lambda w: w.norm(3, dim=0)[1:].sum() + w.norm(3, dim=1)[1:].sum(0),
    lambda w: torch.cat([w.norm(dim=0), w.norm(dim=1)]).sum(),
    lambda w: torch.stack([w.sum(0), w.amax(0), w.norm(dim=0), w.prod(0)]),
    lambda w: torch.cat([w.sum(1), w.amax(1), w.norm(dim=1), w.prod(1)]),
    lambda w: w.sum(0) * (w > 0.3).any(0) + (w > 0.2).all(0) * w.mean(0),
    lambda w: w.sum(0) * ((0 + (w > 0.3).sum(0)) + (w > 0.1).sum(0)),
    lambda w: w.sum(1) * (w > 0.3).any(1).to(w.dtype) * 2,
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
    with pytest.raises(RuntimeError, match=r"aten\.triu_"):
        theirs.triu_()
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        theirs.copy_(PLAIN)
    assert type(theirs[1]) is DTensor
    theirs.detach()[1].mul_(2.0)
    torch.manual_seed(3)
    drawn = theirs.clone().uniform_().to_local()
    torch.manual_seed(3)
    torch.testing.assert_close(drawn, torch.empty(drawn.shape).uniform_())
    with implicit_replication():
        torch.testing.assert_close((theirs + PLAIN).full_tensor(), 2 * whole + PLAIN)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        theirs - PLAIN
    ours = distribute_tensor(whole, mesh, [Shard(0)])
    torch.testing.assert_close((ours - PLAIN).full_tensor(), whole - PLAIN)
    for write in PLAIN_WRITES:
        torch.testing.assert_close(write(ours), write(whole))
