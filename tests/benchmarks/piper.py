"""Pipeline plans of msr-fiddle/piper's BERT-32: time per sample and planning seconds.

    python tests/benchmarks/piper.py bert32a100.json [--grid] [--write FOLDER]

`authors` are the results of the authors' two-level DP and its planning seconds where they are
known; both are only compared with. Planning counts all but reading the file. Every plan is
priced anew by `evaluate_plan`. `--grid` adds all pairs of devices and memory of the paper's first
figure; a line without a plan says why.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

from partitioner.solver import Infeasible
from partitioner.solver.formats.json_files import read, write_solution
from partitioner.solver.formats.piper import Instance, parse
from partitioner.solver.formats.piper_problem import planner
from partitioner.solver.formats.piper_referee import evaluate_plan, to_solution
from partitioner.solver.stages import cut_stages

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


def row(instance: Instance, memory: int, folder: Path | None) -> str:
    """Plan one case; its line of the table."""
    devices = instance.devices
    known, seconds = AUTHORS.get((devices, memory), (math.nan, math.nan))
    start = f"{devices:7} {memory:4} {instance.microbatches:5}"
    cpu = time.process_time()
    planned = planner(instance)
    try:
        cut = cut_stages(planned.problem)
    except Infeasible as error:
        return f"{start} {error} ({time.process_time() - cpu:.2f} CPU s)"
    plan = planned.plan(cut)
    cpu = time.process_time() - cpu
    outcome = evaluate_plan(instance, plan)
    assert not outcome.faults, outcome.faults
    assert math.isclose(max(outcome.time_s), cut.load_s, rel_tol=1e-9)
    if folder is not None:
        write_solution(to_solution(plan), folder / f"{devices}-{memory}.json")
    ours = max(outcome.time_s)
    return (
        f"{start} {ours:12.9f} {cut.bound_s:12.9f} {known:12.9f} {ours / known:8.5f} "
        f"{len(plan):6} {cpu:6.2f} {seconds:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--grid", action="store_true", help="all 28 cases, not only the known 7")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    parser.add_argument("--write", type=Path, help="folder for the solutions, as JSON")
    options = parser.parse_args()
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
