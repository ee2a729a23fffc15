"""Planning time of a Llama-3 training graph on nodes of 8 H100: trace, problem, solve, lower.

    python tests/benchmarks/llama.py [--size 8b|70b] [--layers N] [--nodes 8] [--seq 4096]
        [--batch 64] [--mesh dp=8,tp=8] [--time-limit 30] [--gap 0.01]

The model is transformers' LlamaForCausalLM with its loss, in bfloat16, on the meta device: no
weights, no GPU. Weights, gradients and AdamW's two moments in float32 count as memory. Seconds are
wall-clock and, in brackets, CPU seconds of this process. Rank programs are made for up to 64
devices.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner.cost_model.cluster import resolve_cluster
from partitioner.frontends.torch_capture import capture, export_module, materialised
from partitioner.frontends.torch_decompositions import DECOMPOSITIONS
from partitioner.frontends.torch_graph import ModuleGraph, module_graph
from partitioner.ir.plan import Plan, resolve
from partitioner.limits import MOST_EXPLICIT
from partitioner.module_compiler import (
    OPTIMIZERS,
    keep_composites,
    replace_attention,
    replace_cross_entropy,
)
from partitioner.module_program import ModuleProgram
from partitioner.search import Outcome, Request, search
from partitioner.strategies import Rules

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


@contextmanager
def timed(what: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{what:8} {wall:7.2f} s ({cpu:.2f})", flush=True)


def traced(size: str, layers: int | None, batch: int, length: int) -> tuple[nn.Module, ModuleGraph]:
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        module = Loss(size, layers)
    torch.set_default_dtype(torch.float32)
    ids = torch.zeros((batch, length), dtype=torch.int64)
    with timed("trace"):
        held = materialised(module)
        program = export_module(held, (), {"ids": ids, "labels": ids})
        for rewrite in (replace_attention, replace_cross_entropy, keep_composites):
            rewrite(program.graph_module)
        captured = capture(held, program, DECOMPOSITIONS, training=True)
        return module, module_graph(captured, f"llama-{size}", OPTIMIZERS["adamw"])


def described(found: ModuleGraph, outcome: Outcome) -> Iterator[str]:
    """The plan in words."""
    certificate, figures = outcome.plan.certificate, outcome.evaluation
    assert certificate is not None
    peak, limit = max(p.bytes for p in figures.peak.values()), min(figures.limit_bytes.values())
    yield f"folded   {certificate.folded}"
    yield f"mesh     {' / '.join(str(mesh.axes) for mesh in outcome.plan.groups)}"
    yield f"stored   {stored(found, outcome.plan)}"
    yield f"memory   {peak / 1e9:.2f} GB of {limit / 1e9:.2f} GB a device"
    yield (
        f"step     {certificate.cost * 1e3:.2f} ms, bound {certificate.bound * 1e3:.2f} ms, "
        f"gap {certificate.gap:.1%}, {certificate.status}"
    )


def stored(found: ModuleGraph, plan: Plan) -> str:
    """Over which axes parameters are cut at rest, by their share of the bytes."""
    graph, counted = found.graph, Counter[str]()
    for placed in resolve(graph, plan):
        if placed.node.op == "partitioner::state":
            ((value, at),) = placed.results()
            axes = "*".join(axis for axis in placed.mesh.names if axis in at.sharding.axes)
            counted[axes or "whole"] += graph.types[value].nbytes
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
    parser.add_argument("--time-limit", type=float, default=30.0)
    parser.add_argument("--gap", type=float, default=0.01)
    options = parser.parse_args()
    pairs = (part.split("=") for part in options.mesh.split(",")) if options.mesh else None
    mesh = {axis: int(size) for axis, size in pairs} if pairs is not None else None
    cluster = resolve_cluster(f"{options.nodes}x8xh100")
    module, found = traced(options.size, options.layers, options.batch, options.seq)
    print(f"nodes    {len(found.graph.nodes)} on {len(cluster)} devices")
    with timed("problem"):
        rules = Rules.of(found.graph)
    for why, count in Counter(rules.opaque.values()).items():
        print(f"whole    {count} x {why}")
    request = Request(strategy="intra", mesh=mesh, time_limit_s=options.time_limit, gap=options.gap)
    with timed("solve"):
        outcome = search(found.graph, cluster, request, rules, lambda text: print("        ", text))
    for line in described(found, outcome):
        print(line)
    if len(cluster) > MOST_EXPLICIT:
        print(f"lower    not done: programs are made for up to {MOST_EXPLICIT} devices")
        return
    program = ModuleProgram(
        traced=found,
        whole=module,
        training=True,
        cluster=cluster,
        plan=outcome.plan,
        evaluation=outcome.evaluation,
        summary={},
        seconds={},
    )
    with timed("lower"):
        assert len(program.programs.ranks) == len(cluster)


if __name__ == "__main__":
    main()
