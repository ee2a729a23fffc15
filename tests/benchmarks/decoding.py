"""A step of a decoder over a long cache on two processes: ours, by hand, and one process.

    OMP_NUM_THREADS=1 python tests/benchmarks/decoding.py [--ranks 2] [--rounds 15]
        [--length 32768] [--width 512] [--heads 8] [--layers 2] [--profile FILE]

Each layer projects one token to a query, a key and a value, writes the last two to its caches,
which are buffers of `--length` positions, and attends over them. `ours` is `parallel="cp"`.
In `twin` each rank has its part of the caches by hand: it writes the token if it is one of its own
positions, multiplies the query with its keys, and the ranks all-reduce the largest scores, then the
sums of the exponentials with the products with the values. `one` is the plain module, on every rank
at the same time. The plan is made for this machine as `partitioner.profile` measures it at the
start, or as an earlier run measured it into `--profile`. All start from equal caches; tokens are
spread over the positions, so that either rank writes some. Modes take turns, and give the same
results, which is checked. Printed are the median milliseconds of a step of each, and the median
over rounds of the ratio to the twin's, with the least and the largest one.
"""

import argparse
import copy
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import print_table, start_rank, with_numbers
from torch import Tensor, nn
from torch.nn import functional

import partitioner

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

#: Most seconds in which the machine is measured.
MEASURING_S = 60.0


class Decoder(nn.Module):
    """Layers of attention that keep their caches as buffers: x, position -> x."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads, self.layers = args.heads, args.layers
        self.projections = nn.ModuleList(
            nn.Linear(args.width, 3 * args.width) for _ in range(args.layers)
        )
        for name in self.caches():
            shape = (1, args.heads, args.length, args.width // args.heads)
            self.register_buffer(name, torch.randn(shape))

    def caches(self) -> list[str]:
        """Names of the buffers."""
        return [f"{kind}{layer}" for layer in range(self.layers) for kind in ("keys", "values")]

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer, project in enumerate(self.projections):
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in project(x).chunk(3, -1)
            )
            keys, values = getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")
            x = x + self.attended(q, k, v, keys, values, position).transpose(1, 2).flatten(2)
        return x

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor
    ) -> Tensor:
        """The values that a token meets, after its own are written."""
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        seen = torch.arange(keys.shape[2]) <= position[:, None]
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


class Twin(Decoder):
    """The module by hand: a rank's part of the caches."""

    def __init__(self, whole: Decoder, args: argparse.Namespace, rank: int) -> None:
        nn.Module.__init__(self)
        self.heads, self.layers = whole.heads, whole.layers
        self.projections = copy.deepcopy(whole.projections)
        self.count = args.length // args.ranks
        self.first = rank * self.count
        for name in whole.caches():
            own = getattr(whole, name)[:, :, self.first : self.first + self.count]
            self.register_buffer(name, own.clone())

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor
    ) -> Tensor:
        place = int(position) - self.first
        if 0 <= place < self.count:
            keys[:, :, place : place + 1], values[:, :, place : place + 1] = k, v
        scores = (q * q.shape[-1] ** -0.5) @ keys.mT
        scores[..., max(0, place + 1) :] = float("-inf")
        largest = scores.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        weights = scores.sub_(largest).exp_()
        sums = torch.cat([weights.sum(-1, keepdim=True), weights @ values], -1)
        dist.all_reduce(sums)
        return sums[..., 1:] / sums[..., :1]


def run(rank: int, args: argparse.Namespace) -> None:
    start_rank(rank, args.ranks, args.port)
    torch.manual_seed(0)
    whole = Decoder(args).eval()
    example = torch.randn(1, 1, args.width), torch.tensor([0])
    program = partitioner.compile(
        *(copy.deepcopy(whole), example, args.ranks),
        parallel="cp",
        cluster="local",
        profile=args.profile,
    )
    if rank == 0:
        print(program, flush=True)
    modes: dict[str, nn.Module] = {
        "ours": program.module(check_inputs=0),
        "twin": Twin(whole, args, rank),
        "one": whole,
    }
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for step in range(args.rounds + 1):
        place = args.length - 1 - step * args.length // (2 * args.rounds)
        x, position = torch.randn(1, 1, args.width), torch.tensor([place])
        results = {}
        for name, module in modes.items():
            dist.barrier()
            start = time.perf_counter()
            with torch.no_grad():
                results[name] = module(x, position)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
        for name in ("ours", "twin"):
            torch.testing.assert_close(results[name], results["one"], rtol=1e-4, atol=1e-4)
    if rank == 0:
        print_table(seconds, 6, lambda _: "twin")
    dist.destroy_process_group()


def main() -> None:
    parser = with_numbers(
        __doc__, ranks=2, rounds=15, length=32768, width=512, heads=8, layers=2, port=29543
    )
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args.profile = args.profile or Path(folder) / "profile.sqlite"
        example = torch.randn(1, 1, args.width), torch.tensor([0])
        print(
            partitioner.profile(
                *(Decoder(args).eval(), example, args.ranks),
                profile=args.profile,
                time_limit_s=MEASURING_S,
            ),
            flush=True,
        )
        mp.spawn(run, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
