"""Planning time of GPT-3 175B in training, in stages, on nodes of 8 H100.

    python tests/benchmarks/gpt3_training.py [--layers 96] [--nodes 128] [--batch 1536]
        [--mesh pp=16,dp=8,tp=8] [--micro-batches 192] [--schedule 1f1b] [--time-limit 22]

The model is transformers' GPT-2 with GPT-3's sizes (d = 12,288, 96 heads, vocabulary 50,257,
sequences of 2,048 tokens) and its loss, in bfloat16, on the meta device, without dropout. Seconds
are wall-clock, but for the CPU seconds of this process at the end.
"""

import argparse
import os
import time

import torch
from gpt3 import TOKENS, config
from llama import described
from torch import nn
from transformers import GPT2LMHeadModel

import partitioner
from partitioner.api.compiled.module import ModuleProgram

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured


class Loss(nn.Module):
    """The loss alone."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(config(layers, **dropout))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1536)
    parser.add_argument("--mesh", default="pp=16,dp=8,tp=8", help="axis sizes")
    parser.add_argument("--micro-batches", type=int, default=192)
    parser.add_argument("--schedule", help="default: searched")
    parser.add_argument("--time-limit", type=float, default=22.0)
    options = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        module = Loss(options.layers)
    torch.set_default_dtype(torch.float32)
    ids = torch.zeros((options.batch, TOKENS), dtype=torch.int64)
    start, cpu_start = time.perf_counter(), time.process_time()
    program = partitioner.compile(
        module,
        {"ids": ids, "labels": ids},
        cluster=f"{options.nodes}x8xh100",
        training=True,
        mesh={axis: int(n) for axis, n in (p.split("=") for p in options.mesh.split(","))},
        schedule=options.schedule,
        micro_batches=options.micro_batches,
        recompute=True,
        time_limit_s=options.time_limit,
        progress=lambda text: print(f"{time.perf_counter() - start:8.2f} s  {text}", flush=True),
    )
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    assert isinstance(program, ModuleProgram)
    assert program.plan.pipeline is not None
    print(f"schedule {program.plan.pipeline.schedule}")
    for line in described(program):
        print(line)
    for what, seconds in program.seconds.items():
        print(f"{what:20} {seconds:.2f} s")
    print(f"all      {wall:.2f} s, {cpu:.2f} CPU s")


if __name__ == "__main__":
    try:
        main()
    except partitioner.PartitionerError as error:
        raise SystemExit(f"gpt3_training.py: {error}") from None
