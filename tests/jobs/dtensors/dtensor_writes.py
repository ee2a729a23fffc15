"""Writes to DTensors, parameters of ranks' modules and views: jobs of module_jobs.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import init

import partitioner
from jobs.dtensors.dtensor_reads import PLAIN, reads
from jobs.processes.torch_ranks import Job
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.dispatch import correct_operators


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
    partial(init.sparse_, sparsity=0.4),
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


#: Writes that give each rank its part of what they write into a whole tensor.
WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda w: w.copy_(torch.arange(15.0).reshape(5, 3)),
    lambda w: w.copy_(torch.arange(15).reshape(3, 5).T),
    lambda w: w.copy_(torch.arange(3.0)),
    lambda w: w.T.copy_(torch.arange(5.0)),
    init.eye_,
    init.orthogonal_,
    partial(init.sparse_, sparsity=0.4),
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


#: Writes to two tensors, of which each is read for the other.
PAIRS: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda w, q: torch._foreach_add_([w, q], [q, w]),
    lambda w, q: torch._foreach_copy_([w, q], [q, w]),
    lambda w, q: torch._foreach_sub_([w, q], [q, w], alpha=3),
    lambda w, q: torch._foreach_lerp_([w, q], [q, w], 0.25),
    lambda w, q: torch._foreach_addcmul_([w, q], [q, w], [w, q], [2.0, 3.0]),
    lambda w, q: torch._foreach_addcdiv_([w, q], [q, w], [w, q], torch.tensor([2.0, 3.0])),
    lambda w, q: torch._foreach_mul_([w, q, w], [q, w, q]),
    lambda w, q: torch._foreach_maximum_([w.T, q.T], [q.T, w.T]),
    lambda w, q: torch._foreach_add_([w, q.T], [q, w.T]),
    lambda w, q: torch._foreach_add_([w, w, q], [1.0, 2.0, 3.0]),
    lambda w, q: torch._foreach_add_([w, q], [PLAIN, w]),
    lambda w, q: torch._foreach_add_([w, q], [q, w.reshape(-1).reshape(5, 3)]),
)


def writes_in_turn(_: int) -> None:
    """Lists of tensors of all cuts are written to one after the other, as on one device."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    correct_operators([mesh])
    cuts = Shard(0), Shard(1), Replicate()
    for (one, other), write in product(permutations(cuts, 2), PAIRS):
        wholes = [torch.rand(5, 3, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
        parts = [
            distribute_tensor(whole.clone(), mesh, [cut])
            for whole, cut in zip(wholes, (one, other), strict=True)
        ]
        write(*parts)
        write(*wholes)
        for part, cut, whole in zip(parts, (one, other), wholes, strict=True):
            assert part.placements == (cut,)
            torch.testing.assert_close(part.full_tensor(), whole)


def _shows_a_write(x: Tensor) -> Tensor:
    view = x[1:]
    x.clamp_(min=1.0)
    return view


def _writes_to_a_view(w: Tensor) -> Tensor:
    terms = w.sum(0)
    terms[1:].clamp_(min=1.0)
    return terms


def _clamps_each(x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_clamp_min_([x, y], 1.0)
    return x + y


#: Writes to what ranks have as terms, and operators that change sizes in place.
TERMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w.sum(0).clamp_(min=1.0),
    lambda w: w.norm().clamp_(min=7.0),
    lambda w: w.norm(dim=0).clamp_(min=1.0).mul_(2.0),  # as adaptive clipping of gradients does
    lambda w: w.mean().neg_().exp_(),
    lambda w: w.amax(0).exp_(),
    lambda w: w.sum(0).fill_(3.0),
    lambda w: w.sum(0).copy_(torch.arange(3.0)),
    lambda w: w.sum(0).add_(torch.arange(3.0)),
    lambda w: w.sum(0).add_(w.amax(0)),
    lambda w: w.sum(0).sub_(w.norm(dim=0)),
    lambda w: w.sum(0).index_fill_(0, torch.tensor([1]), 3.0),
    lambda w: (w > 0.3).sum(0).clamp_(max=2),  # whole numbers, which ranks cannot share
    lambda w: (w > 0.3).sum(0).add_(1),
    lambda w: (w > 0.3).sum(0).fill_(5),
    lambda w: (w > 0.3).sum().copy_(torch.tensor(7)),
    lambda w: (w > 0.3).any(0).logical_not_(),
    lambda w: (w > 0.3).all(0).logical_not_(),
    lambda w: w.prod(0).sub_(1.0),
    lambda w: w.norm(1, dim=0).neg_(),
    lambda w: w.norm(dim=0).neg().add_(w.mean(0)),
    lambda w: _shows_a_write(w.sum(0)),
    _writes_to_a_view,
    lambda w: _clamps_each(w.sum(0), w.norm(dim=0)),
    lambda w: w.clone().t_().mul_(2.0),
    lambda w: w.clone().transpose_(0, 1).t_().unsqueeze_(1).squeeze_(1),
    lambda w: init.orthogonal_(w.T.clone()),
)


#: Writes of negative numbers to norms.
NEGATIVE_NORMS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w.norm(dim=0).neg_(),
    lambda w: w.norm(3, dim=0).fill_(-1.0),
    lambda w: w.norm(dim=0).sub_(10.0),
    lambda w: w.norm(dim=0).copy_(torch.tensor([1.0, 1.0, -1.0])),
)


def writes_of_terms(ranks: Sequence[Any], cuts: Sequence[Placement], _: int) -> None:
    """What is pending on ranks is written to as what it stands for."""
    mesh = DeviceMesh("cpu", ranks)
    correct_operators([mesh])
    for write in NEGATIVE_NORMS:
        weight = distribute_tensor(torch.rand(5, 3), mesh, cuts)
        with pytest.raises(BackendError, match=r"^a norm .* cannot become negative in place, "):
            write(weight)
    for write in TERMS:
        if write is _writes_to_a_view and len(cuts) > 1:
            continue  # the terms are cut, too
        whole = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
        results = []
        for weight in (distribute_tensor(whole.clone(), mesh, cuts), whole):
            torch.manual_seed(3)
            results.append(write(weight))
        ours, theirs = results
        assert isinstance(ours, DTensor)
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.full_tensor(), theirs)


