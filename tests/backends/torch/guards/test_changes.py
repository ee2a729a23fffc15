"""What PyTorch computes of all gradients, on a rank that has some of them or none."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from partitioner.backends.torch.guards.changes import watch_partial_gradients


class Alone:
    """The agreement of one rank."""

    def check(self, _: str, *, asks: bool) -> bool:
        return asks


@pytest.fixture
def module() -> nn.Module:
    layer = nn.Linear(4, 4)
    watch_partial_gradients(layer, Alone())  # type: ignore[arg-type]
    return layer


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_values_of_no_gradients_are_clipped(module: nn.Module) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.1)
    module(torch.ones(1, 4)).sum().backward()
    nn.utils.clip_grad_value_(module.parameters(), 0.1)
    assert all(p.grad is not None and p.grad.max() <= 0.1 for p in module.parameters())


@pytest.mark.usefixtures("float64_by_default")
def test_scalers_take_the_answer_of_the_ranks_in_any_default_type(module: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(module.parameters())
    loss = module(torch.full((1, 4), torch.inf)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
