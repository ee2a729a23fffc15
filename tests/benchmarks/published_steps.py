"""Training steps that others published, beside the price of the same plan and of a free one.

    python tests/benchmarks/published_steps.py 8b|70b [--free] [--layers N]

Nodes of 8 H100 with 96 GB at 2.4 TB/s, 400 Gb/s a GPU, of which pytorch/torchtitan published steps
of Llama 3 (https://github.com/pytorch/torchtitan/tree/b5bcd76/benchmarks). The plan is forced:
zero3 over 8 for 8B; dp=32 tp=8 with recompute for 70B. `--free` plans without. The model is the
one of `llama.py`: bfloat16 parameters, where torchtitan keeps float32 ones; no weights, no GPU.

The forced 8B plan is searched without a limit of memory, and its bytes are compared afterwards.
The search does not solve 32 layers at once; few layers it does: two runs with `--layers` give the
line on which the whole model lies (docs/reference/presets.md).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from llama import Loss, described

import partitioner
from partitioner.api.compiled.module import ModuleProgram

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

#: Bandwidth is derated as the preset's is: 2.4e12 x 2.90 / 3.35.
CLUSTER = """
[[devices]]
count = {devices}
preset = "h100"
memory_bytes = "96GB"
memory_bytes_per_s = 2.078e12

[[levels]]
name = "nvlink"
size = 8
bandwidth_bytes_per_s = 351e9
latency_s = 0.47e-6
overlap = 0.6
table = "h100"
"""
NETWORK = """
[[levels]]
name = "network"
bandwidth_bytes_per_s = 39e9
latency_s = 2.7e-6
overlap = 0.6
table = "h100-network"
"""


@dataclass(frozen=True)
class Step:
    """A published training step.

    Attributes:
        devices: Number of GPUs.
        sequences: Of the whole batch, of 8,192 tokens each.
        seconds: By the title of the variant.
        memory_gib: By the title of the variant.
        forced: Options of the same plan.
    """

    devices: int
    sequences: int
    seconds: dict[str, float]
    memory_gib: dict[str, float]
    forced: dict[str, object]


STEPS = {
    "8b": Step(
        8, 16,
        {"eager": 2 * 8192 / 5762, "compiled": 2 * 8192 / 6667},
        {"eager": 82.4, "compiled": 77.0},
        {"parallel": "zero3", "memory": "1000TB", "recompute": False},
    ),
    "70b": Step(
        256, 512,
        {"compiled": 16 * 8192 / 8 / 597.3, "asynchronous tp": 16 * 8192 / 8 / 652.4},
        {},
        {"mesh": {"dp": 32, "tp": 8}, "recompute": True},
    ),
}  # fmt: skip


def spent(program: ModuleProgram) -> list[str]:
    """Seconds by operator and communication, the largest first."""
    seconds = Counter[str]()
    for task in program.schedule.tasks:
        if task.comm is not None:
            seconds[task.comm.kind.value] += task.longest_s
        elif task.placed is not None:
            seconds[task.placed.node.op] += task.longest_s
    return [f"  {name:40} {one:8.4f} s" for name, one in seconds.most_common(12)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=sorted(STEPS))
    parser.add_argument("--free", action="store_true", help="let the search choose")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--time-limit", type=float, default=60.0)
    options = parser.parse_args()
    step = STEPS[options.size]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        module = Loss(options.size, options.layers)
    torch.set_default_dtype(torch.float32)
    ids = torch.zeros((step.sequences, 8192), dtype=torch.int64)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "grand-teton.toml"
        text = CLUSTER.format(devices=step.devices) + (NETWORK if step.devices > 8 else "")
        file.write_text(text, encoding="utf-8")
        program = partitioner.compile(
            module,
            {"ids": ids, "labels": ids},
            cluster=file,
            training=True,
            time_limit_s=options.time_limit,
            gap=0.02,
            **({} if options.free else step.forced),
        )
    assert isinstance(program, ModuleProgram)
    for line in described(program):
        print(line)
    predicted_s = program.evaluation.step_s
    peak = max(point.bytes for point in program.evaluation.peak.values()) / 2**30
    print(f"sources  {program.summary['cost_sources']}")
    print(f"planned  in {time.perf_counter() - start:.0f} s")
    print(f"forced   {'no' if options.free else step.forced}")
    if options.layers is not None:
        print(f"{options.layers} layers: {predicted_s:.4f} s, {peak:.2f} GiB predicted")
        return
    for title, seconds in step.seconds.items():
        print(f"{title}: {predicted_s:.3f} s predicted, {seconds:.3f} s published", end="")
        print(f" ({predicted_s / seconds - 1:+.0%})")
    for title, memory in step.memory_gib.items():
        print(f"{title}: {peak:.1f} GiB predicted, {memory:.1f} GiB published", end="")
        print(f" ({peak / memory - 1:+.0%})")
    if step.devices <= 64:
        print(*spent(program), sep="\n")


if __name__ == "__main__":
    main()
