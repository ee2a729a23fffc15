"""A large table cut by row over two processes: ours, by hand, and copies with gradients summed.

    OMP_NUM_THREADS=1 python tests/benchmarks/embeddings.py [--ranks 2] [--rounds 15]
        [--rows 100000] [--width 64] [--bags 4096] [--bag 8]

A module sums `--bag` rows of its table for each of the `--bags` samples, and a layer follows.
`rows` is our plan with the table cut by row and the samples cut, `twin` the same by hand: each rank
sums those rows of all bags that it has, and a reduce-scatter gives it its own samples; the
gradients of all samples are gathered. `copies` is DistributedDataParallel with the table whole on
each rank. Each rank has its own half of the samples. `forward` computes the loss, `step` its
gradients too. Rounds take turns, and all give the same losses and gradients, which is checked.
Printed are the median milliseconds of each, and the median over rounds of the ratio to the twin's,
with the least and the largest one.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import print_table, start_rank, with_numbers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn.parallel import DistributedDataParallel

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.strategies.constraints import Constraints, Pin

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured


class Bags(nn.Module):
    """Sums of rows of a table, and a layer; returns the mean square of what a target differs by."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(args.rows, args.width, mode="sum")
        self.top = nn.Linear(args.width, 16)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return (self.top(self.table(ids)) - target).square().mean()


class Summed(torch.autograd.Function):
    """Sums of the rows that a rank has, added up over ranks: each gets those of its own samples."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        out = parts.new_empty((parts.shape[0] // ranks, parts.shape[1]))
        dist.reduce_scatter_tensor(out, parts)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty((grad.shape[0] * ctx.ranks, grad.shape[1]))
        dist.all_gather_into_tensor(out, grad.contiguous())
        return out, None


class Twin(nn.Module):
    """The module by hand: a rank's rows of the table, and a last row of zeros for all others."""

    def __init__(self, whole: Bags, rank: int, ranks: int) -> None:
        super().__init__()
        self.ranks, self.count = ranks, len(whole.table.weight) // ranks
        self.first = rank * self.count
        own = whole.table.weight.detach()[self.first : self.first + self.count]
        self.weight = nn.Parameter(torch.cat([own, torch.zeros(1, own.shape[1])]))
        self.top = copy.deepcopy(whole.top)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        every = ids.new_empty((ids.shape[0] * self.ranks, ids.shape[1]))
        dist.all_gather_into_tensor(every, ids)
        places = every - self.first
        places = torch.where((places >= 0) & (places < self.count), places, self.count)
        parts = F.embedding_bag(places, self.weight, mode="sum", padding_idx=self.count)
        out: Tensor = self.top(Summed.apply(parts, self.ranks))
        return (out - target).square().mean() / self.ranks


def run(rank: int, args: argparse.Namespace) -> None:
    start_rank(rank, args.ranks, args.port)
    torch.manual_seed(0)
    ids = torch.randint(args.rows, (args.bags, args.bag))
    target = torch.randn(args.bags, 16)
    whole = Bags(args)
    samples = slice(rank * args.bags // args.ranks, (rank + 1) * args.bags // args.ranks)
    own = ids[samples], target[samples]
    programs = {is_step: compiled(args, whole, (ids, target), is_step) for is_step in (False, True)}
    ours = {key: one.module(inputs="local", check_inputs=0) for key, one in programs.items()}
    twin, copies = Twin(whole, rank, args.ranks), DistributedDataParallel(copy.deepcopy(whole))
    if rank == 0:
        print(programs[True], flush=True)

    modes: dict[str, Callable[[], Tensor]] = {
        "forward rows": lambda: forward(ours[False], own),
        "forward twin": lambda: forward(twin, own),
        "forward copies": lambda: forward(copies, own),
        "step rows": lambda: step(ours[True], own),
        "step twin": lambda: step(twin, own),
        "step copies": lambda: step(copies, own),
    }
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(args.rounds + 1):
        losses = []
        for name, call in modes.items():
            dist.barrier()
            start = time.perf_counter()
            loss = call()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            if not name.endswith("rows"):
                loss = loss / (args.ranks if name.endswith("copies") else 1)
                dist.all_reduce(loss)
            losses.append(loss)
        for loss in losses[1:]:
            torch.testing.assert_close(loss, losses[0], rtol=1e-4, atol=1e-6)
    check(ours[True], twin, copies)
    if rank == 0:
        print_table(seconds, 14, lambda name: f"{name.split()[0]} twin")
    dist.destroy_process_group()


def forward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.no_grad():
        loss: Tensor = module(*batch)
    return loss


def step(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    for parameter in module.parameters():
        parameter.grad = None
    loss: Tensor = module(*batch)
    loss.backward()
    if isinstance(module, Twin):
        for parameter in module.top.parameters():
            dist.all_reduce(parameter.grad)
    return loss.detach()


def compiled(
    args: argparse.Namespace, whole: Bags, example: tuple[Tensor, Tensor], training: bool
) -> ModuleProgram:
    """The plan that cuts the samples, and the table by row, where it lies and where it is read."""
    table = "table.weight.forward" if training else "table.weight"
    program = partitioner.compile(
        *(copy.deepcopy(whole), example, args.ranks),
        training=training,
        strategy="intra",
        cluster="local",
        constraints=Constraints(
            (
                *(Pin(name, tensor=name, dim=0) for name in ("ids", "target", "table.weight")),
                *(Pin(name, tensor=name, replicate=True) for name in ("top.weight", "top.bias")),
                Pin("rows that are read", tensor=table, dim=0),
            )
        ),
    )
    assert isinstance(program, ModuleProgram)
    return program


def check(ours: nn.Module, twin: Twin, copies: nn.Module) -> None:
    """The gradients of a rank's rows of the table are equal."""
    (table,) = (grad for name, grad in gradients(ours) if name == "table.weight")
    twins = dict(gradients(twin))["weight"][:-1]
    torch.testing.assert_close(table, twins, rtol=1e-3, atol=1e-7)
    theirs = dict(gradients(copies))["module.table.weight"]
    torch.testing.assert_close(
        twins, theirs[twin.first : twin.first + twin.count], rtol=1e-3, atol=1e-7
    )


def gradients(module: nn.Module) -> list[tuple[str, Tensor]]:
    grads: list[tuple[str, Any]] = [(name, one.grad) for name, one in module.named_parameters()]
    return [(name, grad.to_local() if hasattr(grad, "to_local") else grad) for name, grad in grads]


def main() -> None:
    parser = with_numbers(
        __doc__, ranks=2, rounds=15, rows=100_000, width=64, bags=4096, bag=8, port=29542
    )
    args = parser.parse_args()
    mp.spawn(run, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
