"""A rank that is stopped under torchrun is named by one that waits for it."""

import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import partitioner
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends import waiting
from partitioner.backends.torch.agreeing import whereabouts

#: Calls of the module before a rank is stopped.
STEPS = 2


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


@cache
def program() -> ModuleProgram:
    example = torch.ones(4, 8)
    return partitioner.compile(Loss(), example, devices=2, training=True, parallel="dp")


def is_named(stopped: int) -> Callable[[int], None]:
    def run(rank: int) -> None:
        said = Path("said.txt")
        waiting._NAMED_AFTER_S = dict.fromkeys(waiting._NAMED_AFTER_S, 0.3)  # type: ignore[misc]
        whereabouts._LOOK_S = 0.1

        def say(line: str) -> None:
            with said.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

        whereabouts.say = say
        module = program().module()
        for step in range(2 * STEPS):
            if step == STEPS and rank == stopped:
                _stop_until(said)
            module(torch.ones(4, 8)).backward()
        dist.barrier()
        line = said.read_text(encoding="utf-8").splitlines()[0]
        assert line.startswith(
            f"rank {1 - stopped}: waiting for rank {stopped} in step {STEPS + 1}: its process "
        ), line

    return run


def _stop_until(said: Path) -> None:
    """Stop this process until something is said."""
    own = os.getpid()
    if os.fork() == 0:
        until = time.monotonic() + 60
        while not said.exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    os.kill(own, signal.SIGSTOP)


JOBS = {f"rank_{rank}": Job(2, is_named(rank), [program]) for rank in range(2)}

if __name__ == "__main__":
    main(JOBS)
