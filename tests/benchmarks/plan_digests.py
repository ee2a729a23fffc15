"""Digests and costs of the plans of 60 requests, for changes that must not change plans.

    OMP_NUM_THREADS=1 python tests/benchmarks/plan_digests.py record FILE [--only WORD]
    OMP_NUM_THREADS=1 python tests/benchmarks/plan_digests.py compare FILE [--only WORD]

`record` writes a line of JSON a request: digest of the plan's file, cost, bound, seconds of
processor time; of a refusal its text. `compare` prints what differs and exits with 1 if a plan is
another one. A time limit of 300 s binds none of them, so a plan does not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import partitioner
from helpers.modules import torch_models
from helpers.modules.small_gpt import small_gpt
from partitioner import examples
from partitioner.examples import llama, zoo
from partitioner.ir.errors import PartitionerError

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

Request = tuple[str, Callable[[], tuple[Any, Any]], Mapping[str, Any]]


@cache
def _file(name: str) -> Any:
    if name == "mlp":
        return examples.build("mlp")
    if name == "wide":
        return examples.build("mlp", layers=6, hidden=512, batch=64)
    if name == "tiny":
        return examples.build("tiny")
    if name == "tiny8":
        return examples.build("tiny", size=33, channels=12, batch=8)
    return llama.build() if name == "llama" else zoo.build(name)


def _onnx(name: str) -> Callable[[], tuple[Any, Any]]:
    return lambda: (_file(name), None)


class _Regression(nn.Module):
    """Linear layers with their loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        made = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def _linear(layers: int, width: int, batch: int) -> Callable[[], tuple[Any, Any]]:
    return lambda: (_Regression(layers, width), (torch.zeros(batch, width),))


def _gpt(layers: int) -> Callable[[], tuple[Any, Any]]:
    return lambda: small_gpt(layers)


def _named(name: str, *, training: bool = False) -> Callable[[], tuple[Any, Any]]:
    def make() -> tuple[Any, Any]:
        model = torch_models.build(name, training=training)
        return model.module, dict(model.inputs)

    return make


_TRAIN = {"training": True}
_DP, _ZB1 = {"parallel": "dp"}, {"schedule": "zb1", "micro_batches": 5}
_DP_TP = {"parallel": "dp+tp", "mesh": {"dp": 2, "tp": 2}}
_IN_FOUR = {"schedule": "1f1b", "micro_batches": 4}
_PINNED = {"pin": [{"nodes": ["logits"], "device": 1}]}

