"""Placement on msr-fiddle/dnn-partitioning instances: cost, bound, gap and seconds.

    python tests/benchmarks/dnnp.py PATH... [--time-limit 10] [--gap 0.0001] [--write FOLDER]

`contiguous` is the best plan in which no path leaves a device and returns, `known` the best
plan known without that rule (`*`: proven optimal); both are the literature's figures or found
with other programs, and are only compared with. `nodes` are counted after merging colours.
"""

import argparse
import math
import time
from pathlib import Path

from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.files import to_problem, to_solution
from partitioner.solver.formats.json_files import read, write_solution
from partitioner.solver.joint.solve import THOROUGH, solve
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work

#: Contiguous optimum, best value known, and whether that is proven.
KNOWN = {
    "layer_bert24_inference": (17.7899, 17.7147, True),
    "layer_bert24_training": (41.7458, 39.7895, True),
    "layer_gnmt_inference": (32.9107, 31.6873, False),
    "layer_gnmt_training": (107.0044, 88.4622, False),
    "layer_resnet50_inference": (33.7747, 33.294, False),
    "layer_resnet50_training": (78.6318, 76.513, False),
    "operator_bert_l-3_inference": (27.9186, 21.9084, True),
    "operator_bert_l-3_training": (65.3031, 54.2074, True),
    "operator_bert_l-6_inference": (29.5795, 28.332, False),
    "operator_bert_l-6_training": (72.8650, 71.642, False),
    "operator_resnet50_inference": (124.3488, 124.3488, True),
    "operator_resnet50_training": (255.1944, 255.1944, False),
}

HEADER = (
    f"{'instance':28} {'nodes':>5} {'devices':>7} {'ours':>9} {'bound':>9} {'gap':>7} "
    f"{'contiguous':>10} {'known':>9} {'wall s':>6} {'CPU s':>6}"
)


def row(path: Path, time_limit_s: float, gap: float, folder: Path | None) -> str:
    """Solve one file; its line of the table."""
    instance = read(path, parse)
    problem = to_problem(instance)
    wall, cpu = time.perf_counter(), time.process_time()
    answer = solve(problem, work=Work.within(time_limit_s), gap=gap, effort=THOROUGH)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert math.isclose(answer.cost, evaluate_choices(problem, answer.chosen).step_s)
    if folder is not None:
        write_solution(to_solution(instance, answer.chosen), folder / f"{path.stem}.json")
    contiguous, known, proven = KNOWN.get(path.stem, (math.nan, math.nan, False))
    return (
        f"{path.stem:28} {len(problem.nodes):5} {problem.devices:7} {answer.cost:9.4f} "
        f"{answer.bound:9.4f} {answer.gap:7.2%} {contiguous:10.4f} {known:8.4f}"
        f"{'*' if proven else ' '} {wall:6.2f} {cpu:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--gap", type=float, default=1e-4)
    parser.add_argument("--write", type=Path, help="folder for the solutions, as JSON")
    options = parser.parse_args()
    files = [f for p in options.paths for f in (sorted(p.glob("*.json")) if p.is_dir() else [p])]
    print(HEADER)
    for path in files:
        print(row(path, options.time_limit, options.gap, options.write), flush=True)


if __name__ == "__main__":
    main()
