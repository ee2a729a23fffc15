"""Nets of one image, trained in blocks in a share of the memory that they need on one device.

    PYTHONPATH=tests/helpers python tests/benchmarks/blocks_in_training.py [unet|norms|vgg ...]

Bytes are those that PyTorch allocates, by its profiler, with parameters, their gradients and the
optimizer's state; seconds are of a step with its optimizer. The last but one number is the largest
difference of a parameter or buffer from plain PyTorch's after ten steps of AdamW. `norms` is the
U-Net with a batch norm behind each first convolution of two.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from trained_images import Loss, apart, normed_unet, plain_unet, vgg

import partitioner
from partitioner.compiled.module import ModuleProgram

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
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
        table(names or list(NETS))
        dist.destroy_process_group()


def table(names: list[str]) -> None:
    for name in names:
        torch.manual_seed(0)
        module = Loss(NETS[name]())
        classes = torch.tensor([3]) if name == "vgg" else torch.randint(2, (1, *SIZES))
        example = torch.randn(1, 3, *SIZES), classes
        whole = partitioner.compile(module, example, devices=1, training=True)
        needs = whole.summary["peak_bytes"][0]
        row(name, needs, whole, module, example)
        for share in SHARES:
            limit = int(needs * share)
            program = partitioner.compile(module, example, devices=1, training=True, memory=limit)
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
        f"{program.summary['peak_bytes'][0] / MIB:.0f} | "
        f"{(measured.ranks[0].peak_bytes or 0) / MIB:.0f} | {measured.step_s:.2f} | "
        f"{apart(module, program.module(), example):.1e} | {sum(program.seconds.values()):.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
