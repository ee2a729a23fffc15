"""Predicted seconds beside measured ones: models in ONNX Runtime and training steps in PyTorch.

    OMP_NUM_THREADS=1 python tests/benchmarks/accuracy.py [--models resnet50,...,gpt-train,...]
        [--rounds 5] [--time-limit 120] [--folder DIR]

Each model is profiled for 2 processes of this machine with 1 thread each, from an empty profile.
Then it is planned with `--cluster local`: on one of the processes (`one`), by fixed kinds of plans,
and freely (`auto`), and every plan runs in turns with the others. Printed are, for each plan, the
predicted and the measured seconds of a request or step, the error, the error at the machine's speed
while it was profiled (a reference product is timed beside every run: other tenants of a machine
change its speed), and predicted and measured peak bytes of the rank that held most. Then: the
median and largest errors, the share of pairs of plans of one model, over 10 % apart when measured,
that are ordered right, how the automatic plan compares with the best of the others, and the errors
if a model is priced by the profiles of the others alone. A folder keeps the profiles, so that the
models can be run in several commands.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
from partitioner.cost_model.evaluate import evaluate
from partitioner.cost_model.profile import Profile, write_entries, write_links
from partitioner.cost_model.resolve import resolve_cluster
from partitioner.frontends.inputs import random_inputs

RANKS = 2
ONE = """[[pin]]\nnodes = ["*"]\ndevice = 0\n"""
ONNX_PLANS: Mapping[str, Mapping[str, Any]] = {
    "one": {"strategy": "inter", "constraints": "one.toml"},
    "intra": {"strategy": "intra"},
    "inter": {"strategy": "inter"},
    "auto": {},
}
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
        predicted_bytes: Peak of the rank whose measured one is the largest, by liveness.
        measured_bytes: That rank's measured peak in one recorded step.
        foreign_s: Predicted by the profiles of the other models.
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


def reference_s() -> float:
    """Median seconds of a product of matrices on one thread."""
    a = torch.ones(384, 384)
    seconds = []
    for _ in range(15):
        begin = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


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


ONNX_MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "resnet50": lambda: examples.build("resnet50"),
    "densenet121": lambda: examples.build("densenet121"),
    "vgg19": lambda: examples.build("vgg19"),
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": lambda: examples.build("llama", layers=4, hidden=512, vocab=4096, seq=128),
}
MODULES = {f"{make.__name__}-train": make for make in (gpt, vit, convnet, t5, moe)}


def module_of(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A module in training mode and its batch, the same in every process."""
    torch.manual_seed(0)
    module, batch = MODULES[name]()
    return module.train(), batch


