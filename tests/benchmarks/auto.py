"""`compile` without a kind of parallelism beside all kinds that can be forced, at the same limit.

    OMP_NUM_THREADS=1 python tests/benchmarks/auto.py [--count 20] [--seed 0] [--only WORD]
        [--limit 20] [--cpu]

With --cpu the clock is this process's own: on a machine that others use, too, searches end where
they would on a quiet one.

Each sample is a model (16 kinds), a cluster, training or inference, a memory limit as a share of
what one device needs, and an objective, drawn with a seed; no weights are made. For each sample it
prints the cost of the plan that `compile` finds, the least cost of all forced plans and its
options, their ratio, and seconds over the time limit. A line that begins with `!` breaks a promise:
a ratio above 1.02, a refusal of what a forced plan fits, a bound above a forced plan, or more than
1.15 of the time limit. Exits with 1 if there is one.

A forced plan counts if its results are proven to be those of the whole batch.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from torch import Tensor, nn

import partitioner
from helpers.modules.sized_models import Called, Gpt, Loss, convolutions, ids, perceptron, t5
from helpers.modules.unets import UNet
from partitioner.examples import llama, zoo
from partitioner.ir.errors import PartitionerError
from partitioner.solver import work

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

#: Shares of what one device needs; None is no limit beyond the device's.
SHARES = (None, 0.6, 0.4, 0.25, 0.15)
MIXED = """
[[devices]]
count = 2
preset = "a100"
[[devices]]
count = 2
preset = "l4"
[[levels]]
name = "pcie"
bandwidth_bytes_per_s = 20e9
latency_s = 5e-6
"""
CLUSTERS = {
    "4 h100": "4xh100",
    "2 x 2 h100": "2x2xh100",
    "4 l4": "4xl4",
    "2 a100 + 2 l4": "mixed",
    "8 a100": "8xa100",
}


class Towers(nn.Module):
    """Two towers that meet in a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Sequential(*[nn.Linear(width, width), nn.ReLU()] * 3)
        self.other = nn.Sequential(*[nn.Linear(width, width), nn.Tanh()] * 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a) @ self.other(b).T


