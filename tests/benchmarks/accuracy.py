"""Predicted seconds beside measured ones: models in ONNX Runtime and training steps in PyTorch.

    OMP_NUM_THREADS=1 python tests/benchmarks/accuracy.py [--models resnet50,...,gpt-train,...]
        [--plans one,dp,...] [--rounds 5] [--time-limit 120] [--folder DIR]
        [--steps profile,forms,plan,run,peaks,report]
    python tests/benchmarks/accuracy.py --device cuda [--models gpt-train,...,gpt-large-train,...]

Each model is profiled for 2 processes of this machine with 1 thread each, from an empty profile.
With `--device cuda` each is a module and profiled for one GPU: on it, whole and in micro-batches
(`micro`), it is planned and run.
Then it is planned with `--cluster local`: on one of the processes (`one`), by fixed kinds of plans,
and freely (`auto`), and every plan runs in turns with the others; kinds whose plans are equal share
their runs. Ratios of two plans are medians over the rounds. Printed are, for each plan, the
predicted and the measured seconds of a request or step, the error, the error at the machine's speed
while it was profiled (a reference product is timed beside every run: other tenants of a machine
change its speed), and predicted and measured peak bytes of the rank that held most. Then: the
median and largest errors, the share of pairs of plans of one model, over 10 % apart when measured,
that are ordered right, how the automatic plan compares with the best of the others, and the errors
if a model is priced by the profiles of the others alone (those of all models of the same backend
that the folder has). A folder keeps profiles, plans and measurements, so that models and steps can
be run in several commands: only `profile` and `run` need a machine that does nothing else; `forms`
compares single forms with the other models' profiles, without a run, and `report` prices the plans
anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import partitioner
from partitioner import examples
from partitioner.backends.onnx.local import run_local
from partitioner.backends.torch.measuring.clocks import clock_of, timed_run
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.executors import ONNX_RUNTIME, PYTORCH
from partitioner.cost_model.memory.lives import MemoryPeak
from partitioner.cost_model.prices.compute import Sources
from partitioner.cost_model.profiles.database import Profile, write_entries
from partitioner.cost_model.profiles.forms import Form
from partitioner.frontends.inputs import random_inputs
from partitioner.ir.plan import Plan, resolve

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

RANKS = 2
ONE = """[[pin]]\nnodes = ["*"]\ndevice = 0\n"""
ONNX_PLANS: Mapping[str, Mapping[str, Any]] = {
    "one": {"strategy": "inter", "constraints": "one.toml"},
    "intra": {"strategy": "intra"},
    "inter": {"strategy": "inter"},
    "auto": {},
}
GPU_PLANS: Mapping[str, Mapping[str, Any]] = {"one": {}, "micro": {"micro_batches": 2}}
TRAINING_PLANS: Mapping[str, Mapping[str, Any]] = {
    "one": {"strategy": "inter", "constraints": "one.toml"},
    "dp": {"parallel": "dp"},
    "zero3": {"parallel": "zero3"},
    "tp": {"parallel": "tp"},
    "auto": {},
}


@dataclass(frozen=True)
class Row:
    """A plan of a model: seconds of a request or step.

    Attributes:
        speed: Seconds of the reference product beside the run, over those beside the profiling.
        predicted_bytes: Peak of the rank whose measured one is the largest: what its sessions
            hold or, of a module, its tensors by liveness with what kernels take.
        measured_bytes: That rank's measured peak in one recorded step.
        foreign_s: Predicted by the profiles of the other models.
        rounds_s: Measured seconds by round; in each, the plans of a model run one after another.
    """

    model: str
    plan: str
    predicted_s: float
    measured_s: float
    speed: float
    source: str
    predicted_bytes: int
    measured_bytes: int
    foreign_s: float = 0.0
    rounds_s: Sequence[float] = ()

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def bytes_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def steady_error(self) -> float:
        """The error at the machine's speed of the profiling."""
        return self.predicted_s * self.speed / self.measured_s - 1

    @property
    def foreign_error(self) -> float:
        return self.foreign_s / self.measured_s - 1

    def over(self, other: Row) -> float:
        """Its seconds over those of another plan of the model: the median over the rounds."""
        rounds = zip(self.rounds_s, other.rounds_s, strict=True)
        return statistics.median(own_s / other_s for own_s, other_s in rounds)


def reference_s(device: str) -> float:
    """Median seconds of a product of matrices, on one thread or on a GPU."""
    size = 384 if device == "cpu" else 4096
    a = torch.ones(size, size, device=device)
    clock = clock_of(torch.device(device))
    return statistics.median(timed_run(clock, lambda: a @ a) for _ in range(15))


