"""ResNet-50: seconds to plan and write four parts, and what cutting a session costs.

    python tests/benchmarks/resnet50.py [--devices 4] [--runs 30]

Prints two tables. The first has the seconds of each stage of `partition resnet50.onnx --devices N`
after imports. The second compares one whole ONNX Runtime session with our runtime on one rank,
the model cut into 1, 2, 4 and 8 segments; runs alternate, the least of each is taken.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

import partitioner
from partitioner import examples
from partitioner.backends.onnx.emit import emit_models
from partitioner.backends.onnx.sessions import SessionConfig
from partitioner.backends.onnx.simulator import Simulator
from partitioner.backends.onnx.whole import open_whole
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.ir.program import Compute, Programs, RankProgram
from partitioner.verify.first_difference import uncut_programs

THREADS = 2


def cut_in(programs: Programs, parts: int) -> Programs:
    """The one rank's program in `parts` phases, each of which is a session of its own."""
    (program,) = programs.ranks
    count = len(program.steps)
    steps = [
        replace(step, phase=index * parts // count) if isinstance(step, Compute) else step
        for index, step in enumerate(program.steps)
    ]
    cut: RankProgram = replace(program, steps=tuple(steps))
    return replace(programs, ranks=(cut,))


def plan_seconds(model: Path, devices: int) -> Mapping[str, float]:
    """Seconds of each stage of one compilation."""
    start = time.perf_counter()
    result = partitioner.compile(model, devices=devices)
    stages = dict(result.seconds)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        result.save(Path(folder) / "out")
        stages["writing"] = time.perf_counter() - begun
    return {**stages, "all": time.perf_counter() - start}


def contestants(
    traced: Traced, inputs: Mapping[str, np.ndarray]
) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    whole = open_whole(traced.whole, traced.folder, optimization="all", threads=THREADS)
    fed = dict(inputs)
    found: dict[str, Callable[[], object]] = {"whole session": lambda: whole.run(None, fed)}
    programs = uncut_programs(traced.graph)
    config = SessionConfig(optimization="all", threads=THREADS)
    for parts in (1, 2, 4, 8):
        models = emit_models(cut_in(programs, parts), traced.graph)
        simulator = Simulator(models, configs={0: config})
        found[f"{parts} segments"] = lambda simulator=simulator: simulator.run([fed])
    return found


def least_seconds(entries: Mapping[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """The least time of each, in alternation."""
    best = dict.fromkeys(entries, float("inf"))
    for run in range(runs + 2):
        for name, call in entries.items():
            start = time.perf_counter()
            call()
            if run >= 2:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--runs", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet50.onnx"
        onnx.save(examples.build("resnet50"), path)
        stages = plan_seconds(path, args.devices)
        traced = load_onnx(path)
    print(f"resnet50, {args.devices} devices: seconds after imports")
    for name, seconds in stages.items():
        print(f"  {name:22s} {seconds:6.2f}")
    best = least_seconds(contestants(traced, random_inputs(traced.graph, 0)), args.runs)
    print(f"resnet50, one rank, {THREADS} threads: least of {args.runs} runs")
    for name, seconds in best.items():
        print(f"  {name:22s} {seconds * 1e3:7.2f} ms  {seconds / best['whole session']:6.3f}")


if __name__ == "__main__":
    main()