class Session:
    """Profiles, plans and runs models, and keeps what came out."""

    def __init__(self, folder: Path, rounds: int, time_limit_s: float) -> None:
        self.folder, self.rounds, self.time_limit_s = folder, rounds, time_limit_s
        self.rows: list[Row] = []
        self.planned: dict[tuple[str, str], Any] = {}
        profiles = {name: folder / f"{name}.sqlite" for name in (*ONNX_MODELS, *MODULES)}
        self.files = {name: file for name, file in profiles.items() if file.exists()}
        (folder / "one.toml").write_text(ONE)

    def model(self, name: str) -> None:
        """Add the rows of a model."""
        training = name in MODULES
        model, batch = module_of(name) if training else (ONNX_MODELS[name](), None)
        file = self.files[name] = self.folder / f"{name}.sqlite"
        options: dict[str, Any] = {"profile": file}
        if training:
            options["training"] = True
        begin, before_s = time.perf_counter(), reference_s()
        print(partitioner.profile(model, batch, RANKS, time_limit_s=self.time_limit_s, **options))
        print(f"  {name}: {time.perf_counter() - begin:.1f} s", flush=True)
        speed_s = (before_s + reference_s()) / 2
        kinds = TRAINING_PLANS if training else ONNX_PLANS
        programs = {}
        for kind, more in kinds.items():
            chosen = {**more}
            if "constraints" in chosen:
                chosen["constraints"] = self.folder / chosen["constraints"]
            program = partitioner.compile(model, batch, RANKS, cluster="local", **options, **chosen)
            programs[kind] = self.planned[name, kind] = program
            self._keep(name, kind, program)
        run = self._trained if training else self._streamed
        for kind, (measured_s, beside_s) in run(name, programs).items():
            summary = programs[kind].summary
            sources = summary["cost_sources"]
            row = Row(
                *(name, kind, 1 / summary["throughput_per_s"], measured_s, beside_s / speed_s),
                ", ".join(f"{share:.0%} {source}" for source, share in sources.items()),
                *_peaks(programs[kind], batch),
            )
            self.rows.append(row)
            print(line(row), flush=True)

    def _keep(self, name: str, kind: str, program: Any) -> None:
        (self.folder / f"{name}-{kind}.json").write_text(program.plan.to_json())

    def _streamed(
        self, name: str, programs: Mapping[str, Any]
    ) -> Mapping[str, tuple[float, float]]:
        """Seconds of a request in a stream of each plan, and of the reference beside."""
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in programs}
        inputs = random_inputs(next(iter(programs.values())).graph, seed=0)
        for kind, program in programs.items():
            program.save(self.folder / f"{name}-{kind}.partition")
        for _ in range(self.rounds):
            for kind, program in programs.items():
                requests = max(6, round(2 * program.summary["throughput_per_s"]))
                before_s = reference_s()
                run = run_local(self.folder / f"{name}-{kind}.partition", inputs, requests)
                found[kind].append((run.seconds / requests, (before_s + reference_s()) / 2))
        return {kind: _medians(runs) for kind, runs in found.items()}

    def _trained(self, name: str, programs: Mapping[str, Any]) -> Mapping[str, tuple[float, float]]:
        """Seconds of a step of each plan, and of the reference beside."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        kinds = tuple(programs)
        mp.spawn(_train, (name, kinds, self.folder, self.rounds, port), nprocs=RANKS)
        told = json.loads((self.folder / f"{name}.steps.json").read_text())
        return {kind: _medians(told[kind]) for kind in kinds}

    def priced_by_others(self) -> None:
        """Price each plan by the profiles of the other models."""
        rows = []
        models = dict.fromkeys(row.model for row in self.rows)
        profiles = {model: self._without(model) for model in models}
        for row in self.rows:
            program = self.planned[row.model, row.plan]
            cluster = resolve_cluster(f"{RANKS}xlocal", profile=profiles[row.model])
            cost = evaluate(program.graph, program.plan, cluster)
            rows.append(Row(**{**vars(row), "foreign_s": cost.step_s}))
        self.rows = rows

    def _without(self, model: str) -> Path:
        """A profile of what the other models of the same backend were measured with."""
        target = self.folder / f"without-{model}.sqlite"
        target.unlink(missing_ok=True)
        for name in self.files:
            if name == model or not _is_like(name, model):
                continue
            profile = resolve_cluster(f"{RANKS}xlocal", profile=self.files[name]).devices[0].profile
            assert profile is not None
            _copy(profile, target)
        return target


def _peaks(program: Any, batch: Mapping[str, torch.Tensor] | None) -> tuple[int, int]:
    run = program.profile(steps=1) if batch is None else program.profile(steps=1, **batch)
    measured = [rank.peak_bytes or 0 for rank in run.measured.ranks]
    fullest = measured.index(max(measured))
    return program.evaluation.exact_peak[fullest].bytes, measured[fullest]


def _is_like(one: str, other: str) -> bool:
    return (one in MODULES) == (other in MODULES)


def _copy(profile: Profile, target: Path) -> None:
    entries = [entry for some in profile.known.values() for entry in some.values()]
    write_entries(target, profile.device, profile.threads, entries)
    links = [entry for some in profile.links.values() for entry in some]
    write_links(target, profile.device, profile.threads, links)


def _medians(runs: Sequence[Sequence[float]]) -> tuple[float, float]:
    measured, beside = (statistics.median(some) for some in zip(*runs, strict=True))
    return measured, beside


def _train(
    rank: int, name: str, kinds: Sequence[str], folder: Path, rounds: int, port: int
) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(where, RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {}
    for kind in kinds:
        module, batch = module_of(name)
        program = partitioner.compile(
            *(module, batch, RANKS),
            cluster="local",
            training=True,
            profile=folder / f"{name}.sqlite",
            constraints=folder / f"{name}-{kind}.json",
        )
        steps[kind] = _stepping(program.module(), batch)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind, step in steps.items():
            before_s = reference_s()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(3):
                step()
            dist.barrier()
            took_s = (time.perf_counter() - begin) / 3
            if number:
                times[kind].append((took_s, (before_s + reference_s()) / 2))
    if rank == 0:
        (folder / f"{name}.steps.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


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
    apart = [(a, b) for a, b in pairs if not 1 / 1.1 < a.measured_s / b.measured_s < 1.1]
    right = [
        (a, b) for a, b in apart if (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)
    ]
    print(f"pairs of plans over 10 % apart: {len(right)} of {len(apart)} ordered right")
    for some in by_model:
        measured = {row.plan: row.measured_s for row in some}
        best = min((plan for plan in measured if plan != "auto"), key=measured.__getitem__)
        ratio = measured["auto"] / measured[best]
        print(f"  {some[0].model:14} auto is {ratio:.3f} of the best, {best}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join((*ONNX_MODELS, *MODULES)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        session = Session(folder, args.rounds, args.time_limit)
        for model in args.models.split(","):
            session.model(model)
        session.priced_by_others()
        report(session.rows)


if __name__ == "__main__":
    main()
