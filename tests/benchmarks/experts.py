"""A layer of experts on two processes: ours by parallel= against one by all_to_all_single.

    OMP_NUM_THREADS=1 python tests/benchmarks/experts.py [--ranks 2] [--rounds 15] [--tokens 2048]
        [--width 512] [--inner 1024] [--experts 8] [--chosen 2] [--parallel ep|dispatch]

The twin is written as such layers are by hand: rows are sorted by expert, the ranks exchange how
many each sends to each expert, rows go to their experts by `all_to_all_single` and come back by
another, and an autograd function sends gradients the other way. `forward` computes the loss,
`step` its gradients too. Both have their own half of the tokens and of the experts, take turns
round by round, and give the same losses and gradients, which is checked. Printed are the least
milliseconds of each, and the median over rounds of the ratio of ours to the twin's of the same
round: of the seconds that pass, and of those that rank 0 computes (all its threads), on which what
else runs on the machine has little influence.
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
from side_by_side import start_rank, with_numbers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import partitioner

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured


class Layer(nn.Module):
    """A norm, a router and gated experts; returns the mean square of the difference to a target."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.chosen = args.chosen
        self.norm = nn.LayerNorm(args.width)
        self.router = nn.Parameter(torch.randn(args.experts, args.width) / args.width**0.5)
        shape = (args.experts, 2 * args.inner, args.width)
        self.up = nn.Parameter(torch.randn(shape) / args.width**0.5)
        shape = (args.experts, args.width, args.inner)
        self.down = nn.Parameter(torch.randn(shape) / args.inner**0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids of the experts of each token."""
        weights, ids = torch.topk(torch.softmax(x @ self.router.T, -1), self.chosen)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(x)
        weights, ids = self.route(x)
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(self.chosen, dim=0)
        before = torch.bmm(self.up[flat], rows.unsqueeze(-1)).squeeze(-1)
        gate, other = before.chunk(2, -1)
        inner = F.silu(gate) * other
        results = torch.bmm(self.down[flat], inner.unsqueeze(-1)).squeeze(-1)
        results = results * weights.reshape(-1).unsqueeze(-1)
        out = results.view(x.shape[0], self.chosen, -1).sum(1)
        return (out - target).square().mean()


class Exchange(torch.autograd.Function):
    """Rows to the ranks that are to have them; gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        out = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.splits
        out = grad.new_empty((sum(sent), grad.shape[1]))
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class Twin(Layer):
    """The layer by hand, with this rank's experts."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        super().__init__(args)
        self.ranks, self.tokens, local = args.ranks, args.tokens, args.experts // args.ranks
        own = slice(rank * local, (rank + 1) * local)
        self.up = nn.Parameter(self.up.detach()[own].clone())
        self.down = nn.Parameter(self.down.detach()[own].clone())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(x)
        weights, ids = self.route(x)
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=self.ranks * len(self.up))
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        received = arriving.view(self.ranks, -1).sum(1).tolist()
        rows = Exchange.apply(x[order // self.chosen], sent, received)
        expert = torch.arange(len(self.up)).repeat(self.ranks).repeat_interleave(arriving)
        grouped = torch.argsort(expert, stable=True)
        parts = rows[grouped].split(arriving.view(self.ranks, -1).sum(0).tolist())
        results = []
        for place, part in enumerate(parts):
            gate, other = (part @ self.up[place].T).chunk(2, -1)
            results.append((F.silu(gate) * other) @ self.down[place].T)
        joined = torch.cat(results)
        back = torch.empty_like(joined).index_copy(0, grouped, joined)
        back = Exchange.apply(back, received, sent)
        sorted_back = torch.empty_like(back).index_copy(0, order, back)
        weighted = sorted_back * weights.reshape(-1, 1)
        out = weighted.view(x.shape[0], self.chosen, -1).sum(1)
        return (out - target).square().sum() / (self.tokens * out.shape[1])


def run(rank: int, args: argparse.Namespace) -> None:
    start_rank(rank, args.ranks, args.port)
    torch.manual_seed(0)
    x, target = torch.randn(2, args.tokens, args.width)
    ours = {training: compiled(args, (x, target), rank, training) for training in (False, True)}
    torch.manual_seed(1)
    twin = Twin(args, rank)
    rows = args.tokens // args.ranks
    own = x[rank * rows : (rank + 1) * rows], target[rank * rows : (rank + 1) * rows]

    def forward(module: nn.Module) -> Tensor:
        with torch.no_grad():
            return module(*own)

    def step(module: nn.Module) -> Tensor:
        for parameter in module.parameters():
            parameter.grad = None
        loss = module(*own)
        loss.backward()
        if module is twin:  # as DistributedDataParallel does for what all ranks have
            for parameter in (twin.router, *twin.norm.parameters()):
                dist.all_reduce(parameter.grad)
        return loss.detach()

    modes: dict[str, Callable[[], Tensor]] = {
        "forward ours": lambda: forward(ours[False]),
        "forward twin": lambda: forward(twin),
        "step ours": lambda: step(ours[True]),
        "step twin": lambda: step(twin),
    }
    passed: dict[str, list[float]] = {name: [] for name in modes}
    computed: dict[str, list[float]] = {name: [] for name in modes}
    last = torch.zeros(())
    for _ in range(args.rounds + 1):
        for name, call in modes.items():
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            loss = call()
            dist.barrier()
            passed[name].append(time.perf_counter() - start)
            computed[name].append(time.process_time() - before)
            if name.endswith("twin"):
                dist.all_reduce(loss)
                torch.testing.assert_close(loss, last, rtol=1e-4, atol=1e-6)
            last = loss
    check(ours[True], twin)
    if rank == 0:
        report("passed", passed)
        report("computed", computed)
    dist.destroy_process_group()


def compiled(
    args: argparse.Namespace, example: tuple[Tensor, Tensor], rank: int, training: bool
) -> nn.Module:
    """The layer, expert-parallel, as this rank's module."""
    torch.manual_seed(1)
    program = partitioner.compile(
        *(Layer(args), example, args.ranks),
        training=training,
        parallel=args.parallel,
        cluster="local",
    )
    if rank == 0:
        print(program, flush=True)
        layers = [n.cuts for name, n in program.plan.nodes.items() if "experts" in name]
        print("layers:", [{k: str(cut) for k, cut in cuts.items()} for cuts in layers], flush=True)
    return program.module(inputs="local", check_inputs=0)


def check(ours: nn.Module, twin: Twin) -> None:
    """The gradients of both are equal."""
    for name, parameter in ours.named_parameters():
        grad: Any = parameter.grad
        expected = twin.get_parameter(name).grad
        torch.testing.assert_close(grad.to_local(), expected, rtol=1e-3, atol=1e-6)


def report(what: str, times: dict[str, list[float]]) -> None:
    """A line a pair; the first round warms up."""
    print(f"{what:>8} {'ours, ms':>9} {'twin, ms':>9} {'ratio':>6}  least and largest ratio")
    for name in ("forward", "step"):
        ours, twin = (times[f"{name} {side}"][1:] for side in ("ours", "twin"))
        ratios = sorted(a / b for a, b in zip(ours, twin, strict=True))
        print(
            f"{name:>8} {1000 * min(ours):9.1f} {1000 * min(twin):9.1f} "
            f"{statistics.median(ratios):6.3f}  {ratios[0]:.3f} to {ratios[-1]:.3f}"
        )


def main() -> None:
    parser = with_numbers(
        __doc__,
        ranks=2,
        rounds=15,
        tokens=2048,
        width=512,
        inner=1024,
        experts=8,
        chosen=2,
        port=29541,
    )
    parser.add_argument("--parallel", default="ep")
    args = parser.parse_args()
    mp.spawn(run, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