#: Reads of views of a tensor.
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w[3],
    lambda w: w[1:4],
    lambda w: w[1:4].T[0],
    lambda w: w.detach().unbind()[2],
    lambda w: w.detach().split([2, 3])[1],
    lambda w: w.diagonal(),
    lambda w: w.view(-1),
    lambda w: w.unfold(0, 3, 1),
    lambda w: w.detach()[::2],
    lambda w: w.T,
)
#: Writes to a parameter and its view, if there is one, which the view shows.
LATER_WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda w: w.mul_(2),
    lambda w: w.detach().add_(1),
    lambda w: w.copy_(PLAIN),
    lambda w: torch._foreach_mul_([w], 3.0),
    lambda w: w.triu_(),
)


def views_show_later_writes(_: int) -> None:
    """A view that was taken before a parameter is written to has what is written."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    correct_operators([mesh])
    whole = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    for cut, view in product((Shard(0), Shard(1)), VIEWS):
        weights = nn.Parameter(distribute_tensor(whole, mesh, [cut])), nn.Parameter(whole.clone())
        views = [view(weight) for weight in weights]
        for write in LATER_WRITES:
            for weight in weights:
                with torch.no_grad():
                    write(weight)
            for read in (lambda x: x * 1, Tensor.sum, lambda x: x.clone()):
                ours, theirs = map(read, views)
                torch.testing.assert_close(ours.full_tensor(), theirs)
            assert isinstance(views[0], DTensor)
            torch.testing.assert_close(views[0].full_tensor(), views[1])
        grads = [
            torch.autograd.grad((one * one).sum(), weight, allow_unused=True)[0]
            for one, weight in zip(views, weights, strict=True)
            if one.requires_grad
        ]
        if grads:
            torch.testing.assert_close(grads[0].full_tensor(), grads[1])
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    with torch.inference_mode():
        results = weight * 1, whole * 1
        rows = [result[3] for result in results]
        for result in results:
            result.mul_(2)
        torch.testing.assert_close((rows[0] + 1).full_tensor(), rows[1] + 1)


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
            for write in ROWS:
                writes_alike(write, weight, whole)
            reads(weight, whole.requires_grad_())


def writes_alike(write: Callable[[Tensor], object], weight: Tensor, whole: Tensor) -> None:
    """The weight is as the whole one after a write, and what the write returns."""
    with torch.no_grad():
        torch.manual_seed(3)
        expected = write(whole)
        torch.manual_seed(3)
        returned = write(weight)
        ours = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if isinstance(returned, DTensor):
            torch.testing.assert_close(returned.full_tensor(), expected)
    torch.testing.assert_close(ours, whole.detach())


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
    """A write to a part of a parameter or its gradient is that of one device."""
    torch.manual_seed(0)
    module, whole = program(parallel, ranks).module(), Net()
    for one in (module, whole):
        one(torch.ones(6, 6)).backward()
    for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        if ours.ndim == 2:
            for one, other in ((ours, theirs), (ours.grad, theirs.grad)):
                assert one is not None
                assert other is not None
                for write in SLICES:
                    writes_alike(write, one, other)
    losses = [one(torch.ones(6, 6)) for one in (module, whole)]
    torch.testing.assert_close(*losses)


def mean_of(w: Tensor, plain: Tensor) -> Tensor:
    return (w * plain).mean()


#: What is computed of a parameter and a plain tensor, and its name in the refusal.
MIXED: tuple[tuple[Callable[[Tensor, Tensor], object], str], ...] = (
    (lambda w, plain: w.mul_(plain), "mul_"),
    (lambda w, plain: w.copy_(plain), "copy_"),
    (lambda w, plain: w.add_(plain.sum()), "add_"),
    (lambda w, plain: torch._foreach_lerp_([w], [plain], 0.3), "_foreach_lerp_"),
    (lambda w, plain: w.masked_fill_(plain > 0.5, 0.0), "masked_fill_"),
    (mean_of, "mul"),
)


@torch.no_grad()
def plain_tensors_that_differ(rank: int) -> None:
    """Ranks that compute with other plain tensors say so at the next call."""
    module = program("zero3", 2).module()
    weight = module.get_parameter("layers.1.weight")
    written = torch.full(weight.shape, float(rank))
    written.copy_(weight)  # what was there is not read
    torch._foreach_copy_([written], [weight])
    weight.div_(torch.full(weight.shape, 2.0))
    module(torch.ones(6, 6))
    for compute, name in MIXED:
        plain = torch.rand(weight.shape, generator=torch.Generator().manual_seed(rank))
        compute(weight, plain)
        match = rf"^rank 1 has another plain tensor beside .* in '{name}' than rank 0: it stands"
        with pytest.raises(BackendError, match=match):
            module(torch.ones(6, 6))
        module(torch.ones(6, 6))
    if rank == 0:  # what one rank alone computes is of nothing that others have
        weight.hypot(torch.ones(weight.shape))
    weight.pow(torch.ones(weight.shape))
    module(torch.ones(6, 6))
    module.load_state_dict(module.full_state_dict())
    weight.atan2_(torch.full(weight.shape, 1.0 + rank))
    with pytest.raises(BackendError, match=r"^rank 1 has another .* in 'atan2_' than rank 0: it"):
        module(torch.ones(6, 6))
    weight.fmod_(torch.full(weight.shape, 2.0))
    with pytest.raises(BackendError, match=r"^rank 1: an input requires a"), torch.enable_grad():
        module(torch.ones(6, 6, requires_grad=rank == 1))
    weight.fmod_(torch.full(weight.shape, 3.0))
    module(torch.ones(6, 6))


#: Jobs by name.
WRITES_OF_TERMS = {
    "writes of terms": Job(3, partial(writes_of_terms, [0, 1, 2], [Shard(0)])),
    "writes of terms on two axes": Job(
        4, partial(writes_of_terms, [[0, 1], [2, 3]], [Shard(0), Shard(1)])
    ),
}
WRITES_TO_PARAMETERS = {
    f"writes_{parallel}_{ranks}": Job(
        *(ranks, partial(writes_to_parameters, parallel, ranks)),
        [partial(program, parallel, ranks)],
        slow=ranks == 2,
    )
    for parallel in ("zero3", "tp", "dp")
    for ranks in (2, 3)
}
