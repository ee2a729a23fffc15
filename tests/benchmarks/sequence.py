"""Forward and backward passes of attention over a long sequence: ours against PyTorch's ring.

    OMP_NUM_THREADS=1 python tests/benchmarks/sequence.py [--ranks 2] [--rounds 7] [--tokens 4096]
        [--width 256] [--heads 4]

The model projects a sequence to queries, keys and values, and causal attention back. Modes: `one`
(the plain module on every rank, for scale); `torch`, the ring attention of
`torch.distributed.tensor.experimental` with its load balance and its default rotation, given the
CPU's kernel, which its dispatcher leaves out; and ours, `cp` (the form that the planner takes)
and `ring`. Weights are whole on each rank, and their gradients are all-reduced. Modes take turns,
round by round; printed are the median milliseconds of a step, and the median over rounds of the
ratio to the twin of the same round.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import ratios, start_rank, with_numbers
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as peer
from torch.nn import functional

import partitioner

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

aten = torch.ops.aten
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Mixer(nn.Module):
    """Returns the mean square of its result."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attend = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)).square().mean()


class PeerRing(torch.autograd.Function):
    """PyTorch's ring attention over the CPU's kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = peer._templated_ring_attention(
            *(dist.group.WORLD, 2, aten._scaled_dot_product_flash_attention_for_cpu),
            query=query, key=key, value=value, is_causal=True,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return peer._templated_ring_attention_backward(
            *(dist.group.WORLD, 2, kernel),
            grad_out=grad, grad_out_name="grad_out", query=query, key=key, value=value,
            out=out, logsumexp=lse, is_causal=True, dropout_p=0.0,
        )[:3]  # fmt: skip


def modes(args: argparse.Namespace, rank: int) -> dict[str, Callable[[Tensor], float]]:
    def model() -> Mixer:
        torch.manual_seed(0)
        return Mixer(args.width, args.heads)

    def stepping(module: nn.Module) -> Callable[[Tensor], float]:
        def step(x: Tensor) -> float:
            loss = module(x)
            loss.backward()
            for parameter in module.parameters():
                parameter.grad = None
            return float(loss.detach())

        return step

    def ours(kind: str) -> Callable[[Tensor], float]:
        example = torch.zeros(1, args.tokens, args.width)
        program = partitioner.compile(model(), example, args.ranks, training=True, parallel=kind)
        if rank == 0:
            print(kind, program, flush=True)
        return stepping(program.module())

    def twin() -> Callable[[Tensor], float]:
        module = model()
        module.attend = PeerRing.apply

        def step(x: Tensor) -> float:
            chunks = x.chunk(2 * args.ranks, dim=1)
            loss = module(torch.cat([chunks[rank], chunks[2 * args.ranks - 1 - rank]], 1))
            loss.backward()
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            total = loss.detach() / args.ranks
            dist.all_reduce(total)
            for parameter in module.parameters():
                parameter.grad = None
            return float(total)

        return step

    return {"one": stepping(model()), "torch": twin(), "cp": ours("cp"), "ring": ours("ring")}


def run(rank: int, args: argparse.Namespace) -> None:
    start_rank(rank, args.ranks, args.port)
    steps = modes(args, rank)
    generator = torch.Generator().manual_seed(1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for _ in range(args.rounds + 1):
        x = torch.randn(1, args.tokens, args.width, generator=generator)
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] = step(x)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    if rank == 0:
        report(times, losses)
    dist.destroy_process_group()


def report(times: dict[str, list[float]], losses: dict[str, float]) -> None:
    """A line a mode; the first round warms up."""
    print(f"{'mode':>6} {'ms/step':>8} {'ratio':>6}  loss")
    for name, seconds in times.items():
        of_rounds = ratios(seconds, times["torch"])
        milliseconds = 1000 * statistics.median(seconds[1:])
        ratio = statistics.median(of_rounds)
        print(f"{name:>6} {milliseconds:8.1f} {ratio:6.3f}  {losses[name]:.6f}")


def main() -> None:
    parser = with_numbers(__doc__, ranks=2, rounds=7, tokens=4096, width=256, heads=4, port=29541)
    args = parser.parse_args()
    mp.spawn(run, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
