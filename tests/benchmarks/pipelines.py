"""Training in stages on two processes: predicted beside measured, and beside PyTorch's pipelines.

    OMP_NUM_THREADS=1 python tests/benchmarks/pipelines.py --part profile|schedules|twin|cut|calls
        [--layers 8] [--width 256] [--tokens 128] [--batch 8] [--counts 2,4,8]
        [--schedules gpipe,1f1b,interleaved,zb1,zbv] [--rounds 7] [--steps 2] [--profile FILE]
        [--time-limit 120] [--json FILE]

A small GPT is trained on two processes of one thread each, which talk over gloo; a step is all
micro-batches of a batch forward and backward, and AdamW. All ways of a part take turns, round by
round; printed are medians over the rounds.

`schedules`: the simulated step beside the measured one, for each schedule and number of
micro-batches, with as many layers in each stage. Costs are those that `partitioner.profile`
measures of the micro-batches at the start, in at most `--time-limit` seconds for each of their
sizes, or those that an earlier run measured into `--profile`. So the table can be made in pieces:
`--part profile` measures only, and `--counts` and `--schedules` choose cells. Speed is the median
seconds of a product of matrices beside the runs, over that beside the profiling: other tenants of a
machine change its speed.
`twin`: each schedule beside `torch.distributed.pipelining` with the same stages, by the clock and
by the seconds that both processes compute.
`cut`: the stages that the search finds beside those of as many layers each, of a GPT whose layers
have unlike widths.
`calls`: one process with all layers in one stage, beside PyTorch with the same micro-batches by
hand: seconds of the processor in a step, which other tenants change little, and the operators that
a step calls.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.utils._python_dispatch import TorchDispatchMode

import partitioner
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.graph import Graph
from partitioner.ir.pipeline.generate import textbook_lanes
from partitioner.rewrites.staging import changing_nodes
from partitioner.strategies.constraints import Constraints

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from accuracy import reference_s
from training import GPT, VOCABULARY, Block

from helpers.plans.staged import on_trace, staged_plan, traced

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

RANKS = 2
TWICE = ("interleaved", "zbv", "dualpipev")  #: Schedules with two stages on each process.
#: PyTorch's schedules by our names; the first two take one stage, the others a list.
TWINS: Mapping[str, Callable[..., Any]] = {
    "gpipe": lambda stages, *args, **options: pipelining.ScheduleGPipe(
        *(stages[0], *args), **options
    ),
    "1f1b": lambda stages, *args, **options: pipelining.Schedule1F1B(
        *(stages[0], *args), **options
    ),
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb1": ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], float]


class Widened(Block):
    """A transformer block whose feed-forward part has a width of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, 64)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


class UnevenGPT(GPT):
    """A GPT whose layers have inner widths of their own; it returns its loss."""

    def __init__(self, width: int, tokens: int, inner: Sequence[int]) -> None:
        super().__init__(0, width, tokens)
        self.blocks.extend(Widened(width, one) for one in inner)


