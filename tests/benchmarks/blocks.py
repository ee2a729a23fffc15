"""Models in a share of the memory that they need on one device: bytes and seconds, measured.

    PYTHONPATH=tests python tests/benchmarks/blocks.py [vgg19|unet|load|N ...]

Bytes are those that ONNX Runtime requests, by its profile, with those between sessions, on the
fullest device; seconds are the median of three requests on one thread, after one to warm up, with
the devices in turn. `load` is the rate at which the sessions of blocks are opened. A number N runs
blocks on N devices, each with a fifth of what the model needs.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import partitioner
from helpers.modules.unets import exported, unet
from helpers.plans.measured import measured_bytes
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.backends.onnx.files.load import load_rank
from partitioner.backends.onnx.files.steps import Segment
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.backends.onnx.sessions.segments import SessionConfig, open_session
from partitioner.frontends.inputs import random_inputs

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured

MIB = 2**20
SHARES, SHARES_OF_EACH = (1.0, 0.25), (0.2,)


def main(names: list[str]) -> None:
    """Print a row for each model and share."""
    torch.set_num_threads(1)
    devices = next((int(name) for name in names if name.isdigit()), 1)
    names = [name for name in names if not name.isdigit()]
    warnings.simplefilter("ignore")  # the exporter's own
    with tempfile.TemporaryDirectory() as folder:
        for model in models(Path(folder), names or ["vgg19", "unet"]):
            needs = partitioner.compile(model, devices=1).summary["peak_bytes"][0]
            for share in SHARES if devices == 1 else SHARES_OF_EACH:
                out = Path(folder) / f"{model.stem}-{share}"
                start = time.perf_counter()
                limit = int(needs * share) + 1
                compiled = partitioner.compile(model, devices=devices, memory=limit)
                assert isinstance(compiled, Compiled)
                spent = time.perf_counter() - start
                row(model.stem, limit, compiled, out, spent)
                if "load" in names and compiled.plan.blocks:
                    print(f"  loads {load_rate(out) / 1e9:.2f} GB/s")


def models(folder: Path, names: list[str]) -> Iterator[Path]:
    if "vgg19" in names:
        path = folder / "vgg19.onnx"
        path.write_bytes(examples.build("vgg19").SerializeToString())
        yield path
    for size in (512,) if "unet" in names else ():
        yield exported(unet(16, 4), (1, 3, size, size), folder / f"unet-{size}.onnx")


def row(name: str, limit: int, compiled: Compiled, out: Path, spent: float) -> None:
    found = compiled.verify(seed=1)
    error = max(output.error for output in found.outputs)
    compiled.save(out)
    feeds = random_inputs(compiled.graph, 0)
    ranks = range(len(compiled.cluster))
    held = max(measured_bytes(out, rank, feeds).total for rank in ranks)
    runs = Simulator(out, optimization="all")
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        runs.run([feeds])
        seconds.append(time.perf_counter() - start)
    blocks = [stretch.blocks for stretch in compiled.plan.blocks.stretches if stretch.chunks]
    turns = len(compiled.plan.blocks.stretches) - len(blocks)
    print(
        f"| {name} | {limit / MIB:.0f} | {'+'.join(map(str, blocks)) or '-'} | {turns} | "
        f"{max(compiled.summary['peak_bytes']) / MIB:.0f} | {held / MIB:.0f} | "
        f"{statistics.median(seconds[1:]) * 1e3:.0f} | {error:.1e} | {spent:.1f} |",
        flush=True,
    )


def load_rate(folder: Path) -> float:
    """Bytes a second, over all sessions of blocks, of the quicker of two rounds."""
    rank, rates = load_rank(folder / "rank0.onnx"), []
    for _ in range(2):
        nbytes, start = 0, time.perf_counter()
        for step in rank.steps:
            if isinstance(step, Segment) and step.block is not None:
                open_session(rank, step, SessionConfig())
                nbytes += sum(rank.types[name].nbytes for name in step.constants)
        rates.append(nbytes / (time.perf_counter() - start))
    return max(rates)


if __name__ == "__main__":
    main(sys.argv[1:])
