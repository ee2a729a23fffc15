"""A training step of a small GPT on two processes: ours against PyTorch's own, in one run.

    OMP_NUM_THREADS=1 python tests/benchmarks/training.py [--ranks 2] [--rounds 7] [--steps 3]
        [--only ddp,dp,...] [--layers 4] [--width 512] [--tokens 128] [--batch 8] [--fused]

Modes: `one` (the plain module on every rank, for scale), `ddp` (DistributedDataParallel), `fsdp`
(fully_shard of each block and the whole), `hand-tp` (parallelize_module, blocks and head), and
ours: `dp`, `zero3`, `tp` (forced), `auto` (the cheapest plan by the cost model). A step is forward,
backward, AdamW and zero_grad; `--fused` takes PyTorch's fused AdamW, which refuses `hand-tp`, whose
parameters are DTensors only in part. Modes take turns, round by round; printed are the median
milliseconds of a step, and the median over rounds of the ratio to the twin of the same round. The
cluster that `auto` is planned for is measured at the start: matrix products, copies, launches,
gloo's collectives between products, and the share of them that products hide.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
from partitioner.cost_model.cluster import Cluster, DeviceSpec, LinkLevel

VOCABULARY = 4096
TWINS = {"dp": "ddp", "zero3": "fsdp", "tp": "hand-tp"}

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

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def seconds_of(actions: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Median seconds of each action, equally often on every rank.

    They take turns of five runs in a row, behind one that is not counted.
    """
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(turns):
        for name, action in actions.items():
            action()
            for _ in range(5):
                start = time.perf_counter()
                action()
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measured_cluster(ranks: int) -> Cluster:
    """This machine as a cluster, the same figures on all ranks.

    Collectives are measured as a step has them, each after a product of every rank: the wait for
    the slower rank is part of what a collective costs. What is hidden is the share of it that is
    saved if only the last one is waited for. At the measured sizes the cost model gives the
    measured seconds of each collective: a rate is of what its hops' latency leaves.
    """
    a, b = torch.randn(1024, 512), torch.randn(512, 512)
    big, tiny = torch.randn(1 << 22), torch.randn(4)
    small, large = torch.randn(16), torch.randn(ranks << 18)
    part, whole = torch.empty(1 << 18), torch.empty(ranks * large.numel())
    collectives: dict[str, Callable[[], object]] = {
        "latency": lambda: dist.all_reduce(small),
        "reduce": lambda: dist.all_reduce(large),
        "scatter": lambda: dist.reduce_scatter_tensor(part, large),
        "gather": lambda: dist.all_gather_into_tensor(whole, large),
    }

    def product() -> object:
        return a @ b

    def behind_product(collective: Callable[[], object]) -> Callable[[], object]:
        return lambda: (product(), collective())

    found = seconds_of(
        {
            "compute": product,
            "copy": big.clone,
            "launch": lambda: tiny + tiny,
            **{f"{name} alone": run for name, run in collectives.items()},
            **{name: behind_product(run) for name, run in collectives.items()},
        }
    )
    for name in collectives:  # seconds that it adds to a product, and no less than it takes alone
        found[name] = max(found[f"{name} alone"], found[name] - found["compute"])
    found["hidden"] = hidden_share(product, large)
    shared = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(shared)
    mean = dict(zip(found, (shared / ranks).tolist(), strict=True))
    rounds, share = ranks - 1, (ranks - 1) / ranks
    hop_s = mean["latency"] / (2 * rounds)
    flops = 2 * 1024 * 512 * 512 / mean["compute"]
    moved = 2 * big.nbytes / mean["copy"]
    device = DeviceSpec("core", {"float32": flops}, moved, 8 << 30, mean["launch"])

    def rate(nbytes: float, seconds: float, hops: int) -> float:
        return nbytes / max(seconds - hops * hop_s, seconds / 10)

    link = LinkLevel(
        "gloo",
        ranks,
        rate(large.nbytes * rounds, mean["gather"], rounds),
        hop_s,
        rate(2 * large.nbytes * share, mean["reduce"], 2 * rounds),
        rate(large.nbytes * share, mean["scatter"], rounds),
        mean["hidden"],
    )
    return Cluster("measured", (device,) * ranks, (link,))


def hidden_share(product: Callable[[], object], tensor: torch.Tensor) -> float:
    """Of the seconds that all-reduces add to products, those that later products hide."""
    count = 8

    def computed() -> None:
        for _ in range(count):
            product()

    def waited() -> None:
        for _ in range(count):
            product()
            dist.all_reduce(tensor)

    def left() -> None:
        works = []
        for _ in range(count):
            product()
            works.append(dist.all_reduce(tensor, async_op=True))
        for work in works:
            work.wait()

    found = seconds_of({"computed": computed, "waited": waited, "left": left})
    added, shown = found["waited"] - found["computed"], found["left"] - found["computed"]
    return min(1.0, max(0.0, 1 - shown / added)) if added > 0 else 0.0


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
        torch.manual_seed(0)
        return GPT(args.layers, args.width, args.tokens)

    def ours(**options: object) -> nn.Module:
        example = torch.zeros(args.batch, args.tokens, dtype=torch.long)
        program = partitioner.compile(
            model(), (example, example), cluster=cluster, training=True, **options
        )
        if rank == 0:
            seconds = {key: round(value, 2) for key, value in program.seconds.items()}
            print(options.get("parallel", "auto"), program, seconds, flush=True)
        return program.module()

    cluster = measured_cluster(args.ranks)
    if rank == 0:
        print(cluster.devices[0], cluster.levels[0], flush=True)
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
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(args.port),
        RANK=str(rank),
        WORLD_SIZE=str(args.ranks),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = dict(modes(args, rank))
    generator = torch.Generator().manual_seed(1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for _ in range(args.rounds + 1):
        shape = (2, args.batch, args.tokens)
        ids, labels = torch.randint(VOCABULARY, shape, generator=generator)
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.steps):
                losses[name] = step((ids, labels))
            dist.barrier()
            times[name].append((time.perf_counter() - start) / args.steps)
    if rank == 0:
        report(times, losses)
    dist.destroy_process_group()


def report(times: dict[str, list[float]], losses: dict[str, float]) -> None:
    """A line a mode; the first round warms up."""
    twins = [found for name, found in times.items() if name in TWINS.values()]
    best = [min(found) for found in zip(*twins, strict=True)]
    print(f"{'mode':>8} {'ms/step':>8}  {'ratio':>12}  loss")
    for name, found in times.items():
        ratio = ""
        if name in TWINS and TWINS[name] in times:
            ratios = [a / b for a, b in zip(found[1:], times[TWINS[name]][1:], strict=True)]
            ratio = f"{statistics.median(ratios):.3f} {TWINS[name]}"
        elif name == "auto" and best:
            ratios = [a / b for a, b in zip(found[1:], best[1:], strict=True)]
            ratio = f"{statistics.median(ratios):.3f} best"
        milliseconds = 1000 * statistics.median(found[1:])
        print(f"{name:>8} {milliseconds:8.1f}  {ratio:>12}  {losses[name]:.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        *(("ranks", 2), ("rounds", 7), ("steps", 3), ("layers", 4)),
        *(("width", 512), ("tokens", 128), ("batch", 8), ("port", 29533)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="")
    parser.add_argument("--fused", action="store_true")
    args = parser.parse_args()
    mp.spawn(run, (args,), nprocs=args.ranks)


if __name__ == "__main__":
    main()