#: Name, model, and the options of `compile`.
REQUESTS: tuple[Request, ...] = (
    # ONNX
    ("mlp 2", _onnx("mlp"), {"devices": 2}),
    ("mlp 3 h100", _onnx("mlp"), {"devices": 3, "cluster": "h100"}),
    ("wide 4", _onnx("wide"), {"devices": 4}),
    ("wide latency", _onnx("wide"), {"devices": 2, "objective": "latency"}),
    ("wide memory", _onnx("wide"), {"devices": 4, "objective": "memory"}),
    ("wide 2x3", _onnx("wide"), {"devices": 6, "mesh": {"a": 2, "b": 3}}),
    ("wide inter", _onnx("wide"), {"devices": 3, "strategy": "inter"}),
    ("wide intra", _onnx("wide"), {"devices": 2, "strategy": "intra"}),
    ("wide tight", _onnx("wide"), {"devices": 2, "memory": "4MiB"}),
    ("wide refused", _onnx("wide"), {"devices": 2, "memory": "1MiB"}),
    ("wide blocks", _onnx("wide"), {"devices": 1, "memory": "3MiB"}),
    ("wide dp", _onnx("wide"), {"devices": 4, "parallel": "dp"}),
    ("wide tp", _onnx("wide"), {"devices": 2, "parallel": "tp"}),
    ("wide pp", _onnx("wide"), {"devices": 2, "parallel": "pp"}),
    ("wide micro 4", _onnx("wide"), {"devices": 2, "micro_batches": 4}),
    ("wide micro auto", _onnx("wide"), {"devices": 2, "micro_batches": "auto"}),
    ("wide h100 x 2 nodes", _onnx("wide"), {"devices": 16, "cluster": "h100"}),
    ("wide 128", _onnx("wide"), {"devices": 128, "cluster": "h100"}),
    ("tiny 2", _onnx("tiny"), {"devices": 2}),
    ("tiny8 spatial", _onnx("tiny8"), {"devices": 2, "parallel": "spatial"}),
    ("tiny8 2x2", _onnx("tiny8"), {"devices": 4, "mesh": {"dp": 2, "tp": 2}}),
    ("tiny pinned", _onnx("tiny"), {"devices": 2, "constraints": _PINNED}),
    ("llama 2", _onnx("llama"), {"devices": 2}),
    ("llama 4 inter", _onnx("llama"), {"devices": 4, "strategy": "inter"}),
    ("llama tp", _onnx("llama"), {"devices": 4, "parallel": "tp"}),
    ("squeezenet 2", _onnx("squeezenet"), {"devices": 2}),
    ("shufflenet 4 inter", _onnx("shufflenet"), {"devices": 4, "strategy": "inter"}),
    ("resnet50 2", _onnx("resnet50"), {"devices": 2}),
    ("resnet50 tight", _onnx("resnet50"), {"devices": 2, "memory": "140MiB"}),
    ("alexnet 4", _onnx("alexnet"), {"devices": 4, "cluster": "a100"}),
    # modules
    ("gpt 2", _gpt(2), {"devices": 2}),
    ("gpt tp 3", _gpt(1), {"devices": 3, "parallel": "tp"}),
    ("llama module 4", _named("llama"), {"devices": 4}),
    ("unet spatial", _named("unet"), {"devices": 2, "parallel": "spatial", "mesh": {"h": 2}}),
    ("mixtral ep", _named("mixtral"), {"devices": 2, "parallel": "ep"}),
    ("vit forward stages", _named("vit"), {"devices": 2, "schedule": "forward"}),
    ("t5 2", _named("t5"), {"devices": 2}),
    # training
    ("gpt trains 2", _gpt(2), {"devices": 2, **_TRAIN}),
    ("gpt trains dp", _gpt(2), {"devices": 4, "parallel": "dp", **_TRAIN}),
    ("gpt trains tp", _gpt(2), {"devices": 2, "parallel": "tp", **_TRAIN}),
    ("gpt trains zero3", _gpt(2), {"devices": 3, "parallel": "zero3", **_TRAIN}),
    ("gpt trains zero1", _gpt(2), {"devices": 2, "parallel": "zero1", **_TRAIN}),
    ("gpt trains pp", _gpt(4), {"devices": 2, "parallel": "pp", **_TRAIN}),
    ("gpt trains 1f1b 4", _gpt(4), {**_TRAIN, "devices": 2, **_IN_FOUR}),
    ("gpt trains recomputed", _gpt(2), {"devices": 2, "recompute": True, **_TRAIN}),
    ("gpt trains dp+tp", _gpt(2), {**_TRAIN, "devices": 4, **_DP_TP}),
    ("linear trains 2", _linear(4, 96, 30), {"devices": 2, **_TRAIN}),
    ("linear trains 3 h100", _linear(4, 96, 30), {"devices": 3, "cluster": "h100", **_TRAIN}),
    ("linear trains tight", _linear(4, 96, 30), {"devices": 2, "memory": 400_000, **_TRAIN}),
    ("linear trains tighter", _linear(4, 96, 30), {"devices": 2, "memory": 330_000, **_TRAIN}),
    ("linear trains alone tight", _linear(4, 96, 30), {"devices": 1, "memory": 600_000, **_TRAIN}),
    ("linear trains refused", _linear(4, 96, 30), {"devices": 2, "memory": 60_000, **_TRAIN}),
    ("linear trains inter", _linear(4, 96, 30), {"devices": 2, "strategy": "inter", **_TRAIN}),
    ("linear trains micro 3", _linear(4, 96, 30), {"devices": 2, "micro_batches": 3, **_TRAIN}),
    ("linear trains gpipe", _linear(4, 96, 30), {"devices": 2, "schedule": "gpipe", **_TRAIN}),
    ("linear trains zb1", _linear(4, 96, 30), {**_TRAIN, "devices": 2, **_ZB1}),
    ("linear trains 72 h100", _linear(4, 96, 144), {"devices": 72, "cluster": "h100", **_TRAIN}),
    ("unet trains 2", _named("unet", training=True), {"devices": 2, **_TRAIN}),
    ("bert trains 2", _named("bert", training=True), {"devices": 2, **_TRAIN}),
    ("resnet trains dp", _named("resnet", training=True), {**_TRAIN, "devices": 2, **_DP}),
)  # fmt: skip


def planned(request: Request) -> dict[str, Any]:
    """The record of a request's plan, or of its refusal."""
    _, make, options = request
    model, inputs = make()
    start = time.process_time()
    arguments = {"time_limit_s": 300.0, **options}
    try:
        result = partitioner.compile(model, inputs, plan_only=inputs is None, **arguments)
    except PartitionerError as error:
        return {"refused": str(error), "cpu_s": round(time.process_time() - start, 1)}
    cpu_s = time.process_time() - start
    certificate = result.plan.certificate
    assert certificate is not None
    return {
        "digest": result.plan.digest[:16],
        "cost": certificate.cost,
        "bound": certificate.bound,
        "cpu_s": round(cpu_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="requests whose name has this word")
    args = parser.parse_args()
    known = {}
    if args.action == "compare":
        known = {row.pop("name"): row for row in map(json.loads, args.file.open())}
    others = 0
    for request in REQUESTS:
        name = request[0]
        if args.only not in name:
            continue
        record = planned(request)
        if args.action == "record":
            with args.file.open("a") as file:
                file.write(json.dumps({"name": name, **record}) + "\n")
            print(name, record, flush=True)
            continue
        before = known[name]
        same = {**before, "cpu_s": 0} == {**record, "cpu_s": 0}
        others += not same
        print(f"{name}: {'equal' if same else f'{before} -> {record}'}", flush=True)
    print(f"{others} others")
    return 1 if others else 0


if __name__ == "__main__":
    raise SystemExit(main())
