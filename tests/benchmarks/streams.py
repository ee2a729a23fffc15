"""Streams of requests on two ranks of one thread each, beside one session with two threads.

    python tests/benchmarks/streams.py resnet50 vgg19 bert [--profile FILE] [--rounds 5]

The models are planned for `--cluster 2xlocal` with the measurements of FILE (make them with
`partition profile MODEL --devices 2 --profile FILE`), automatically and with fixed strategies.
Rounds alternate between all plans of a model and the whole session; each ratio is the median over
rounds of requests a second beside the whole session's in the same round. Bert is of transformers,
6 layers of 512 with 128 tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.backends.onnx.files.load import load_rank
from partitioner.backends.onnx.files.steps import Segment
from partitioner.backends.onnx.local import run_local
from partitioner.backends.onnx.sessions.whole import open_whole
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced, load_onnx

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

RANKS = 2
#: Options of `partitioner.compile` by the name of a plan.
PLANS: Mapping[str, Mapping[str, str]] = {
    "automatic": {},
    "inter": {"strategy": "inter"},
    "intra": {"strategy": "intra"},
}


def export_bert(path: Path) -> None:
    """Write a BERT encoder with random weights."""
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=128,
        return_dict=False,
    )
    torch.manual_seed(0)
    module = transformers.BertModel(config, add_pooling_layer=False).eval()
    tokens = torch.randint(0, 8192, (1, 128))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (tokens, torch.ones_like(tokens)),
            path,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def write_model(name: str, path: Path) -> None:
    """Write a model by name."""
    if name == "bert":
        export_bert(path)
    else:
        onnx.save(examples.build(name), path)


def whole_rate(traced: Traced, inputs: Mapping[str, np.ndarray]) -> Callable[[int], float]:
    """Requests a second of one session with a thread for each rank."""
    session = open_whole(traced.whole, traced.folder, optimization="all", threads=RANKS)
    fed = dict(inputs)

    def rate(requests: int) -> float:
        session.run(None, fed)
        start = time.perf_counter()
        for _ in range(requests):
            session.run(None, fed)
        return requests / (time.perf_counter() - start)

    return rate


def segments(folder: Path) -> str:
    """Number of segments of each rank."""
    models = [load_rank(folder / f"rank{rank}.onnx") for rank in range(RANKS)]
    counts = [sum(isinstance(step, Segment) for step in model.steps) for model in models]
    return "+".join(map(str, counts))


def predicted(result: Compiled) -> str:
    """Requests a second that a plan promises."""
    return f"{result.summary['throughput_per_s'] or 0:8.1f}"


def measure(name: str, plans: list[str], profile: Path | None, rounds: int, requests: int) -> None:
    """Print the rows of one model."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        path = folder / f"{name}.onnx"
        write_model(name, path)
        results: dict[str, Compiled] = {}
        for plan in plans:
            results[plan] = partitioner.compile(
                path, cluster=f"{RANKS}xlocal", profile=profile, **PLANS[plan]
            )
            results[plan].save(folder / plan)
        traced = load_onnx(path)
        inputs = random_inputs(traced.graph, 0)
        whole = whole_rate(traced, inputs)
        rates: dict[str, list[float]] = {plan: [] for plan in ("whole session", *results)}
        for _ in range(rounds):
            rates["whole session"].append(whole(requests))
            for plan in results:
                seconds = run_local(folder / plan, inputs, requests).seconds
                rates[plan].append(requests / seconds)
        wholes = rates["whole session"]
        print(f"{name}: whole session {statistics.median(wholes):.1f} requests a second")
        for plan, result in results.items():
            ratio = statistics.median(a / b for a, b in zip(rates[plan], wholes, strict=True))
            print(
                f"  {plan:10s} {result.summary['strategy']:8s}"
                f" segments {segments(folder / plan):8s} predicted {predicted(result)}"
                f" measured {statistics.median(rates[plan]):8.1f} ratio {ratio:.3f}",
                flush=True,
            )


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="resnet50, vgg19, bert, ...")
    parser.add_argument("--profile", type=Path, help="measurements of this machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--plans", default=",".join(PLANS), help="automatic,inter,intra")
    args = parser.parse_args()
    for name in args.models:
        measure(name, args.plans.split(","), args.profile, args.rounds, args.requests)


if __name__ == "__main__":
    main()