class Stage(nn.Module):
    """A stage of a GPT by hand."""

    def __init__(self, whole: UnevenGPT, stage: int, stages: int) -> None:
        super().__init__()
        layers = len(whole.blocks)
        own = [i for i in range(layers) if i * stages // layers == stage]
        self.blocks = nn.ModuleList(whole.blocks[i] for i in own)
        self.begin = nn.ModuleList([whole.embed, whole.place] if stage == 0 else [])
        self.end = nn.Sequential(*([whole.norm, whole.head] if stage == stages - 1 else []))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.begin:
            embed, place = self.begin
            x = embed(x) + place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(args: argparse.Namespace) -> UnevenGPT:
    """The model, the same each time."""
    torch.manual_seed(0)
    inner = [4 * args.width] * args.layers
    if args.part == "cut":  # the last quarter of the layers are three times as wide
        inner[-args.layers // 4 :] = [12 * args.width] * (args.layers // 4)
    return UnevenGPT(args.width, args.tokens, inner)


def example(args: argparse.Namespace) -> Batch:
    ids = torch.zeros(args.batch, args.tokens, dtype=torch.long)
    return ids, ids


# Ours ------------------------------------------------------------------------------------------


def lanes(schedule: str) -> tuple[int, ...]:
    """The process of each stage."""
    return textbook_lanes(schedule, RANKS * (2 if schedule in TWICE else 1))


def even_layers(trace: TracedModule, layers: int, stages: int) -> dict[str, int]:
    """Stage of each node of the forward pass: as many layers in each, and ends where `Stage` ends.

    Nodes of no submodule go with the one before.
    """
    paths = {"embed": 0, "place": 0, "norm": stages - 1, "head": stages - 1}
    paths |= {f"blocks.{i}": i * stages // layers for i in range(layers)}
    pins = Constraints.placed(paths)
    stage_of, stage = {}, 0
    for node in changing_nodes(trace.graph):
        stage = next(iter(pins.group_of(node)), stage)
        stage_of[node.name] = stage
    return stage_of


@dataclass
class Ours:
    """Programs of a model; a trace serves all schedules of as many micro-batches."""

    args: argparse.Namespace
    cluster: Cluster

    def __post_init__(self) -> None:
        self._traces: dict[int, TracedModule] = {}

    def program(self, schedule: str, count: int) -> Any:
        """The program with as many layers in each stage."""
        if count not in self._traces:
            self._traces[count] = traced(made(self.args), example(self.args), count)
        trace, of_stages = self._traces[count], lanes(schedule)
        devices = [(lane,) for lane in of_stages]

        def stages(_: Graph) -> dict[str, int]:
            return even_layers(trace, self.args.layers, len(devices))

        plan = staged_plan(trace.graph, devices, schedule, count, stages)
        return on_trace(trace, plan, cluster=self.cluster)


def our_step(program: Any) -> Step:
    module = program.module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(batch: Batch) -> float:
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


# By hand ---------------------------------------------------------------------------------------


def their_step(args: argparse.Namespace, rank: int, name: str, count: int) -> Step:
    """A step of PyTorch's own pipeline; the loss is that of the last stage's process, else 0."""
    whole, of_stages = made(args), lanes(name)
    own = [i for i, lane in enumerate(of_stages) if lane == rank]
    parts = [Stage(whole, i, len(of_stages)) for i in own]
    stages = [
        PipelineStage(part, i, len(of_stages), torch.device("cpu"))
        for i, part in zip(own, parts, strict=True)
    ]
    schedule = TWINS[name](stages, count, loss_fn=loss_of)
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step(batch: Batch) -> float:
        ids, labels = batch
        losses: list[torch.Tensor] = []
        given = (ids,) if 0 in own else ()
        wanted = {"target": labels, "losses": losses} if len(of_stages) - 1 in own else {}
        schedule.step(*given, **wanted, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step


# Runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to run a step.

    Attributes:
        name: Its name.
        step: A step.
        predicted_s: Its simulated seconds; None for PyTorch's own.
    """

    name: str
    step: Step
    predicted_s: float | None


def ways(args: argparse.Namespace, rank: int) -> Iterator[Way]:
    """The ways of a part."""
    cluster = resolve_cluster(f"{RANKS}xlocal", profile=args.profile)
    ours = Ours(args, cluster)
    if args.part == "cut":
        count = args.counts[-1]
        for name in args.schedules:
            even = ours.program(name, count)
            yield Way(f"{name} {count} even", our_step(even), even.evaluation.step_s)
            program = partitioner.compile(
                *(made(args), example(args), RANKS),
                cluster="local",
                profile=args.profile,
                training=True,
                parallel="pp",
                schedule=name,
                micro_batches=count,
            )
            yield Way(f"{name} {count} ours", our_step(program), program.evaluation.step_s)
        return
    for name, count in itertools.product(args.schedules, args.counts):
        program = ours.program(name, count)
        yield Way(f"{name} {count} ours", our_step(program), program.evaluation.step_s)
        if args.part == "twin":
            yield Way(f"{name} {count} theirs", their_step(args, rank, name, count), None)


def run(rank: int, args: argparse.Namespace, port: int, target: Path) -> None:
    """Run all ways on one of the processes; the first round warms up."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(where, RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    all_ways = list(ways(args, rank))
    generator = torch.Generator().manual_seed(1)
    times: dict[str, list[float]] = {way.name: [] for way in all_ways}
    computing: dict[str, list[float]] = {way.name: [] for way in all_ways}
    beside: list[float] = []
    losses: dict[str, torch.Tensor] = {}
    gc.collect()
    for number in range(args.rounds + 1):
        ids, labels = torch.randint(VOCABULARY, (2, args.batch, args.tokens), generator=generator)
        beside.append(reference_s("cpu"))
        for way in all_ways:
            dist.barrier()
            begin, begin_computing = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                loss = way.step((ids, labels))
            dist.barrier()
            took_s = (time.perf_counter() - begin) / args.steps
            computed_s = torch.tensor((time.process_time() - begin_computing) / args.steps)
            dist.all_reduce(computed_s)
            losses[way.name] = torch.tensor(loss)
            if number:
                times[way.name].append(took_s)
                computing[way.name].append(float(computed_s))
    for loss_of_way in losses.values():  # by hand, one process has it
        dist.all_reduce(loss_of_way, dist.ReduceOp.MAX)
    if rank == 0:
        told = {
            "times": times,
            "computing": computing,
            "losses": {name: float(one) for name, one in losses.items()},
            "predicted": {way.name: way.predicted_s for way in all_ways},
            "reference_s": statistics.median(beside),
        }
        target.write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> float:
    """Profile the micro-batches; returns the seconds of the reference product meanwhile."""
    before_s = reference_s("cpu")
    beside = args.profile.with_suffix(".seconds")
    for count in args.counts[-1:] if args.part == "cut" else args.counts:
        print(
            partitioner.profile(
                *(made(args), example(args), RANKS),
                training=True,
                strategy="inter",
                micro_batches=count,
                profile=args.profile,
                time_limit_s=args.time_limit,
            ),
            flush=True,
        )
    if args.part == "profile" or not beside.exists():
        beside.write_text(str((before_s + reference_s("cpu")) / 2))
    return float(beside.read_text())


# One process -----------------------------------------------------------------------------------


def alone_by_hand(args: argparse.Namespace, count: int) -> Step:
    """A step of PyTorch's own in one process, with gradients added up over micro-batches."""
    whole = made(args)
    stage = Stage(whole, 0, 1)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-4)

    def step(batch: Batch) -> float:
        losses = []
        for ids, labels in zip(*(part.chunk(count) for part in batch), strict=True):
            loss = loss_of(stage(ids), labels)
            (loss / count).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean())

    return step


def alone(args: argparse.Namespace, count: int) -> Step:
    """A step of ours in one process, as one stage."""
    trace = traced(made(args), example(args), count)

    def one_stage(_: Graph) -> dict[str, int]:
        return even_layers(trace, args.layers, 1)

    return our_step(on_trace(trace, staged_plan(trace.graph, [(0,)], "1f1b", count, one_stage)))


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_calls(args: argparse.Namespace, port: int) -> None:
    """Print seconds and calls of a step in one process."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(where, RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(VOCABULARY, (2, args.batch, args.tokens), generator=generator)
    for count in args.counts:
        steps = {"ours": alone(args, count), "theirs": alone_by_hand(args, count)}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(args.rounds + 1):
            for name, step in steps.items():
                begin = time.process_time()
                step((ids, labels))
                if number:
                    seconds[name].append(time.process_time() - begin)
        ratios = ratios_of(seconds["ours"], seconds["theirs"])
        print(f"{count} micro-batches: ratio {statistics.median(ratios):.3f}", end="")
        for name, step in steps.items():
            with Calls() as calls:
                step((ids, labels))
            own = sum(n for call, n in calls.counts.items() if call.startswith("partitioner."))
            print(
                f"; {name} {statistics.median(seconds[name]) * 1e3:.1f} ms, "
                f"{calls.counts.total()} calls, {own} of our operators",
                end="",
            )
        print()
    dist.destroy_process_group()


# Tables ----------------------------------------------------------------------------------------


def report(args: argparse.Namespace, told: Mapping[str, Any], profiled_s: float) -> None:
    times: Mapping[str, list[float]] = told["times"]
    measured = {name: statistics.median(some) for name, some in times.items()}
    if args.part == "schedules":
        report_predictions(told, measured, told["reference_s"] / profiled_s)
        return
    first, second = ("ours", "theirs") if args.part == "twin" else ("ours", "even")
    heads = f"{first:>8} {second:>8}  ratio  (ms a step)      computing"
    print(f"{'schedule':>12} {'m-b':>4} {heads}       loss")
    for name in (one for one in times if one.endswith(first)):
        other = name.removesuffix(first) + second
        ratios = ratios_of(times[name], times[other])
        computing = ratios_of(told["computing"][name], told["computing"][other])
        schedule, count, _ = name.split()
        print(
            f"{schedule:>12} {count:>4} {measured[name] * 1e3:8.1f} {measured[other] * 1e3:8.1f} "
            f"{statistics.median(ratios):6.3f}  ({min(ratios):.3f} to {max(ratios):.3f})  "
            f"{statistics.median(computing):.3f} ({min(computing):.3f} to {max(computing):.3f})  "
            f"{told['losses'][name]:.5f} {told['losses'][other]:.5f}"
        )


def ratios_of(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(some, others, strict=True)]


def report_predictions(
    told: Mapping[str, Any], measured: Mapping[str, float], speed: float
) -> None:
    """Predicted beside measured, and the order of the schedules."""
    predicted: Mapping[str, float] = told["predicted"]
    errors = {name: predicted[name] / measured[name] - 1 for name in measured}
    print(f"{'schedule':>12} {'m-b':>4} {'predicted':>9} {'measured':>9}    error  (ms a step)")
    for name, error in errors.items():
        schedule, count, _ = name.split()
        print(
            f"{schedule:>12} {count:>4} {predicted[name] * 1e3:9.1f} {measured[name] * 1e3:9.1f} "
            f"{error:+8.1%}"
        )
    steady = [abs((1 + error) * speed - 1) for error in errors.values()]
    print(
        f"median error {statistics.median(map(abs, errors.values())):.1%}, at the machine's speed "
        f"of the profiling (x {speed:.3f}) {statistics.median(steady):.1%}"
    )
    pairs = list(itertools.combinations(measured, 2))
    for title, least in (("all pairs", 1.0), ("over 5 % apart", 1.05), ("over 10 % apart", 1.1)):
        for same in (False, True):
            some = [
                (a, b)
                for a, b in pairs
                if max(measured[a], measured[b]) >= least * min(measured[a], measured[b])
                and (not same or a.split()[1] == b.split()[1])
            ]
            right = sum(
                (measured[a] < measured[b]) == (predicted[a] < predicted[b]) for a, b in some
            )
            which = " of as many micro-batches" if same else ""
            print(f"  {title}{which}: {right} of {len(some)} ordered right")


def main() -> None:
    """Print the table of a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"profile": "2,4,8", "schedules": "2,4,8", "twin": "4", "cut": "4", "calls": "2,8"}
    parser.add_argument("--part", choices=parts, required=True)
    for name, default in (
        *(("layers", 8), ("width", 256), ("tokens", 128)),
        *(("batch", 8), ("rounds", 7), ("steps", 2)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--counts", default="")
    parser.add_argument("--schedules", default="")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    some = {"cut": "1f1b"}.get(args.part, "gpipe,1f1b,interleaved,zb1,zbv")
    args.counts = [int(count) for count in (args.counts or parts[args.part]).split(",")]
    args.schedules = (args.schedules or some).split(",")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        target = Path(folder) / "told.json"
        args.profile = args.profile or Path(folder) / "profile.sqlite"
        if args.part == "calls":
            server.close()
            count_calls(args, port)
            return
        profiled_s = measure(args) if args.part != "twin" else reference_s("cpu")
        if args.part == "profile":
            return
        server.close()
        mp.spawn(run, (args, port, target), nprocs=RANKS)
        told = json.loads(target.read_text())
    report(args, told, profiled_s)
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
