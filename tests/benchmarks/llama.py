"""Planning time of a Llama-3 training graph on nodes of 8 H100: trace, problem, solve, lower.

    python tests/benchmarks/llama.py [--size 8b|70b] [--layers N] [--nodes 8] [--seq 4096]
        [--batch 64] [--mesh dp=8,tp=8] [--memory 40GB] [--recompute yes] [--time-limit 30]
        [--gap 0.01] [--parallel pp+tp] [--schedule 1f1b] [--micro-batches 32]

The model is transformers' LlamaForCausalLM with its loss, in bfloat16, on the meta device: no
weights, no GPU. Weights, gradients and AdamW's two moments in float32 count as memory. Seconds are
wall-clock; the last line has CPU seconds too. Rank programs are made for up to 64 devices.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import resolve
from partitioner.report.stages import step_facts, step_sentence
from partitioner.search.request import MOST_EXPLICIT

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

#: Hidden size, layers, heads, key-value heads, intermediate size.
SIZES = {"8b": (4096, 32, 32, 8, 14_336), "70b": (8192, 80, 64, 8, 28_672)}
VOCABULARY = 128_256


class Loss(nn.Module):
    """The loss alone."""

    def __init__(self, size: str, layers: int | None) -> None:
        super().__init__()
        hidden, depth, heads, pairs, inner = SIZES[size]
        config = LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=layers or depth,
            num_attention_heads=heads,
            num_key_value_heads=pairs,
            intermediate_size=inner,
            vocab_size=VOCABULARY,
            use_cache=False,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=labels).loss


def described(program: ModuleProgram) -> Iterator[str]:
    """The plan in words."""
    certificate, figures = program.plan.certificate, program.evaluation
    assert certificate is not None
    peak, limit = max(figures.held_bytes.values()), min(figures.limit_bytes.values())
    yield f"nodes    {len(program.graph.nodes)} on {len(program.cluster)} devices"
    if sentence := step_sentence(step_facts(program.plan, figures)):
        yield f"pipeline {sentence}"
    busiest = max(figures.load_s, key=figures.load_s.__getitem__)
    compute_s, comm_s = figures.compute_s[busiest], figures.comm_s[busiest]
    yield f"busiest  {compute_s * 1e3:.2f} ms compute, {comm_s * 1e3:.2f} ms communication"
    yield f"folded   {certificate.folded}"
    yield f"mesh     {' / '.join(map(shape, program.plan.groups))}"
    yield f"stored   {stored(program)}"
    yield f"memory   {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB a device"
    yield (
        f"step     {certificate.cost * 1e3:.2f} ms, bound {certificate.bound * 1e3:.2f} ms, "
        f"gap {certificate.gap:.1%}, {certificate.status}"
    )


def shape(mesh: DeviceMesh) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.axes) or "one device"


def stored(program: ModuleProgram) -> str:
    """Over which axes parameters are cut at rest, by their share of the bytes."""
    counted = Counter[str]()
    for placed in resolve(program.graph, program.plan):
        if placed.node.op == "partitioner::state":
            ((value, at),) = placed.results()
            axes = "*".join(axis for axis in placed.mesh.names if axis in at.sharding.axes)
            counted[axes or "whole"] += program.graph.types[value].nbytes
    whole = sum(counted.values())
    return ", ".join(f"{axes} {nbytes / whole:.1%}" for axes, nbytes in counted.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="8b")
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--mesh", help="axis sizes, dp=8,tp=8; default: searched")
    parser.add_argument("--memory", help="of a device; default: the cluster's")
    parser.add_argument("--recompute", choices=("auto", "yes", "no"), default="auto")
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--parallel", help="kind of parallelism; default: the cheapest")
    parser.add_argument("--schedule", help="of a pipeline")
    parser.add_argument("--micro-batches", help="of a pipeline; auto: weighed against one mesh")
    options = parser.parse_args()
    count = options.micro_batches
    pairs = (part.split("=") for part in options.mesh.split(",")) if options.mesh else None
    mesh = {axis: int(size) for axis, size in pairs} if pairs is not None else None
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        module = Loss(options.size, options.layers)
    torch.set_default_dtype(torch.float32)
    ids = torch.zeros((options.batch, options.seq), dtype=torch.int64)
    start, cpu = time.perf_counter(), time.process_time()
    program = partitioner.compile(
        module,
        {"ids": ids, "labels": ids},
        cluster=f"{options.nodes}x8xh100",
        training=True,
        mesh=mesh,
        memory=options.memory,
        recompute="auto" if options.recompute == "auto" else options.recompute == "yes",
        time_limit_s=options.time_limit,
        gap=options.gap,
        parallel=options.parallel,
        schedule=options.schedule,
        micro_batches=int(count) if count and count != "auto" else count,
        progress=lambda text: print(f"{time.perf_counter() - start:8.2f} s  {text}", flush=True),
    )
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    assert isinstance(program, ModuleProgram)
    for line in described(program):
        print(line)
    named = {"tracing the module": "trace", "deriving strategies": "problem", "searching": "solve"}
    for what, seconds in program.seconds.items():
        print(f"{named.get(what, 'lower'):8} {seconds:.2f} s")
    if len(program.cluster) > MOST_EXPLICIT:
        print(f"lower    not done: programs are made for up to {MOST_EXPLICIT} devices")
    print(f"all      {wall:.2f} s, CPU {cpu:.2f} s")


if __name__ == "__main__":
    try:
        main()
    except partitioner.PartitionerError as error:
        raise SystemExit(f"llama.py: {error}") from None