class Recommender(nn.Module):
    """Tables of embeddings beside a small perceptron."""

    def __init__(self, tables: int, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 64) for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(64 * tables, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        score: Tensor = self.top(torch.cat(found, 1))
        return score


class Cells(nn.Module):
    """Two LSTM cells over a few steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LSTMCell(width, width), nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        one = two = (torch.zeros_like(x[0]), torch.zeros_like(x[0]))
        for step in x:
            one = self.one(step, one)
            two = self.two(one[0], two)
        return two[0]


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        image_size=64,
        patch_size=8,
    )
    return Called(transformers.ViTForImageClassification(config), "pixel_values")


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Called(transformers.BertModel(config), "input_ids")


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return Called(model, "input_ids")


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], num_labels=100
    )
    return Called(transformers.ResNetForImageClassification(config), "pixel_values")


Made = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]
MODULES: Mapping[str, Made] = {
    "mlp": (lambda: perceptron(8, 1024), lambda: (torch.zeros(256, 1024),)),
    "gpt": (lambda: Gpt(4, 256, 4096), lambda: (ids(16, 128),)),
    "t5": (lambda: t5(3), lambda: (ids(16, 64), ids(16, 64))),
    "vit": (_vit, lambda: (torch.zeros(32, 3, 64, 64),)),
    "bert": (_bert, lambda: (ids(16, 128),)),
    "convnet": (lambda: convolutions(5), lambda: (torch.zeros(32, 3, 64, 64),)),
    "unet": (lambda: UNet(16, 3), lambda: (torch.zeros(8, 3, 128, 128),)),
    "resnet": (_resnet, lambda: (torch.zeros(32, 3, 64, 64),)),
    "moe": (_mixtral, lambda: (ids(8, 64),)),
    "towers": (lambda: Towers(1024), lambda: (torch.zeros(256, 1024), torch.zeros(256, 1024))),
    "recommender": (lambda: Recommender(8, 50_000), lambda: (ids(512, 8),)),
    "lstm": (lambda: Cells(512), lambda: (torch.zeros(12, 64, 512),)),
    "linear": (lambda: nn.Linear(16_384, 16_384), lambda: (torch.zeros(64, 16_384),)),
}
FILES = ("resnet50", "squeezenet", "llama")


@cache
def made(name: str, *, training: bool) -> tuple[Any, Any]:
    """The model, without weights, and its example inputs."""
    if name in FILES:
        build = {"llama": lambda: llama.build(layers=4, hidden=512, batch=8)}
        return build.get(name, lambda: zoo.build(name))(), None
    make, inputs = MODULES[name]
    with torch.device("meta"):
        module = make()
    module.train(training)
    return (Loss(module) if training else module), inputs()


@dataclass(frozen=True)
class Sample:
    """A request: what `compile` is asked without a kind of parallelism."""

    model: str
    cluster: str
    training: bool
    share: float | None
    objective: str

    def __str__(self) -> str:
        how = "training" if self.training else "inference"
        memory = "ample" if self.share is None else f"{self.share:.0%} of one device"
        return f"{self.model}, {self.cluster}, {how}, {memory}, {self.objective}"


def drawn(seed: int) -> Sample:
    """The sample of a seed."""
    rng = random.Random(seed)
    name = rng.choice([*MODULES, *FILES])
    return Sample(
        name,
        rng.choice(list(CLUSTERS)),
        rng.random() < 0.6 and name not in FILES,
        rng.choice(SHARES),
        "latency" if rng.random() < 0.2 else "throughput",
    )


@cache
def alone_bytes(name: str, *, training: bool) -> int:
    """Bytes that the model takes on one device."""
    result = planned(name, training=training, cluster="1xh200", time_limit_s=5.0)
    return max(result.evaluation.needed_bytes.values())


def planned(name: str, *, training: bool, **options: Any) -> Any:
    model, inputs = made(name, training=training)
    if name in FILES:
        return partitioner.compile(model, plan_only=True, **options)
    return partitioner.compile(model, inputs, training=training, **options)


def forced(sample: Sample, devices: int) -> Iterator[dict[str, Any]]:
    """Options that force a plan of one kind, mesh, schedule or number of micro-batches."""
    yield {"strategy": "inter"}
    kinds = ["dp", "tp", *(["zero1", "zero2", "zero3"] if sample.training else [])]
    kinds += ["spatial"] if sample.model in ("convnet", "unet", "resnet", *FILES[:2]) else []
    kinds += ["ep"] if sample.model == "moe" else []
    for kind in kinds:
        yield {"parallel": kind}
    yield {"parallel": "dp+tp"}
    yield {"parallel": "pp+tp"}
    meshes = [(a, devices // a) for a in range(2, devices) if devices % a == 0]
    for first, second in meshes:
        yield {"mesh": {"a": first, "b": second}}
        yield {"parallel": "dp+tp", "mesh": {"dp": first, "tp": second}}
        for kind in ("dp", "tp"):
            yield {"parallel": f"pp+{kind}", "mesh": {"pp": first, kind: second}}
    yield {"parallel": "pp"}
    schedules = ("gpipe", "1f1b", "zb1", "interleaved") if sample.training else ("forward",)
    for schedule in schedules:
        yield {"schedule": schedule}
    for count in (2, 4, 8):
        yield {"micro_batches": count}
    if sample.training:
        yield {"parallel": "zero3", "micro_batches": 4}
        yield {"recompute": True}


def checked(sample: Sample, folder: Path, limit_s: float) -> str:
    """A line on the sample; it begins with "! " if it breaks a promise."""
    cluster = CLUSTERS[sample.cluster]
    if cluster == "mixed":
        path = folder / "mixed.toml"
        path.write_text(MIXED)
        cluster = str(path)
    base: dict[str, Any] = {"cluster": cluster, "objective": sample.objective}
    base["time_limit_s"] = limit_s
    if sample.share is not None:
        base["memory"] = int(alone_bytes(sample.model, training=sample.training) * sample.share)
    made(sample.model, training=sample.training)  # no part of the time
    start = time.perf_counter()
    auto, bound, refusal = math.inf, 0.0, ""
    try:
        found = planned(sample.model, training=sample.training, **base)
    except PartitionerError as error:
        refusal = str(error).split(";")[0][:120]
    else:
        auto = found.evaluation.cost(sample.objective)
        bound = found.plan.certificate.bound
    wall_s = time.perf_counter() - start
    best, how, devices = math.inf, "", 8 if "8" in sample.cluster else 4
    for options in forced(sample, devices):
        try:
            other = planned(sample.model, training=sample.training, **{**base, **options})
        except PartitionerError:
            continue
        if any("not proven" in note for note in other.summary["notes"]):
            continue
        cost = other.evaluation.cost(sample.objective)
        if cost < best:
            best, how = cost, str(options)
    ratio = auto / best if best < math.inf else 0.0 if auto < math.inf else 1.0
    broken = ratio > 1.02 or bound > best * (1 + 1e-6) or wall_s > 1.15 * limit_s
    shown = f"refused ({refusal})" if refusal else f"{auto:.4g}"
    return (
        f"{'! ' if broken else ''}{sample}: {shown}, forced {best:.4g} {how}, ratio {ratio:.3f}, "
        f"bound {bound:.4g}, {wall_s / limit_s:.2f} of the limit"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="number of the first sample")
    parser.add_argument("--only", default="", help="samples whose text has this word")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of each search")
    parser.add_argument("--cpu", action="store_true", help="seconds are this process's own")
    args = parser.parse_args()
    if args.cpu:
        own: Any = SimpleNamespace(monotonic=time.process_time, perf_counter=time.process_time)
        globals()["time"] = work.time = own  # type: ignore[attr-defined]
    alone_bytes("linear", training=True)  # loads the tracer and the solver
    broken = seen = 0
    with tempfile.TemporaryDirectory() as folder:
        seed = args.seed
        while seen < args.count:
            sample = drawn(seed)
            seed += 1
            if args.only not in str(sample):
                continue
            line = checked(sample, Path(folder), args.limit)
            broken += line.startswith("!")
            seen += 1
            print(f"{line} [{seed - 1}]", flush=True)
    print(f"{seen} samples, {broken} break a promise")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
