"""Training under autocast on ranks (see module_jobs.py)."""

from functools import cache
from typing import Any

import torch
from torch import nn

import partitioner
from helpers.modules.trained import Branching
from partitioner.api.compiled.module import ModuleProgram

STEPS = 10


class Under(nn.Module):
    """A module that is called under autocast. (A region that lasts longer keeps stale casts.)"""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *batch: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(*batch)


def losses_of(module: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        loss = module(*Branching.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def seeded() -> Branching:
    torch.manual_seed(0)
    return Branching()


@cache
def program() -> ModuleProgram:
    """Compiled in a region of autocast."""
    whole = seeded()
    with torch.autocast("cpu", torch.bfloat16):
        compiled = partitioner.compile(
            whole, whole.batch(0), devices=2, training=True, cluster="ideal"
        )
    assert isinstance(compiled, ModuleProgram)
    return compiled


def branches_under_autocast(_: int) -> None:
    """Both branches of a `torch.cond`, called in the region that it was compiled in, and not."""
    compiled = program()
    module = compiled.module()
    losses = losses_of(module)
    assert module.state_dict()["one.weight"].dtype == torch.float32
    assert losses == losses_of(Under(compiled.module()))
    alone = losses_of(Under(seeded()))
    torch.testing.assert_close(torch.tensor(alone), torch.tensor(losses), rtol=2e-2, atol=2e-2)
