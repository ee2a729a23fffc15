"""Table of mutations: rank programs with one fault each, and which of them a proof refuses.

    OMP_NUM_THREADS=1 python tests/benchmarks/mutations.py [--only WORD] [--kind WORD] [--most 6]
    OMP_NUM_THREADS=1 python tests/benchmarks/mutations.py --files [--only WORD] [--most 6]
    OMP_NUM_THREADS=1 python tests/benchmarks/mutations.py --plans [--only WORD]
    OMP_NUM_THREADS=1 python tests/benchmarks/mutations.py --drawn KIND [--first 0] [--count 50]
        [--most 3]

Of each plan, every communication is dropped, exchanged with another, given another group, region,
rank or reduction, and every local step reads another value, two exchanged, has another attribute or
is left out; inputs, constants, outputs and stored values are taken from another place, and runs of
micro-batches in another order. A mutant that is accepted runs on all ranks in this process, beside
the programs as they are: its results are equal, or it has SURVIVED. A table by plan and a table by
mutation are printed; the exit code is 1 if any has survived.

With `--files` it is the graphs of PyTorch's ranks that are mutated, call by call: each mutant is
written to rank files, which are proven.

With `--plans` nothing is mutated: the proof of each plan of the zoo, of transformers and of
training is printed in a line, and the exit code is 1 if one is not proven.

With `--drawn` it is programs of plans drawn at random: `graphs` of ONNX, modules in `training`, in
drawn `layouts` and in drawn `stages`. An interrupt ends with the tables so far. The exit code is 1
if a plan as it is is found wrong, or a mutant of a proven one has survived.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.plans.all_plans import all_plans
from helpers.plans.drawn_mutations import KINDS, Ends, tried_drawn
from helpers.plans.mutated_cases import CASES
from helpers.plans.mutation_table import Case, Count, tried, tried_graphs
from partitioner.ir.errors import PartitionerError

HEAD = ("mutants", "refused", "equal and accepted", "SURVIVED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="plans whose name has this word")
    parser.add_argument("--kind", default="", help="the only kind of mutation")
    parser.add_argument("--most", type=int, help="most mutants of a kind of a plan; default: all")
    parser.add_argument("--files", action="store_true", help="mutate graphs in files of PyTorch")
    parser.add_argument("--plans", action="store_true", help="print the proofs of all plans")
    parser.add_argument("--drawn", choices=KINDS, help="plans that are drawn at random")
    parser.add_argument("--first", type=int, default=0, help="number of the first drawn one")
    parser.add_argument("--count", type=int, default=50, help="number of drawn ones")
    args = parser.parse_args()
    if args.plans:
        return proofs(args.only)
    if args.drawn:
        return drawn(args.drawn, range(args.first, args.first + args.count), args.most)
    cases = [case for case in CASES if args.only in case.name]
    if args.files:
        cases = [case for case in cases if not case.name.startswith("onnx")]
        return table(cases, lambda case: tried_graphs(case, args.most))
    return table(cases, lambda case: tried(case, args.most, args.kind))


def table(cases: Sequence[Case], tried: Callable[[Case], Mapping[str, Count]]) -> int:
    """Print the table of mutations."""
    print(f"| plan | {' | '.join(HEAD)} | seconds |\n|{'---|' * (len(HEAD) + 2)}", flush=True)
    by_kind: dict[str, Count] = {}
    for case in cases:
        start, total = time.perf_counter(), Count()
        for of, count in tried(case).items():
            total.add(count)
            by_kind.setdefault(of, Count()).add(count)
        print(f"| {case.name} | {total} | {time.perf_counter() - start:.0f} |", flush=True)
        for line in total.survived:
            print(f"    {line}", flush=True)
    table_by_mutation(by_kind)
    return any(count.survived for count in by_kind.values())


def table_by_mutation(by_kind: Mapping[str, Count]) -> None:
    """Print the counts of each mutation."""
    print(f"\n| mutation | {' | '.join(HEAD)} |\n|{'---|' * (len(HEAD) + 1)}")
    for of, count in by_kind.items():
        print(f"| {of} | {count} |")


def drawn(kind: str, seeds: range, most: int | None) -> int:
    """Print what is found wrong, not proven or has survived of drawn plans, and the tables."""
    ends = Ends()
    with suppress(KeyboardInterrupt):
        for seed in seeds:
            said = [*ends.wrong, *ends.unproven, *ends.survived]
            tried_drawn(kind, seed, ends, most)
            for line in [*ends.wrong, *ends.unproven, *ends.survived]:
                if line not in said:
                    print(("SURVIVED: " if line in ends.survived else "") + line, flush=True)
    print(f"\n{dict(ends.verdicts)}")
    table_by_mutation(ends.by_kind)
    return bool(ends.wrong or ends.survived)


def proofs(only: str) -> int:
    """Print a line for each plan: proven, or why not."""
    refused = 0
    for case in all_plans():
        if only not in case.name:
            continue
        start = time.perf_counter()
        try:
            compiled = case.compiled()
        except PartitionerError as error:
            print(f"{case.name}: no plan: {error}", flush=True)
            continue
        planned = time.perf_counter()
        proof = compiled.verify(symbolic=True)
        refused += not proof
        seconds = f"{planned - start:.1f} s to plan, {time.perf_counter() - planned:.1f} s to prove"
        print(f"{case.name}: {proof.line} ({seconds})", flush=True)
    return refused > 0


if __name__ == "__main__":
    sys.exit(main())
