"""PyTorch alone: several all-gathers on their way over gloo, until the heap is spoiled.

    OMP_NUM_THREADS=1 python tests/benchmarks/gathers.py [--kind functional|out] [--seconds 15]

`functional` is `all_gather_into_tensor`, which ends one of the two processes by SIGSEGV or SIGABRT
(PyTorch 2.13: in eight of eight runs of 15 s on two quiet cores, less often on loaded ones); `out`
is `all_gather_into_tensor_out`, which programs use (in none of four).
"""

import argparse
import random
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import start_rank

c10d = torch.ops._c10d_functional
SIZES = (2, 6, 32, 64, 128, 1024, 4096, 50_000)


def gather(kind: str, operand: torch.Tensor, group: str) -> torch.Tensor:
    if kind == "functional":
        return c10d.all_gather_into_tensor(operand, 2, group)
    whole = operand.new_empty((2 * operand.shape[0], *operand.shape[1:]))
    return c10d.all_gather_into_tensor_out(operand, 2, group, out=whole)


def run(rank: int, args: argparse.Namespace) -> None:
    start_rank(rank, 2, args.port)
    group = dist.new_group([0, 1]).group_name
    chance = random.Random(0)
    end, late, rounds = time.monotonic() + args.seconds, torch.zeros(1), 0
    while not late:
        on_their_way: list[torch.Tensor] = []
        for _ in range(1500):
            operand = torch.randn(chance.choice(SIZES), 2)
            on_their_way.append(gather(args.kind, operand * 2, group))
            for _ in range(chance.randrange(20)):
                torch.randn(chance.choice(SIZES[:4]))
            while len(on_their_way) > chance.choice((0, 3, 6)):
                c10d.wait_tensor(on_their_way.pop(chance.randrange(len(on_their_way))))
        for tensor in on_their_way:
            c10d.wait_tensor(tensor)
        rounds += 1
        late[0] = time.monotonic() > end
        dist.all_reduce(late)
    if rank == 0:
        print(f"{args.kind}: {1500 * rounds} all-gathers")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("functional", "out"), default="functional")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--port", type=int, default=29544)
    args = parser.parse_args()
    mp.spawn(run, (args,), nprocs=2)


if __name__ == "__main__":
    main()