def _bert() -> onnx.ModelProto:
    """The encoder of `streams.py`."""
    from streams import export_bert

    with tempfile.TemporaryDirectory() as name:
        export_bert(Path(name) / "bert.onnx")
        return onnx.load(Path(name) / "bert.onnx")


def _gpt2() -> onnx.ModelProto:
    """A small GPT-2, exported from its configuration with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (2, 128))
    config = GPT2Config(vocab_size=8192, n_embd=384, n_layer=6, n_head=6, use_cache=False)
    module = GPT2LMHeadModel(config)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = module

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.whole(input_ids)[0]

    program = torch.onnx.export(First().eval(), (ids,), dynamo=True, verbose=False)
    assert program is not None
    return program.model_proto


def gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from training import GPT

    ids = torch.randint(0, 4096, (8, 128))
    return GPT(4, 512, 128), {"ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=100,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    pictures = {"pixel_values": torch.randn(16, 3, 64, 64)}
    return ViTForImageClassification(config), {**pictures, "labels": torch.randint(0, 100, (16,))}


def convnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32,
        hidden_sizes=[64, 128, 256],
        depths=[2, 2, 2],
        layer_type="basic",
        num_labels=100,
    )
    pictures = {"pixel_values": torch.randn(16, 3, 96, 96)}
    labels = torch.randint(0, 100, (16,))
    return ResNetForImageClassification(config), {**pictures, "labels": labels}


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=4096,
        d_model=256,
        d_kv=64,
        d_ff=1024,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    module = T5ForConditionalGeneration(config)
    module.set_attn_implementation("eager")
    ids = torch.randint(0, 4096, (8, 96))
    return module, {"input_ids": ids, "labels": ids}


def moe() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    module = MixtralForCausalLM(config)
    module.set_experts_implementation("batched_mm")
    ids = torch.randint(0, 4096, (2, 64))
    return module, {"input_ids": ids, "labels": ids}


def gpt_large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from training import GPT

    ids = torch.randint(0, 4096, (8, 512))
    return GPT(8, 1024, 512), {"ids": ids, "labels": ids}


def gpt_bfloat16() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    module, batch = gpt_large()
    return module.bfloat16(), batch


def vit_large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=8, num_labels=100)
    pictures = {"pixel_values": torch.randn(32, 3, 224, 224)}
    return ViTForImageClassification(config), {**pictures, "labels": torch.randint(0, 100, (32,))}


def convnet_large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    module = ResNetForImageClassification(ResNetConfig(num_labels=100))
    pictures = {"pixel_values": torch.randn(32, 3, 224, 224)}
    return module, {**pictures, "labels": torch.randint(0, 100, (32,))}


ONNX_MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "resnet50": lambda: examples.build("resnet50"),
    "densenet121": lambda: examples.build("densenet121"),
    "vgg19": lambda: examples.build("vgg19"),
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": lambda: examples.build("llama", layers=4, hidden=512, vocab=4096, seq=128),
}
SMALL = (gpt, vit, convnet, t5, moe)
LARGE = (gpt_large, gpt_bfloat16, vit_large, convnet_large)
MODULES = {f"{make.__name__.replace('_', '-')}-train": make for make in (*SMALL, *LARGE)}
ON_CPU = (*ONNX_MODELS, *list(MODULES)[: len(SMALL)])


def module_of(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A module in training mode and its batch, the same in every process."""
    torch.manual_seed(0)
    module, batch = MODULES[name]()
    return module.train(), batch


