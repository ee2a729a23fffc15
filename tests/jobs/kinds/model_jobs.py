"""Ten steps of training on gloo processes against one: jobs of test_module_models.py."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.torch_models import Model, build
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram

STEPS, SEED, DROPOUT = 10, 7, 0.2
#: Least share of the FLOPs that must be split.
SPLIT = 0.9
#: Relative; weights are of the size of 0.1 and move by up to 0.01.
LOSS, WEIGHTS = 1e-4, 1e-4
MESHES: Mapping[int, Mapping[str, int] | None] = {1: None, 2: None, 4: {"dp": 2, "tp": 2}}

Losses = list[float]
State = Mapping[str, Tensor]


@cache
def model(name: str, dropout: float) -> Model:
    return build(name, training=True, dropout=dropout)


@cache
def program(name: str, devices: int, dropout: float) -> ModuleProgram:
    """Compiled once, before the ranks are forked; each keeps a copy."""
    whole = model(name, dropout)
    compiled = partitioner.compile(
        whole.module,
        dict(whole.inputs),
        devices=devices,
        mesh=MESHES[devices],
        cluster="ideal",
        training=True,
    )
    assert isinstance(compiled, ModuleProgram)
    return compiled


def batches(whole: Model) -> Iterator[dict[str, Tensor]]:
    return (whole.more_inputs(step) for step in range(STEPS))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon above rounding: the gradient of a key's bias is nothing else."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)


def eager(whole: Model) -> tuple[Losses, State]:
    """As PyTorch trains the module in one process."""
    module = copy.deepcopy(whole.module)
    optimizer, losses = adamw(module), []
    for batch in batches(whole):
        optimizer.zero_grad()
        loss = module(**batch)[0]
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, module.state_dict()


def one_device(name: str) -> tuple[Losses, State]:
    """As the program of one device trains it, with the seed of each step as on ranks."""
    whole = model(name, DROPOUT)
    optimizer, losses = adamw(whole.module), []
    for step, batch in enumerate(batches(whole)):
        results, gradients = program(name, 1, DROPOUT).gradients(**batch, seed=(SEED << 32) + step)
        for key, parameter in whole.module.named_parameters():
            parameter.grad = gradients[key]
        optimizer.step()
        losses.append(float(results[0]))
    return losses, whole.module.state_dict()


def check(rank: int, losses: Losses, state: State, expected: tuple[Losses, State]) -> None:
    torch.testing.assert_close(losses, expected[0], rtol=LOSS, atol=0)
    assert len(set(losses)) == STEPS
    assert set(state) == set(expected[1])
    for key, tensor in expected[1].items():
        where = f"rank {rank}: {key}: "
        torch.testing.assert_close(
            state[key], tensor, rtol=WEIGHTS, atol=WEIGHTS / 10, msg=where.__add__
        )


@dataclass(frozen=True)
class Training:
    """A module that ranks train as one process does; with dropout, as one device's program."""

    name: str
    devices: int
    dropout: float = 0.0

    def prepare(self) -> None:
        """Compile before the ranks are forked: once for all of them."""
        for devices in {self.devices, 1} if self.dropout else {self.devices}:
            program(self.name, devices, self.dropout)

    def run(self, rank: int) -> None:
        """Train and compare on a rank."""
        whole = model(self.name, self.dropout)
        compiled = program(self.name, self.devices, self.dropout)
        assert compiled.summary["sharded_flops_share"] > SPLIT
        module: Any = compiled.module(seed=SEED)
        optimizer, losses = adamw(module), []
        for batch in batches(whole):
            optimizer.zero_grad()
            loss = module(**batch)[0]
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        expected = one_device(self.name) if self.dropout else eager(whole)
        check(rank, losses, module.full_state_dict(), expected)


TRAININGS = {
    **{
        f"{name}_on_{devices}": Training(name, devices)
        for name in ("gpt2", "llama", "bert", "vit", "t5", "mixtral", "resnet", "convnext", "unet")
        for devices in (2, 4)
    },
    "gpt2_with_dropout_on_2": Training("gpt2", 2, DROPOUT),
    "t5_with_dropout_on_4": Training("t5", 4, DROPOUT),
}
JOBS = {
    name: Job(training.devices, training.run, [training.prepare], limit_s=250, slow=True)
    for name, training in TRAININGS.items()
}

if __name__ == "__main__":
    main(JOBS)
