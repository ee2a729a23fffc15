"""Nets of one image, trained in blocks in a share of the memory that they need on one device.

    PYTHONPATH=tests python tests/benchmarks/blocks_in_training.py [unet|norms|vgg|N ...]

Bytes are those that PyTorch allocates, by its profiler, with parameters, their gradients and the
optimizer's state, on the fullest device; seconds are of a step with its optimizer. The last but one
number is the largest difference of a parameter or buffer from plain PyTorch's after ten steps of
AdamW. `norms` is the U-Net with a batch norm behind each first convolution of two. A number N
trains a batch of N images on N devices, with `parallel="dp"`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import partitioner
from helpers.modules.trained_images import Loss, apart, normed_unet, plain_unet, vgg
from partitioner.api.compiled.module import ModuleProgram

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

MIB = 2**20
NETS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: plain_unet(8, 2),
    "norms": lambda: normed_unet(8, 2),
    "vgg": lambda: vgg(16, 16, 32, 32),
}
SIZES = (256, 256)
SHARES = (0.5, 0.3)


def main(names: list[str]) -> None:
    """Print a row for each net and share."""
    torch.set_num_threads(1)
    devices = next((int(name) for name in names if name.isdigit()), 1)
    for name in [name for name in names if not name.isdigit()] or list(NETS):
        torch.manual_seed(0)
        module = Loss(NETS[name]())
        pixels = torch.randint(2, (devices, *SIZES))
        classes = torch.full((devices,), 3) if name == "vgg" else pixels
        example = torch.randn(devices, 3, *SIZES), classes
        options: dict[str, Any] = {"devices": devices, "cluster": "cpu", "training": True}
        if devices > 1:
            options["parallel"] = "dp"
        whole = partitioner.compile(module, example, **options)
        needs = max(whole.summary["peak_bytes"])
        row(name, needs, whole, module, example)
        for share in SHARES:
            limit = int(needs * share)
            program = partitioner.compile(module, example, memory=limit, **options)
            row(name, limit, program, module, example)


def row(
    name: str,
    limit: int,
    program: ModuleProgram,
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
) -> None:
    measured = program.profile(*example, steps=2).measured
    assert measured is not None
    blocks = "+".join(str(stretch.blocks) for stretch in program.plan.blocks.stretches)
    print(
        f"| {name} | {limit / MIB:.0f} | {blocks or '-'} | "
        f"{max(program.summary['peak_bytes']) / MIB:.0f} | "
        f"{max(rank.peak_bytes or 0 for rank in measured.ranks) / MIB:.0f} | "
        f"{measured.step_s:.2f} | {error(program, module, example):.1e} | "
        f"{sum(program.seconds.values()):.0f} |",
        flush=True,
    )


def error(program: ModuleProgram, module: nn.Module, example: tuple[torch.Tensor, ...]) -> float:
    """As of `apart`, by ranks that are forked."""
    ranks = len(program.cluster)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def train(rank: int, meet: str) -> None:
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
        found.put(apart(module, program.module(), example))
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/store"
        workers = [context.Process(target=train, args=(rank, meet)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        errors = [found.get() for _ in workers]
        for worker in workers:
            worker.join()
    return max(errors)


if __name__ == "__main__":
    main(sys.argv[1:])