class Session:
    """Profiles, plans and runs models: each step leaves what it made in the folder."""

    def __init__(
        self,
        folder: Path,
        rounds: int,
        time_limit_s: float,
        device: str,
        kinds: Collection[str] | None = None,
    ) -> None:
        self.folder, self.rounds, self.kinds = folder, rounds, kinds
        self.time_limit_s = time_limit_s
        self.device, self.ranks = device, RANKS if device == "cpu" else 1
        (folder / "one.toml").write_text(ONE)

    def profile(self, name: str) -> None:
        """Measure the forms of a model, from an empty profile or on from that in the folder."""
        model, batch = _model(name)
        options: dict[str, Any] = {"training": True} if name in MODULES else {}
        begin, before_s = time.perf_counter(), reference_s(self.device)
        options |= {"time_limit_s": self.time_limit_s, "profile": self._profile(name)}
        counts = {plan.get("micro_batches") for plan in self.plans(name).values()}
        for count in sorted(counts, key=lambda count: count or 0):
            micro = {"micro_batches": count} if count else {}
            print(partitioner.profile(model, batch, self.ranks, **options, **micro))
        took_s = time.perf_counter() - begin
        print(f"  {name}: {took_s:.1f} s", flush=True)
        self._write(name, "speed", (before_s + reference_s(self.device)) / 2)

    def plan(self, name: str) -> None:
        """Plan a model in each kind."""
        for kind in self.plans(name):
            begin = time.perf_counter()
            program = self._compiled(name, kind)
            (self.folder / f"{name}-{kind}.json").write_text(program.plan.to_json())
            if name in ONNX_MODELS:
                folder = self.folder / f"{name}-{kind}.partition"
                shutil.rmtree(folder, ignore_errors=True)
                program.save(folder)
            took_s = time.perf_counter() - begin
            step_s = 1 / program.summary["throughput_per_s"]
            print(f"  {name} {kind}: {step_s * 1e3:.1f} ms, planned in {took_s:.1f} s", flush=True)

    def run(self, name: str) -> None:
        """Run the plans of a model in turns, then each for one recorded step."""
        times = (self._trained if name in MODULES else self._streamed)(name)
        self._write(name, "times", times)

    def peaks(self, name: str) -> None:
        """Run each plan of a model for one step and record the peak bytes of its ranks."""
        _, batch = _model(name)
        peaks = {}
        for kind in self.plans(name):
            program = self._compiled(name, kind, planned=True)
            run = program.profile(steps=1, **({} if batch is None else batch))
            peaks[kind] = [rank.peak_bytes or 0 for rank in run.measured.ranks]
        self._write(name, "peaks", peaks)

    def rows(self, models: Sequence[str]) -> Sequence[Row]:
        """The plans of models, priced by their own profile and by those of the others."""
        rows = []
        for name in models:
            program = self._compiled(name, next(iter(self.plans(name))), planned=True)
            graph, delivered = program.graph, program.graph.delivered
            own, others = (
                self._cluster(file).run_by(ONNX_RUNTIME if name in ONNX_MODELS else PYTORCH)
                for file in (self._profile(name), self._without(name))
            )
            speed_s, times, peaks = (self._read(name, what) for what in ("speed", "times", "peaks"))
            plans = {
                kind: Plan.from_json((self.folder / f"{name}-{kind}.json").read_text())
                for kind in self.plans(name)
            }
            for kind, plan in plans.items():
                if plan.graph_digest != graph.digest:  # it recomputes values
                    graph = self._compiled(name, kind, planned=True).graph
                cost, foreign = (
                    evaluate(graph, plan, cluster, delivered) for cluster in (own, others)
                )
                shares = Sources.of(graph, resolve(graph, plan), own).shares()
                same = [other for other in plans if plans[other].digest == plan.digest]
                rounds = [
                    _mean(some) for some in zip(*(times[other] for other in same), strict=True)
                ]
                measured_s, beside_s = map(statistics.median, zip(*rounds, strict=True))
                fullest = peaks[kind].index(max(peaks[kind]))
                row = Row(
                    *(name, kind, cost.step_s, measured_s, beside_s / speed_s),
                    ", ".join(f"{share:.0%} {source}" for source, share in shares.items()),
                    *(_peak(cost, fullest).bytes, peaks[kind][fullest], foreign.step_s),
                    [round_s for round_s, _ in rounds],
                )
                rows.append(row)
                print(line(row), flush=True)
        return rows

    def forms(self, name: str) -> None:
        """Print the seconds of a model's forms beside those by the other models' profiles."""
        own, others = map(self._profile_at, (self._profile(name), self._without(name)))
        logs: list[float] = []
        known_s = fitted_s = unknown_s = 0.0
        for entry in own.entries.values():
            form = _form(entry.form)
            estimate = others.estimate(form, entry.dtype, entry.flops, entry.moved_bytes)
            if estimate is None:
                unknown_s += entry.seconds
            elif estimate.source == "fitted":
                known_s, fitted_s = known_s + entry.seconds, fitted_s + estimate.seconds
                logs.append(abs(math.log(estimate.seconds / entry.seconds)))
        if not logs:
            print(f"  {name}: no form fitted by other models' profiles")
            return
        share = unknown_s / (unknown_s + known_s)
        factor = math.exp(statistics.median(logs))
        print(
            f"  {name}: {len(logs)} forms fitted, in sum {fitted_s / known_s - 1:+.1%}, one by a "
            f"median factor of {factor:.2f}; of {share:.1%} of the seconds no estimate"
        )

    def plans(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """Options by kind of plan, of the kinds that are asked for."""
        offered = self._offered(name)
        return {kind: offered[kind] for kind in offered if not self.kinds or kind in self.kinds}

    def _offered(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        if self.device != "cpu":
            return GPU_PLANS
        return TRAINING_PLANS if name in MODULES else ONNX_PLANS

    def _profile(self, name: str) -> Path:
        return self.folder / f"{name}.sqlite"

    def _cluster(self, file: Path) -> Cluster:
        return resolve_cluster(f"{self.ranks}xlocal", profile=file)

    def _profile_at(self, file: Path) -> Profile:
        profile = self._cluster(file).devices[0].profile
        assert profile is not None
        return profile

    def _compiled(self, name: str, kind: str, *, planned: bool = False) -> Any:
        """A model in a kind of plan; or as it was planned before."""
        model, batch = _model(name)
        options = {**self.plans(name)[kind]}
        if "constraints" in options:
            options["constraints"] = self.folder / options["constraints"]
        if planned:
            options = as_planned(options, self.folder / f"{name}-{kind}.json")
        if name in MODULES:
            options["training"] = True
        profile = self._profile(name)
        options |= {"cluster": "local", "profile": profile}
        return partitioner.compile(model, batch, self.ranks, **options)

    def _write(self, name: str, what: str, data: Any) -> None:
        (self.folder / f"{name}.{what}.json").write_text(json.dumps(data))

    def _read(self, name: str, what: str) -> Any:
        return json.loads((self.folder / f"{name}.{what}.json").read_text())

    def _streamed(self, name: str) -> Any:
        """Seconds of a request in a stream of each plan, and of the reference beside."""
        kinds = tuple(self.plans(name))
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        inputs = random_inputs(self._compiled(name, kinds[0], planned=True).graph, seed=0)
        requests = 10
        for _ in range(self.rounds):
            for kind in kinds:
                before_s = reference_s(self.device)
                run = run_local(self.folder / f"{name}-{kind}.partition", inputs, requests)
                beside_s = (before_s + reference_s(self.device)) / 2
                found[kind].append((run.seconds / requests, beside_s))
                requests = max(6, round(2 * requests / run.seconds))
        return found

    def _trained(self, name: str) -> Any:
        """Seconds of a step of each plan, and of the reference beside."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        arguments = name, self.plans(name), self.folder, self.rounds, port, self.ranks, self.device
        mp.spawn(_train, arguments, nprocs=self.ranks)
        return self._read(name, "steps")

    def _without(self, model: str) -> Path:
        """A profile of what the other models of the same backend were measured with."""
        target = self.folder / f"without-{model}.sqlite"
        target.unlink(missing_ok=True)
        for name in MODULES if model in MODULES else ONNX_MODELS:
            if name == model or not self._profile(name).exists():
                continue
            _copy(self._profile_at(self._profile(name)), target)
        return target


def _form(key: str) -> Form:
    """The form that a key of a profile stands for."""
    op, attrs, operands, results, *behind = json.loads(key)
    sides = (
        tuple(None if one is None else (one[0], *map(tuple, one[1:])) for one in side)
        for side in (operands, results)
    )
    plain = tuple((name, _hashable(attr)) for name, attr in sorted(attrs.items()))
    return Form(op, plain, next(sides), next(sides), *map(tuple, behind))


def _hashable(attr: Any) -> Any:
    if isinstance(attr, dict):  # a graph or an array, by digest
        return tuple((key, _hashable(one)) for key, one in attr.items())
    return tuple(map(_hashable, attr)) if isinstance(attr, list) else attr


def _model(name: str) -> tuple[Any, dict[str, torch.Tensor] | None]:
    return module_of(name) if name in MODULES else (ONNX_MODELS[name](), None)


def _copy(profile: Profile, target: Path) -> None:
    entries = [entry for some in profile.known.values() for entry in some.values()]
    write_entries(target, profile.device, profile.threads, entries)
    links = [entry for some in profile.links.values() for entry in some]
    write_entries(target, profile.device, profile.threads, links)


def _mean(runs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean seconds of runs, and of the reference beside them."""
    measured, beside = (statistics.mean(some) for some in zip(*runs, strict=True))
    return measured, beside


def _train(
    rank: int,
    name: str,
    plans: Mapping[str, Mapping[str, Any]],
    folder: Path,
    rounds: int,
    port: int,
    ranks: int,
    device: str,
) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(where, RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    steps = {}
    for kind in plans:
        module, batch = module_of(name)
        program = partitioner.compile(
            *(module, batch, ranks),
            cluster="local",
            training=True,
            profile=folder / f"{name}.sqlite",
            **as_planned(plans[kind], folder / f"{name}-{kind}.json"),
        )
        there = {name: tensor.to(device) for name, tensor in batch.items()}
        steps[kind] = _stepping(program.module(), there)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in plans}
    for number in range(rounds + 1):
        for kind, step in steps.items():
            before_s = reference_s(device)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(3):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            took_s = (time.perf_counter() - begin) / 3
            if number:
                times[kind].append((took_s, (before_s + reference_s(device)) / 2))
    if rank == 0:
        (folder / f"{name}.steps.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def as_planned(options: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Options of a plan that was found with these and is in a file.

    No search keeps a plan in micro-batches: the same options find it again.
    """
    return dict(options) if "micro_batches" in options else {"constraints": file}


def _stepping(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    parameters = list(module.parameters())  # none on the idle rank of a plan on one device
    optimizer = torch.optim.AdamW(parameters, lr=1e-4) if parameters else None

    def step() -> None:
        result = module(**batch)
        (result if isinstance(result, torch.Tensor) else result.loss).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _peak(cost: Evaluation, device: int) -> MemoryPeak:
    """The predicted peak of a device: what its executor holds if known, else by liveness."""
    return (cost.executor_peak or cost.exact_peak)[device]


def line(row: Row) -> str:
    return (
        f"  {row.model:14} {row.plan:6} {row.predicted_s * 1e3:9.1f} {row.measured_s * 1e3:9.1f} "
        f"{row.error:+8.1%} {row.steady_error:+8.1%} {row.predicted_bytes / 2**20:9.1f} "
        f"{row.measured_bytes / 2**20:9.1f} {row.bytes_error:+8.1%}  {row.source}"
    )


def report(rows: Sequence[Row]) -> None:
    """The tables."""
    heads = ("predicted", "measured", "error", "steady", "predicted", "measured", "error")
    widths = (9, 9, 8, 8, 9, 9, 8)
    columns = " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    print(f"\n  {'':21} {'ms':>9} {'':27}{'MiB':>9}\n  {'model':14} {'plan':6} {columns}")
    print(*map(line, rows), sep="\n")
    errors: Mapping[str, Callable[[Row], float]] = {
        "predicted": lambda row: row.error,
        "at the profiling's speed of the machine": lambda row: row.steady_error,
        "priced by the other models' profiles": lambda row: row.foreign_error,
        "peak bytes": lambda row: row.bytes_error,
    }
    for title, error in errors.items():
        sizes = sorted(abs(error(row)) for row in rows)
        print(f"{title}: median error {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}")
    by_model = [list(some) for _, some in itertools.groupby(rows, lambda row: row.model)]
    pairs = [pair for some in by_model for pair in itertools.combinations(some, 2)]
    apart = [(a, b) for a, b in pairs if not 1 / 1.1 < a.over(b) < 1.1]
    right = [(a, b) for a, b in apart if (a.over(b) < 1) == (a.predicted_s < b.predicted_s)]
    print(f"pairs of plans over 10 % apart: {len(right)} of {len(apart)} ordered right")
    for some in by_model:
        auto = next((row for row in some if row.plan == "auto"), None)
        fixed = [row for row in some if row is not auto]
        if auto is None or not fixed:
            continue
        ratio, best = max((auto.over(row), row.plan) for row in fixed)
        print(f"  {some[0].model:14} auto is {ratio:.3f} of the best, {best}")


STEPS = ("profile", "forms", "plan", "run", "peaks", "report")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models")
    parser.add_argument("--plans")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", default=",".join(STEPS))
    args = parser.parse_args()
    offered = ON_CPU if args.device == "cpu" else MODULES
    steps, models = args.steps.split(","), (args.models or ",".join(offered)).split(",")
    kinds = args.plans.split(",") if args.plans else None
    for option, chosen, known in (
        ("--steps", steps, STEPS),
        ("--models", models, offered),
        ("--plans", kinds or (), {**GPU_PLANS, **ONNX_PLANS, **TRAINING_PLANS}),
    ):
        if unknown := set(chosen) - set(known):
            parser.error(f"{option}: {min(unknown)!r} is not one of {', '.join(known)}")
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        session = Session(folder, args.rounds, args.time_limit, args.device, kinds)
        for model in models:
            for step in STEPS[:-1]:
                if step in steps:
                    getattr(session, step)(model)
        if "report" in steps:
            report(session.rows(models))


if __name__ == "__main__":
    main()
