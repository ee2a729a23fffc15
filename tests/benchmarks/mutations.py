"""Table of mutations: rank programs with one fault each, and which of them a proof refuses.

OMP_NUM_THREADS=1 python tests/benchmarks/mutations.py [--only WORD] [--most 40] [--kind WORD]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.plans import mutated_cases
from helpers.plans.mutation_table import Count, tried


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="plans whose name has this word")
    parser.add_argument("--kind", default="", help="the only kind of mutation")
    parser.add_argument("--most", type=int, help="most mutants of a kind of a plan; default: all")
    args = parser.parse_args()
    head = ("plan", "mutants", "refused", "equal and accepted", "SURVIVED", "seconds")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    by_kind: dict[str, Count] = {}
    for case in mutated_cases.CASES:
        if args.only not in case.kind:
            continue
        start = time.perf_counter()
        try:
            result = tried(case, args.most, args.kind)
        except Exception as error:
            print(f"| {case.kind} | {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        seconds = time.perf_counter() - start
        if result.why:
            print(f"| {case.kind} | {result.why} | | | | {seconds:.0f} |", flush=True)
            continue
        total = Count()
        for kind, count in result.counts.items():
            total.add(count)
            by_kind.setdefault(kind, Count()).add(count)
        print(f"| {case.kind} | {total} | {seconds:.0f} |", flush=True)
        for line in total.survived:
            print(f"    {line}", flush=True)
    print("\n| mutation | " + " | ".join(head[1:5]) + " |\n|" + "---|" * 5)
    for kind, count in by_kind.items():
        print(f"| {kind} | {count} |")
    return any(count.survived for count in by_kind.values())


if __name__ == "__main__":
    sys.exit(main())
