"""ResNet-50: seconds to plan and write four parts, and what cutting a session costs.

    python tests/benchmarks/resnet50.py [--devices 4] [--runs 30] [--threads 2]

Prints three tables. The first has the seconds of each stage of `partition resnet50.onnx
--devices N` after imports. The second compares one whole ONNX Runtime session with our runtime on
one rank, the model cut into 1, 2, 4 and 8 segments: of equal numbers of nodes ("anywhere"), or at
the nearest places where a kernel ends and one value crosses, as plans of measured costs are cut.
Runs alternate, the least of each is taken. The third has the time of a call of `Compiled.run` of a
toy decoder, with its sessions kept and opened anew (and its files written anew).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

import partitioner
from partitioner import examples
from partitioner.api.profiling.sessions import in_phases
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.backends.onnx.sessions.whole import open_whole
from partitioner.cost_model.profiles.forms import chain
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.program import Compute, Programs

os.environ["PARTITIONER_CACHE"] = "off"  # searches are measured


def cut_in(programs: Programs, parts: int, ends: Sequence[int]) -> Programs:
    """The one rank's program in `parts` phases, each of which is a session of its own.

    Args:
        programs: Of one rank without communications.
        parts: Number of phases.
        ends: Positions before which a phase may end; the nearest to equal numbers of steps count.
    """
    (program,) = programs.ranks
    wanted = [part * len(program.steps) // parts for part in range(1, parts)]
    return in_phases(programs, [min(ends, key=lambda end: abs(end - at)) for at in wanted])


def kernel_ends(programs: Programs, graph: Graph) -> list[int]:
    """Positions of steps that no kernel before computes too, and to which one value crosses."""
    (program,) = programs.ranks
    steps = [step for step in program.steps if isinstance(step, Compute)]
    last = {name: index for index, step in enumerate(steps) for name in step.node.reads}
    made = {name: index for index, step in enumerate(steps) for name in step.node.outputs}
    return [
        index
        for index, step in enumerate(steps)
        if index > 0
        and not chain(graph, step.origin)
        and sum(at < index <= last.get(name, -1) for name, at in made.items()) == 1
    ]


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
    traced: Traced, inputs: Mapping[str, np.ndarray], threads: int
) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    whole = open_whole(traced.whole, traced.folder, optimization="all", threads=threads)
    fed = dict(inputs)
    found: dict[str, Callable[[], object]] = {"whole session": lambda: whole.run(None, fed)}
    programs = uncut_programs(traced.graph)
    config = SessionConfig(optimization="all", threads=threads)
    count = len(programs.ranks[0].steps)
    for where, ends in (("anywhere", range(1, count)), ("", kernel_ends(programs, traced.graph))):
        for parts in (1, 2, 4, 8) if where else (2, 4, 8):
            models = emit_models(cut_in(programs, parts, ends), traced.graph)
            simulator = Simulator(models, configs={0: config})
            name = f"{parts} segments {where}".strip() if parts > 1 else "1 segment"
            found[name] = lambda simulator=simulator: simulator.run([fed])
    return found


def call_seconds() -> dict[str, float]:
    """The least time of a call of `Compiled.run` of a toy decoder, sessions kept or not."""
    result = partitioner.compile(
        examples.build("llama"), devices=2, strategy="intra", cluster="2xideal"
    )
    inputs = random_inputs(result.graph, 0)

    def reopened() -> object:
        result.ranks.close()
        return result.run(inputs)

    return least_seconds({"kept": lambda: result.run(inputs), "opened anew": reopened}, 10)


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
    parser.add_argument("--threads", type=int, default=2, help="of the second table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet50.onnx"
        onnx.save(examples.build("resnet50"), path)
        stages = plan_seconds(path, args.devices)
        traced = load_onnx(path)
    print(f"resnet50, {args.devices} devices: seconds after imports")
    for name, seconds in stages.items():
        print(f"  {name:22s} {seconds:6.2f}")
    inputs = random_inputs(traced.graph, 0)
    best = least_seconds(contestants(traced, inputs, args.threads), args.runs)
    print(f"resnet50, one rank, {args.threads} threads: least of {args.runs} runs")
    for name, seconds in best.items():
        print(f"  {name:22s} {seconds * 1e3:7.2f} ms  {seconds / best['whole session']:6.3f}")
    print("llama example, 2 ranks, a call of Compiled.run: least of 10")
    for name, seconds in call_seconds().items():
        print(f"  {name:22s} {seconds * 1e3:7.2f} ms")


if __name__ == "__main__":
    main()
