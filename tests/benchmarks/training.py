"""A training step of a small GPT on two processes: ours against PyTorch's own, in one run.

    OMP_NUM_THREADS=1 python tests/benchmarks/training.py [--ranks 2] [--rounds 7] [--steps 3]
        [--only ddp,dp,...] [--layers 4] [--width 512] [--tokens 128] [--batch 8]
        [--vocabulary 4096] [--cluster local] [--fused] [--profile FILE] [--time-limit 120]
        [--lengths]

Modes: `one` (the plain module on every rank, for scale), `ddp` (DistributedDataParallel), `fsdp`
(fully_shard of each block and the whole), `hand-tp` (parallelize_module, blocks and head), and
ours: `dp`, `zero3`, `tp` (forced), `auto` (the cheapest plan by the cost model). A step is forward,
backward, AdamW and zero_grad; `--fused` takes PyTorch's fused AdamW, which refuses `hand-tp`, whose
parameters are DTensors only in part. Modes take turns, round by round; printed are the median
milliseconds of a step, those that the process computes in, with its threads, and the medians over
rounds of the ratios of both to the twin of the same round. Plans are made for this machine as
`partitioner.profile` measures it at the start, in at most `--time-limit` seconds, or as an earlier
run measured it into `--profile`; for a `--cluster` by name nothing is measured. Stages beside those
of `torch.distributed.pipelining` take turns in `pipelines.py --part twin`.

`--lengths` takes models with steps of one to forty milliseconds in place of one model, a table
each: the fixed cost of a step shows in the ratios of the shortest ones.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import ratios, start_rank, with_numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import partitioner

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

VOCABULARY = 4096
TWINS = {"dp": "ddp", "zero3": "fsdp", "tp": "hand-tp"}
#: Sizes of the models of `--lengths`, from the shortest step on.
LENGTHS = (
    {"layers": 0, "width": 32, "tokens": 8, "batch": 8, "vocabulary": 64},
    {"layers": 1, "width": 64, "tokens": 16, "batch": 8, "vocabulary": 256},
    {"layers": 1, "width": 128, "tokens": 32, "batch": 8, "vocabulary": 256},
    {"layers": 2, "width": 128, "tokens": 32, "batch": 8, "vocabulary": 512},
    {"layers": 2, "width": 192, "tokens": 64, "batch": 8, "vocabulary": 1024},
)

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]


class Block(nn.Module):
    """A transformer block; heads are counted by size, so that it works on a part of them."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(batch, tokens, -1, self.head).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns its loss."""

    def __init__(self, layers: int, width: int, tokens: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(args: argparse.Namespace) -> GPT:
    """The model, the same each time."""
    torch.manual_seed(0)
    return GPT(args.layers, args.width, args.tokens, args.vocabulary)


def models(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments for each model."""
    sizes = LENGTHS if args.lengths else ({},)
    return [argparse.Namespace(**{**vars(args), **one}) for one in sizes]


def measure(args: argparse.Namespace) -> None:
    """Measure this machine for the model, as many processes at once as there are ranks."""
    example = torch.zeros(args.batch, args.tokens, dtype=torch.long)
    print(
        partitioner.profile(
            *(made(args), (example, example), args.ranks),
            training=True,
            profile=args.profile,
            time_limit_s=args.time_limit,
        ),
        flush=True,
    )


def stepping(module: nn.Module, part: Callable[[Batch], Batch], *, fused: bool) -> Step:
    """A training step of a module on its part of the batch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=fused)

    def step(batch: Batch) -> float:
        loss = module(*part(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def modes(args: argparse.Namespace, rank: int) -> Iterator[tuple[str, Step]]:
    """Steps by mode."""
    mesh = init_device_mesh("cpu", (args.ranks,))
    rows = args.batch // args.ranks

    def whole(batch: Batch) -> Batch:
        return batch

    def own(batch: Batch) -> Batch:
        ids, labels = batch
        return ids[rank * rows : (rank + 1) * rows], labels[rank * rows : (rank + 1) * rows]

    def model() -> GPT:
        return made(args)

    def ours(**options: object) -> nn.Module:
        example = torch.zeros(args.batch, args.tokens, dtype=torch.long)
        program = partitioner.compile(
            *(model(), (example, example), args.ranks),
            cluster=args.cluster,
            profile=args.profile,
            training=True,
            **options,
        )
        if rank == 0:
            seconds = {key: round(value, 2) for key, value in program.seconds.items()}
            print(options.get("parallel", "auto"), program, seconds, flush=True)
        return program.module()

    wanted = set(args.only.split(",")) if args.only else None
    makers: dict[str, Callable[[], tuple[nn.Module, Callable[[Batch], Batch]]]] = {
        "one": lambda: (model(), whole),
        "ddp": lambda: (DistributedDataParallel(model()), own),
        "fsdp": lambda: (sharded(model(), mesh), own),
        "hand-tp": lambda: (tensor_parallel(model(), mesh), whole),
        "dp": lambda: (ours(parallel="dp"), whole),
        "zero3": lambda: (ours(parallel="zero3"), whole),
        "tp": lambda: (ours(parallel="tp"), whole),
        "auto": lambda: (ours(), whole),
    }
    for name, make in makers.items():
        if wanted is None or name in wanted:
            yield name, stepping(*make(), fused=args.fused)


def sharded(model: GPT, mesh: object) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: GPT, mesh: object) -> nn.Module:
    for block in model.blocks:
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        rows = dict.fromkeys(("o", "down"), RowwiseParallel())
        parallelize_module(block, mesh, {**columns, **rows})
    head = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, {"head": head})


def run(rank: int, args: argparse.Namespace) -> None:
    start_rank(rank, args.ranks, args.port)
    for one in models(args):
        take_turns(rank, one)
    dist.destroy_process_group()


def take_turns(rank: int, args: argparse.Namespace) -> None:
    """Measure the modes of a model, round by round."""
    steps = dict(modes(args, rank))
    generator = torch.Generator().manual_seed(1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    computing: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for _ in range(args.rounds + 1):
        shape = (2, args.batch, args.tokens)
        ids, labels = torch.randint(args.vocabulary, shape, generator=generator)
        for name, step in steps.items():
            dist.barrier()
            start, start_computing = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                losses[name] = step((ids, labels))
            dist.barrier()
            times[name].append((time.perf_counter() - start) / args.steps)
            computing[name].append((time.process_time() - start_computing) / args.steps)
    if rank == 0:
        report(times, computing, losses)


Times = dict[str, list[float]]


def report(times: Times, computing: Times, losses: dict[str, float]) -> None:
    """A line a mode; the first round warms up."""
    best = {
        id(of): [min(round_) for round_ in zip(*twins, strict=True)]
        for of in (times, computing)
        if (twins := [found for name, found in of.items() if name in TWINS.values()])
    }
    heads = f"{'ms/step':>8} {'computing':>9}", f"{'ratio':>7} {'computing':>9}"
    print(f"{'mode':>8} {heads[0]}  {heads[1]} to        loss")
    for name in times:
        twin = "best" if name == "auto" and best else TWINS.get(name, "")
        words = []
        for of, size in ((times, 7), (computing, 9)):
            beside = best[id(of)] if twin == "best" else of.get(twin)
            ratio = statistics.median(ratios(of[name], beside)) if beside else None
            words.append(f"{'' if ratio is None else f'{ratio:.3f}':>{size}}")
        ms, own = (1000 * statistics.median(of[name][1:]) for of in (times, computing))
        beside_what = twin if words[0].strip() else ""
        print(
            f"{name:>8} {ms:8.1f} {own:9.1f}  {' '.join(words)} {beside_what:8}  {losses[name]:.5f}"
        )


def main() -> None:
    parser = with_numbers(
        __doc__,
        ranks=2,
        rounds=7,
        steps=3,
        layers=4,
        width=512,
        tokens=128,
        batch=8,
        port=29533,
        vocabulary=VOCABULARY,
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--cluster", default="local")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--lengths", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.cluster == "local":
            args.profile = args.profile or Path(folder) / "profile.sqlite"
            for one in models(args):
                measure(one)
        mp.spawn(run, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
