"""Jobs of test_blocks_in_training.py: gloo ranks share blocks, ten AdamW steps beside PyTorch."""

from functools import cache, partial

import torch

import partitioner
from helpers.modules.trained_images import Loss, apart, vgg
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram

Example = tuple[torch.Tensor, torch.Tensor]


@cache
def program(parallel: str, ranks: int, share: float) -> tuple[ModuleProgram, Example]:
    """Compiled before the ranks are forked, for a share of what each needs without blocks."""
    torch.manual_seed(0)
    module = Loss(vgg(8, 8))
    example = torch.randn(ranks + 1, 3, 60, 44), torch.full((ranks + 1,), 3)
    whole = partitioner.compile(module, example, devices=ranks, training=True, parallel=parallel)
    limit = int(share * max(whole.summary["peak_bytes"]))
    compiled = partitioner.compile(
        *(module, example, ranks), training=True, parallel=parallel, memory=limit, time_limit_s=5
    )
    assert compiled.plan.blocks
    assert max(compiled.summary["peak_bytes"]) <= limit
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    return compiled, example


def train(parallel: str, ranks: int, share: float) -> None:
    compiled, example = program(parallel, ranks, share)
    assert apart(compiled.whole, compiled.module(), example) <= 1e-6


def job(parallel: str, ranks: int, share: float, *, sweep: bool = False) -> Job:
    made = parallel, ranks, share
    run = partial(program, *made)
    return Job(ranks, lambda _: train(*made), [run], slow=not sweep, sweep=sweep)


JOBS = {
    "dp_2": job("dp", 2, 0.6),
    "zero2_2": job("zero2", 2, 0.6),
    "zero1_3": job("zero1", 3, 0.6, sweep=True),
    "zero3_3": job("zero3", 3, 0.6, sweep=True),
}

if __name__ == "__main__":
    main(JOBS)
