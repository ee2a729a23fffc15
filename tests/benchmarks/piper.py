"""Pipeline plans of msr-fiddle/piper's BERT-32: time per sample and planning seconds.

    python tests/benchmarks/piper.py bert32a100.json [--grid] [--write FOLDER]
    python tests/benchmarks/piper.py --wide [--write FOLDER]

`authors` are the results of the authors' two-level DP and its planning seconds where they are
known; both are only compared with. Planning counts all but reading the file. Every plan is
priced anew by `evaluate_plan`. `--grid` adds all pairs of devices and memory of the paper's first
figure; a line without a plan says why. `--wide` plans graphs in which every node differs, of
`tests/helpers/problems/wide_pipelines.py`, on their own devices.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.problems.wide_pipelines import WIDE
from partitioner.solver.formats.json_files import read, write_solution
from partitioner.solver.formats.piper import evaluate_plan, parse, to_solution
from partitioner.solver.outcome import Infeasible
from partitioner.solver.stages.graph import StageGraph
from partitioner.solver.stages.graph_search import plan_stages
from partitioner.solver.work import Work

GIB = 2**30
#: Bytes a second and micro-batches of all the paper's plans of this model.
BANDWIDTH = 25.0 * GIB
MICROBATCHES = 1920
#: (devices, GiB of memory): seconds a sample, planning seconds.
AUTHORS = {
    (8, 8): (0.165856, math.nan),
    (32, 2): (0.0665495, math.nan),
    (64, 8): (0.0202006, math.nan),
    (128, 80): (0.00805324, math.nan),
    (512, 8): (0.00256113, 3.6),
    (1024, 8): (0.00130318, 15.0),
    (2048, 80): (0.00066371, 72.0),
}
GRID = [(k, m) for m in (1, 2, 8, 80) for k in (8, 32, 64, 128, 512, 1024, 2048)]
HEADER = (
    f"{'devices':>7} {'GiB':>4} {'N':>5} {'ours s':>12} {'bound s':>12} {'authors s':>12} "
    f"{'ratio':>8} {'stages':>6} {'CPU s':>6} {'authors s':>9}"
)
WIDE_HEADER = (
    f"{'graph':14} {'nodes':>5} {'seconds':>12} {'bound s':>12} {'gap':>8} {'stages':>6} "
    f"{'CPU s':>6} {'wall s':>6} status, methods"
)


def row(graph: StageGraph, memory: int, folder: Path | None) -> str:
    """Plan one case; its line of the table."""
    devices = graph.devices
    known, seconds = AUTHORS.get((devices, memory), (math.nan, math.nan))
    start = f"{devices:7} {memory:4} {graph.microbatches:5}"
    cpu = time.process_time()
    try:
        plan = plan_stages(graph, Work())
    except Infeasible as error:
        return f"{start} {error} ({time.process_time() - cpu:.2f} CPU s)"
    cpu = time.process_time() - cpu
    outcome = evaluate_plan(graph, plan.stages)
    assert not outcome.faults, outcome.faults
    assert math.isclose(max(outcome.time_s), plan.load_s, rel_tol=1e-9)
    if folder is not None:
        write_solution(to_solution(plan.stages), folder / f"{devices}-{memory}.json")
    ours = max(outcome.time_s)
    return (
        f"{start} {ours:12.9f} {plan.bound_s:12.9f} {known:12.9f} {ours / known:8.5f} "
        f"{len(plan.stages):6} {cpu:6.2f} {seconds:9.1f}"
    )


def wide_row(name: str, folder: Path | None) -> str:
    """Plan one wide graph; its line of the table."""
    data = WIDE[name]()
    instance = parse(data)
    cpu, wall = time.process_time(), time.monotonic()
    plan = plan_stages(instance, Work())
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    outcome = evaluate_plan(instance, plan.stages)
    assert not outcome.faults, outcome.faults
    assert math.isclose(max(outcome.time_s), plan.load_s, rel_tol=1e-9)
    if folder is not None:
        (folder / f"{name}.json").write_text(json.dumps(data))
        write_solution(to_solution(plan.stages), folder / f"{name}-solution.json")
    gap = (plan.load_s - plan.bound_s) / plan.load_s
    return (
        f"{name:14} {len(instance.nodes):5} {plan.load_s:12.9f} {plan.bound_s:12.9f} {gap:8.2%} "
        f"{len(plan.stages):6} {cpu:6.1f} {wall:6.1f} {plan.status}, {plan.solver}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--wide", action="store_true", help="graphs in which every node differs")
    parser.add_argument("--grid", action="store_true", help="all 28 cases, not only the known 7")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--write", type=Path, help="folder for the solutions, as JSON")
    options = parser.parse_args()
    if options.wide:
        print(WIDE_HEADER)
        for name in WIDE:
            print(wide_row(name, options.write), flush=True)
        return
    if options.file is None:
        parser.error("give the file, or --wide")
    instance = read(options.file, parse)
    print(HEADER)
    for devices, memory in GRID if options.grid else AUTHORS:
        case = replace(
            instance,
            devices=devices,
            limit_bytes=memory * GIB,
            microbatches=options.microbatches,
            bandwidth_bytes_per_s=BANDWIDTH,
        )
        print(row(case, memory, options.write), flush=True)


if __name__ == "__main__":
    main()
