"""Quality on google/iopddl instances: cost, bound, gap and score against the best known.

    python tests/benchmarks/iopddl.py FOLDER [--instances A,B] [--limit-scale 1.0]

FOLDER holds asplos-2025-iopddl-*.json.gz. Each instance has its contest time limit (meant for 8
cores) times the scale, reading not included. Score = best known / ours, 0 if infeasible.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from partitioner.solver.formats.iopddl import parse
from partitioner.solver.formats.json_files import read
from partitioner.solver.pairwise.problem import evaluate
from partitioner.solver.pairwise.solve import solve


@dataclass(frozen=True)
class Known:
    """Public results: the contest's time limit in seconds, the least cost known to its authors."""

    limit_s: int
    cost: int


KNOWN = {
    "B": Known(60, 532_843),
    "G": Known(120, 217_039),
    "V": Known(300, 1_617_084),
    "A": Known(60, 6_548_641_531),
    "C": Known(60, 84_102_445_244),
    "D": Known(60, 309_396_217_429),
    "K": Known(180, 2_242_635_784),
    "M": Known(180, 49_928_157_537),
}

HEADER = (
    f"{'':4} {'nodes':>6} {'limit':>6} {'cost':>16} {'bound':>16} {'gap':>8} {'best known':>16} "
    f"{'score':>7} {'wall s':>7} {'CPU s':>7}"
)


def run(name: str, path: Path, scale: float) -> float:
    known = KNOWN[name]
    problem = read(path, parse)
    start, cpu = time.perf_counter(), time.process_time()
    answer = solve(problem, known.limit_s * scale)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    score = 0.0
    if answer.cost is not None:
        outcome = evaluate(problem, answer.chosen)
        assert outcome.cost == answer.cost
        score = 0.0 if outcome.fault else known.cost / answer.cost
    print(
        f"{name:4} {problem.nodes:6} {known.limit_s * scale:6.0f} {answer.cost or 0:16} "
        f"{answer.bound:16.0f} {answer.gap:8.3%} {known.cost:16} {score:7.4f} "
        f"{wall:7.1f} {cpu:7.1f}",
        flush=True,
    )
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--instances", default=",".join(KNOWN))
    parser.add_argument("--limit-scale", type=float, default=1.0)
    options = parser.parse_args()
    print(HEADER)
    scores = [
        run(name, options.folder / f"asplos-2025-iopddl-{name}.json.gz", options.limit_scale)
        for name in options.instances.split(",")
    ]
    print(f"sum of scores {sum(scores):.4f} of {len(scores)}")


if __name__ == "__main__":
    main()
