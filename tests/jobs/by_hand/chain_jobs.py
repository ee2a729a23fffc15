"""`partitioner.Chain` on ranks of a gloo group: jobs of test_chain.py."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import partitioner
from jobs.processes.torch_ranks import Job, main
from partitioner.backends.errors import BackendError

STEPS = 10


def parts() -> list[nn.Module]:
    """Three layers, the same wherever they are made."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(6, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        nn.Linear(8, 3),
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3] - x[:, 3:]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


@cache
def alone() -> tuple[list[float], nn.Module]:
    """Losses and the trained model of one process; loading the optimizers takes seconds."""
    model = nn.Sequential(*parts())
    steps = optimizer(model)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, model


def there_and_back(rank: int) -> None:
    """0 -> 1 -> 0 trains to the same losses and weights."""
    first, second, third = parts()
    chain = partitioner.Chain()
    if rank == 0:
        chain.add(first, rank_out=1)
        chain.add(third, rank_in=1)
    else:
        chain.add(second, rank_in=0, rank_out=0)
    steps = optimizer(chain)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        result = chain(x)
        if rank == 0:
            result = nn.functional.mse_loss(result, y)
            losses.append(result.item())
        else:
            assert (result.shape, result.item()) == ((), 0)
        steps.zero_grad()
        result.backward()
        steps.step()
    expected, model = alone()
    if rank == 0:
        assert losses[-1] < losses[0] / 2
        assert losses == pytest.approx(expected, rel=1e-6)
    submodules = (first, third) if rank == 0 else (second,)
    theirs = (model[0], model[2]) if rank == 0 else (model[1],)
    for ours, right in zip(submodules, theirs, strict=True):
        for name, value in right.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    assert len(list(chain.parameters())) == (4 if rank == 0 else 2)


class Product(nn.Module):
    """Of what comes from several ranks; order counts."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y.exp()


class Weight(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin()


def fork_and_join(rank: int) -> None:
    """0 -> (1, 2) -> 0, where what comes back is joined, in the order listed."""
    x = torch.tensor([0.3, 0.7])
    modules = [Weight(1.0), Weight(2.0), Weight(3.0)]
    chain = partitioner.Chain()
    if rank == 0:
        chain.add(modules[0], rank_out=[1, 2])
        chain.add(Product(), rank_in=[2, 1])
    else:
        chain.add(modules[rank], rank_in=0, rank_out=[0])
    (chain(x) if rank == 0 else chain()).sum().backward()
    gradient = modules[rank].weight.grad
    whole = [Weight(1.0), Weight(2.0), Weight(3.0)]
    middle = whole[0](x)
    (whole[2](middle) * whole[1](middle).exp()).sum().backward()
    torch.testing.assert_close(gradient, whole[rank].weight.grad)


def shared_and_dropped(rank: int) -> None:
    """A submodule used twice; outputs that are not returned keep nobody waiting."""
    x = torch.tensor([0.3, 0.7])
    module = Weight(1.5)
    chain = partitioner.Chain()
    if rank == 0:
        chain.add(module, rank_out=1)
        chain.add(module, rank_in=1)  # dropped: the next output is the last
        chain.add(module)
    else:
        chain.add(module, rank_in=0, rank_out=0)
    out = chain(x)
    (out.sum() if rank == 0 else out).backward()
    if rank == 0:
        torch.testing.assert_close(out, module(x))
        expected = Weight(1.5)
        expected(x).sum().backward()
        torch.testing.assert_close(module.weight.grad, expected.weight.grad)
    else:
        torch.testing.assert_close(module.weight.grad, torch.zeros(2))


def without_gradients(rank: int) -> None:
    chain = partitioner.Chain()
    if rank == 0:
        chain.add(Weight(1.0), rank_out=1)
    else:
        chain.add(Weight(2.0), rank_in=0)
    with torch.no_grad():
        out = chain(torch.ones(2))
    assert not out.requires_grad
    if rank == 1:
        torch.testing.assert_close(out, (torch.ones(2).sin() * 2).sin())


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


def mistakes(rank: int) -> None:
    chain = partitioner.Chain()
    layer = Weight(1.0)

    def refused(message: str, run: Callable[[], object]) -> None:
        with pytest.raises(BackendError, match=f"^rank {rank}: {message}"):
            run()

    refused("Chain: no submodule was added on this rank$", chain)
    refused("Chain.add: rank_in is this rank itself$", lambda: chain.add(layer, rank_in=rank))
    refused("Chain.add: rank_out is this rank", lambda: chain.add(layer, rank_out=[0, 1]))
    refused(r"Chain.add: rank_out is 2, not one of the", lambda: chain.add(layer, rank_out=2))
    refused(r"Chain.add: rank_in is '0', not one of", lambda: chain.add(layer, rank_in="0"))
    refused("Chain.add: rank_in is empty; None", lambda: chain.add(layer, rank_in=[]))
    refused("Chain.add: module is int, not a", lambda: chain.add(3))  # type: ignore[arg-type]
    chain.add(Pair())
    refused("Chain: submodule 0 returned tuple, not a tensor$", lambda: chain(torch.ones(1)))


JOBS = {
    "there_and_back": Job(2, there_and_back, prepare=[alone]),
    "fork_and_join": Job(3, fork_and_join),
    "shared_and_dropped": Job(2, shared_and_dropped),
    "without_gradients": Job(2, without_gradients),
    "mistakes": Job(2, mistakes),
}

if __name__ == "__main__":
    main(JOBS)
