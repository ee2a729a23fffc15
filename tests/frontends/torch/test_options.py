"""Optimizers by name keep as many tensors for a parameter as PyTorch's do."""

from functools import partial
from typing import Any

import pytest
import torch

from partitioner.frontends.torch.options import OPTIMIZERS

MAKERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_keeps_so_many_tensors_of_the_parameters_shape(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = MAKERS[name]([parameter])
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    state = optimizer.state[parameter].values()
    kept = [
        value
        for value in state
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]
    assert len(kept) == OPTIMIZERS[name]
