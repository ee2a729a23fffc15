"""Mutated models, plans, clusters and constraints through the command line: how they end.

    OMP_NUM_THREADS=1 python tests/benchmarks/fuzz.py structure|bytes|documents|graphs
        [--count 20000] [--first 0]

A sample is planned on 2 devices, written, and verified where ONNX Runtime runs the whole model.
A sample of `graphs` is a random ONNX graph, which runs in four plans on 2, 3, 5, 2 x 2 or 2 x 3
devices: one that is searched, and three that cut each node at random.
Prints each fault as it is found, and the table at the end; exits with 1 if there is a fault.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.drawn import drawn_graphs, fuzzing

#: Plans of each graph.
PLANS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=[*sorted(fuzzing.KINDS), "graphs"])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first sample")
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.count)
    if args.kind == "graphs":
        return graphs(numbers)
    table = fuzzing.fuzz(args.kind, numbers, lambda line: print(line, flush=True))
    print(f"{args.kind}:\n{table}")
    return 1 if table.faults else 0


def graphs(seeds: range) -> int:
    """Plans of random graphs on all ranks, against the whole graph."""
    counts = drawn_graphs.Counts()
    for seed in seeds:
        known = len(counts.faults)
        counts.add(seed, drawn_graphs.ran_plans(seed, PLANS))
        print(
            *counts.faults[known:], sep="\n", end="\n" if counts.faults[known:] else "", flush=True
        )
        if counts.graphs % 100 == 0:
            print(counts, flush=True)
    print(counts)
    return 1 if counts.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
