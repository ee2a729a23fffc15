"""A rank of a module that is trained on two machines: run by torchrun, from `two_machines`.

    across_machines.py CLUSTER RESULT JOB [OPTIONS]

JOB is "equals" (each step against one process), "times" (seconds of a step), or "breaks" (the link
breaks in a step). OPTIONS are those of `compile`, as JSON.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import partitioner
from helpers.plans.staged import accumulated

WIDTH, LAYERS, ROWS = 512, 12, 128
#: How long gloo waits for a message, in the job whose link breaks.
TIMEOUT_S = 5


class Deep(nn.Module):
    """More weights than activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        for layer in self.layers:
            x = x + layer(x).tanh()
        return (x - y).square().mean()


def batch(step: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(step)
    return tuple(torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2))


def seeded() -> Deep:
    torch.manual_seed(0)
    return Deep()


def compiled(cluster: str, options: dict[str, Any]) -> partitioner.ModuleProgram:
    return partitioner.compile(seeded(), batch(0), training=True, cluster=cluster, **options)


def equals(program: partitioner.ModuleProgram) -> dict[str, Any]:
    """Three steps as of one process: the largest change of a weight, and difference of one."""
    module, plain = program.module(), seeded()
    assert program.plan.pipeline is not None
    for step in range(3):
        loss = module(*batch(step))
        loss.backward()
        torch.testing.assert_close(
            loss.detach(), accumulated(plain, batch(step), program.plan.pipeline.micro_batches)[0]
        )
        for one in (module, plain):
            update = torch.optim.SGD(one.parameters(), lr=10.0)  # gradients are small
            update.step()
            update.zero_grad()
    state = module.full_state_dict()
    trained, start = plain.state_dict(), seeded().state_dict()
    return {
        "change": max((trained[name] - start[name]).abs().max().item() for name in start),
        "difference": max((trained[name] - state[name]).abs().max().item() for name in start),
    }


def times(program: partitioner.ModuleProgram) -> dict[str, Any]:
    """The median seconds of a step."""
    module, seconds = program.module(check_inputs=0), []
    update = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(9):
        dist.barrier()
        start = time.perf_counter()
        module(*batch(step)).backward()
        update.step()
        update.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"step_s": statistics.median(seconds[2:])}


@dataclass(frozen=True)
class BreaksAt:
    """Breaks the link before a phase runs, by the file that the test looks for."""

    run: Any
    file: Path

    def __call__(self, arguments: list[Tensor]) -> Any:
        if dist.get_rank() == 0:
            self.file.touch()
        time.sleep(0.5)  # the link is down then
        return self.run(arguments)


def breaks(program: partitioner.ModuleProgram, file: Path) -> dict[str, Any]:
    """The first backward phase of the second step breaks the link; each rank says what it sees."""
    module = program.module()
    module(*batch(0)).backward()
    passes: Any = module._passes[""]
    if dist.get_rank() == 0:
        backward = next(p for p in passes._runs[0] if not passes.graphs.is_forward(p))
        passes._runs[0][backward] = BreaksAt(passes._runs[0][backward], file)
    start = time.monotonic()
    try:
        module(*batch(1)).backward()
        problem = "none"
    except partitioner.PartitionerError as error:
        problem = str(error)
    seconds = time.monotonic() - start
    said = {"rank": dist.get_rank(), "seconds": seconds, "error": problem}
    file.with_name(f"said-{dist.get_rank()}.json").write_text(json.dumps(said))
    sys.exit(1)


def main() -> None:
    cluster, result, job, *options = sys.argv[1:]
    timeout = TIMEOUT_S if job == "breaks" else 100
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    program = compiled(cluster, json.loads(options[0]) if options else {})
    if job == "breaks":
        breaks(program, Path(result))
    figures = {"equals": equals, "times": times}[job](program)
    figures |= {
        "kind": program.plan.kind,
        "groups": [group.devices for group in program.plan.groups],
        "predicted_s": program.evaluation.latency_s,
    }
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
