"""Mutated models, plans, clusters and constraints through the command line: how they end.

    OMP_NUM_THREADS=1 python tests/benchmarks/fuzz.py structure|bytes|documents [--count 20000]
        [--first 0]

A sample is planned on 2 devices, written, and verified where ONNX Runtime runs the whole model.
Prints each fault as it is found, and the table at the end; exits with 1 if there is a fault.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import fuzzing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=sorted(fuzzing.KINDS))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first sample")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.count)
    table = fuzzing.fuzz(args.kind, numbers, lambda line: print(line, flush=True))
    print(f"{args.kind}:\n{table}")
    return 1 if table.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
