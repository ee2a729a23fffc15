"""Jobs of test_blocks_in_training.py: gloo ranks share blocks, ten AdamW steps beside PyTorch."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

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


@cache
def staged(name: str) -> tuple[ModuleProgram, Example]:
    """As `program`, of micro-batches through stages, whose blocks are those of one micro-batch."""
    ranks, samples, widths, share, options = STAGED[name]
    torch.manual_seed(0)
    module = Loss(vgg(*widths))
    example = torch.randn(samples, 3, 41, 35), torch.full((samples,), 3)
    whole = partitioner.compile(module, example, ranks, training=True, time_limit_s=5, **options)
    limit = int(share * max(whole.summary["peak_bytes"]))
    compiled = partitioner.compile(
        *(module, example, ranks), training=True, memory=limit, time_limit_s=40, **options
    )
    assert compiled.plan.blocks
    assert compiled.plan.micro_batches == options["micro_batches"]
    assert max(compiled.summary["peak_bytes"]) <= limit
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return compiled, example


def train_staged(name: str) -> None:
    compiled, example = staged(name)
    assert apart(compiled.whole, compiled.module(), example) <= 1e-6


#: Ranks, samples, channels of the net, the share of what ranks hold without blocks, and options.
Staged = tuple[int, int, tuple[int, ...], float, Mapping[str, Any]]
NET = 4, 4, 8, 8
STAGED: dict[str, Staged] = {
    "pp_2": (2, 4, NET, 0.45, {"parallel": "pp", "micro_batches": 4, "schedule": "1f1b"}),
    "zb1_2": (2, 4, NET, 0.4, {"parallel": "pp", "micro_batches": 2, "schedule": "zb1"}),
    "gpipe_2": (2, 4, (8, 8), 0.3, {"parallel": "pp", "micro_batches": 4, "schedule": "gpipe"}),
    "interleaved_2": (
        *(2, 4, (8, 8), 0.42),
        {"parallel": "pp", "micro_batches": 4, "schedule": "interleaved"},
    ),
    "pp_3": (3, 3, NET, 0.42, {"parallel": "pp", "micro_batches": 3, "schedule": "1f1b"}),
    "dp_in_three_2": (2, 6, (8, 8), 0.6, {"parallel": "dp", "micro_batches": 3}),
    "pp+dp_4": (
        *(4, 4, (8, 8), 0.5),
        {
            "parallel": "pp+dp",
            "mesh": {"pp": 2, "dp": 2},
            "micro_batches": 2,
            "schedule": "1f1b",
        },
    ),
}


def job(parallel: str, ranks: int, share: float, *, sweep: bool = False) -> Job:
    made = parallel, ranks, share
    run = partial(program, *made)
    return Job(ranks, lambda _: train(*made), [run], slow=not sweep, sweep=sweep)


JOBS = {
    "dp_2": job("dp", 2, 0.6),
    "zero2_2": job("zero2", 2, 0.6),
    "zero1_3": job("zero1", 3, 0.6, sweep=True),
    "zero3_3": job("zero3", 3, 0.6, sweep=True),
    **{
        name: Job(
            of[0], lambda _, n=name: train_staged(n), [partial(staged, name)], slow=name != "pp_2"
        )
        for name, of in STAGED.items()
    },
}

if __name__ == "__main__":
    main(JOBS)
