"""A chain of convolutions on an image of two halves, beside a twin written by hand.

    OMP_NUM_THREADS=1 python tests/benchmarks/halos.py [--rounds 15] [--size 512] [--layers 6]

Two gloo processes of one thread each, rows of the image cut in two. `plain` is our plan with a halo
before each convolution, `fused` the one that the search takes on a link of `--latency` seconds. The
twin sends and receives rows before each convolution (`batch_isend_irecv`), and pads. Rounds take
turns; seconds are the slower rank's, medians, and ratios are medians of the rounds' ratios.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import start_rank
from torch import Tensor, nn

import partitioner
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel
from partitioner.search.spaces import explicit

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

CALLS = 5  # of one program in a round


class Chain(nn.Module):
    """Convolutions of 3 x 3 and their ReLU, then the mean of each channel."""

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.relu(conv(x))
        return x.mean((2, 3))


class Twin(nn.Module):
    """The same on one rank's half of the rows."""

    def __init__(self, whole: Chain, rank: int, rows: int) -> None:
        super().__init__()
        self.convs, self.rank, self.rows = whole.convs, rank, rows

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        x = x[:, :, :half] if self.rank == 0 else x[:, :, half:]
        for conv in self.convs:
            x = torch.relu(self.convolved(conv, x))
        total = x.sum((2, 3))
        dist.all_reduce(total)
        return total / (self.rows * x.shape[3])

    def convolved(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        """Rows of the neighbour on one side, zeros on the others."""
        mine = x[:, :, -1:] if self.rank == 0 else x[:, :, :1]
        theirs, border = torch.empty_like(mine), torch.zeros_like(mine)
        other = 1 - self.rank
        calls = [
            dist.P2POp(dist.isend, mine.contiguous(), other),
            dist.P2POp(dist.irecv, theirs, other),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        rows = (border, x, theirs) if self.rank == 0 else (theirs, x, border)
        return nn.functional.conv2d(torch.cat(rows, 2), conv.weight, conv.bias, padding=(0, 1))


def program(net: Chain, x: Tensor, latency_s: float, *, fused: bool) -> partitioner.Compiled:
    """The plan of two ranks, with halos of chains fused or not."""
    spec = DeviceSpec("core", {"float32": 2e10}, 1e10, 8 << 30, 5e-6)
    cluster = Cluster("two cores", (spec,) * 2, (LinkLevel("lo", 2, 1e9, latency_s),))
    offered = explicit.FUSED
    explicit.FUSED = offered if fused else ()
    try:
        return partitioner.compile(
            net, (x,), cluster=cluster, parallel="spatial", mesh={"h": 2}, time_limit_s=30
        )
    finally:
        explicit.FUSED = offered


def seconds(run: Callable[[Tensor], object], x: Tensor) -> float:
    """Of one call, on the slower rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        run(x)
    taken = torch.tensor([(time.perf_counter() - begin) / CALLS])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def bench(rank: int, args: argparse.Namespace) -> None:
    start_rank(rank, 2, args.port)
    torch.manual_seed(0)
    net = Chain(args.layers, args.channels).eval()
    x = torch.randn(1, args.channels, args.size, args.size)
    runs: dict[str, Callable[[Tensor], Tensor]] = {"twin": Twin(net, rank, args.size)}
    for name in ("plain", "fused"):
        compiled = program(net, x, args.latency, fused=name == "fused")
        overlaps = sum(
            bool(cut.windows) for node in compiled.plan.nodes.values() for cut in node.cuts.values()
        )
        if rank == 0:
            print(f"{name}: {overlaps} operators compute rows twice")
        runs[name] = compiled.module()
    with torch.no_grad():
        wanted = net(x)
        for name, run in runs.items():
            torch.testing.assert_close(run(x), wanted, msg=name)
        table: Mapping[str, list[float]] = {name: [] for name in runs}
        for index in range(args.rounds):
            order = list(runs) if index % 2 else [*reversed(runs)]
            for name in order:
                table[name].append(seconds(runs[name], x))
    if rank == 0:
        for name, taken in table.items():
            ratio = statistics.median(a / b for a, b in zip(taken, table["twin"], strict=True))
            print(f"{name}: {1e3 * statistics.median(taken):.2f} ms, ratio to the twin {ratio:.3f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--latency", type=float, default=2e-4)
    parser.add_argument("--port", type=int, default=29547)
    args = parser.parse_args()
    mp.spawn(bench, (args,), nprocs=2)


if __name__ == "__main__":
    main()
