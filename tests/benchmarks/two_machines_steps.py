"""A training step on two machines with a slow link: stages against tensor parallelism across it.

    python tests/benchmarks/two_machines_steps.py [--processes 1] [--rate 25e6] [--rounds 3]

The machines are network namespaces of this one (as root, on Linux), and each runs `--processes`
under torchrun; `--rate` is that of the link, in bytes per second, in each direction. Modes take
turns, round by round; printed are the median milliseconds of a step over the rounds, those that the
plan predicts for the cluster file, and the plan's groups. The model is that of
`tests/jobs/processes/across_machines.py`: 12 layers of 512 by 512, 128 rows.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from helpers.processes.two_machines import TwoMachines, cluster_of, two_machines  # noqa: E402 - of the tests

STAGES = {"schedule": "1f1b", "micro_batches": 4}
MODES: dict[str, dict[str, Any]] = {
    "pp": {**STAGES, "parallel": "pp"},
    "tp": {"parallel": "tp"},
    "dp": {"parallel": "dp"},
    "searched": STAGES,
}


def measured(
    machines: TwoMachines, mode: str, processes: int, rate: float, folder: Path
) -> dict[str, Any]:
    cluster, result = folder / "machines.toml", folder / "result.json"
    cluster.write_text(cluster_of(processes, rate))
    arguments = [str(cluster), str(result), "times", json.dumps(MODES[mode])]
    script = ROOT / "tests/jobs/processes/across_machines.py"
    for ended in machines.run(script, arguments, processes, folder, limit_s=300):
        if ended.returncode:
            sys.exit(f"{mode}: {ended.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rate", type=float, default=25e6)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder, two_machines(options.rate) as machines:
        for _ in range(options.rounds):
            for mode, rounds in figures.items():
                rounds.append(
                    measured(machines, mode, options.processes, options.rate, Path(folder))
                )
    print(f"{'mode':10} {'measured ms':>12} {'predicted ms':>13}  groups")
    for mode, rounds in figures.items():
        step_s = statistics.median(one["step_s"] for one in rounds)
        predicted_s = rounds[0]["predicted_s"]
        print(f"{mode:10} {step_s * 1e3:12.1f} {predicted_s * 1e3:13.1f}  {rounds[0]['groups']}")


if __name__ == "__main__":
    main()
