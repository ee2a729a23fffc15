"""Plans of models at 20 limits of memory each, between what fits nothing and what fits whole.

    OMP_NUM_THREADS=1 python tests/benchmarks/memory_ladder.py [--count 20] [--seed 0]
        [--only WORD] [--limit 20] [--beside 0.1] [--busy] [--processor] [--record FILE]
    OMP_NUM_THREADS=1 python tests/benchmarks/memory_ladder.py --measure [--count 20] [--seed 0]
        [--only WORD] [--limit 20]
    python tests/benchmarks/memory_ladder.py --table FILE

Each sample is an MLP, a ConvNet, a GPT or a T5 of 2 to 8 layers, in training or inference, on 1, 2
or 4 devices, at one of the limits, drawn with a seed; no weights are made. Forced ways are tried
where the request is refused, and for a share of the others (`--beside`). `--busy` keeps a core
busy meanwhile; `--processor` counts the limit in seconds of the processor, for a machine that does
other work. `--record` appends a line of JSON a sample, and `--table` prints the sums of such a
file. A line that begins with `!` breaks a promise: an internal error, a refusal of what a forced
way fits, a cost above 1.02 of a forced plan, or more than 1.15 of the time limit. Exits with 1 if
there is one.

`--measure` plans the samples for processors instead, with weights, and runs one step of each plan
on gloo ranks. It prints the most bytes that each rank allocated, with those foretold in brackets,
and the limit. A promise is broken where a rank takes more than the limit, or where the fullest one
takes 5 % more or less than foretold.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.plans.memory_rungs import MODELS, STEPS, Rung, climbed, measured
from partitioner.ir.errors import PartitionerError
from partitioner.solver import work


def drawn(seed: int) -> Rung:
    """The rung of a seed."""
    rng = random.Random(seed)
    return Rung(
        rng.choice(list(MODELS)),
        rng.randint(2, 8),
        rng.random() < 0.6,
        rng.choice((1, 2, 4)),
        rng.randint(1, STEPS),
    )


def row(rung: Rung, limit_s: float, *, beside_forced: bool) -> dict[str, Any]:
    """The record of a rung."""
    found = climbed(rung, limit_s, beside_forced=beside_forced)
    return {**asdict(rung), "name": str(rung), **asdict(found), "broken": found.broken}


def line(record: dict[str, Any]) -> str:
    """A record in words."""
    shown = record["plan"] or f"{record['outcome']} ({record['text'][:160]})"
    cost = f", {record['cost'] * 1e6:.4g} us" if record["plan"] else ""
    forced = f"; {record['forced']}: {record['forced_cost'] * 1e6:.4g} us"
    spent = f"{record['cpu_s']} s of a processor, {record['over']} of the limit"
    mark = f"! {record['broken']}: " if record["broken"] else ""
    return f"{mark}{record['name']}: {shown}{cost}, {spent}{forced if record['forced'] else ''}"


def measured_line(rung: Rung, limit_s: float) -> tuple[str, bool]:
    """The measured peaks of a rung in words, and whether they break a promise."""
    try:
        found = measured(rung, limit_s)
    except PartitionerError as error:
        return f"{rung}: refused ({str(error)[:160]})", False
    mark = f"! {found.broken}: " if found.broken else ""
    return f"{mark}{rung}: {found}", bool(found.broken)


def table(path: Path) -> str:
    """Sums of a file of records, by model, training and devices."""
    rows = [json.loads(text) for text in path.open()]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for one in rows:
        how = "training" if one["training"] else "inference"
        groups.setdefault((one["model"], how, one["devices"]), []).append(one)
    lines = ["| model | | devices | rungs | plans | refused | broken | CPU s | most of limit |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for (model, how, devices), own in sorted(groups.items()):
        outcomes = Counter(one["outcome"] for one in own)
        broken = Counter(one["broken"] for one in own if one["broken"])
        shown = ", ".join(f"{count} {what}" for what, count in broken.items()) or "0"
        cpu_s, over = sum(one["cpu_s"] for one in own), max(one["over"] for one in own)
        lines.append(
            f"| {model} | {how} | {devices} | {len(own)} | {outcomes['plan']} "
            f"| {outcomes['refused']} | {shown} | {cpu_s:.0f} | {over:.2f} |"
        )
    return "\n".join(lines)


def busy() -> AbstractContextManager[Any]:
    """Keep a core busy until the end of a block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    class Ended(nullcontext[None]):
        def __exit__(self, *_: object) -> None:
            process.kill()
            process.wait()

    return Ended()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="number of the first sample")
    parser.add_argument("--only", default="", help="samples whose text has this word")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of each search")
    parser.add_argument("--beside", type=float, default=0.1, help="share beside forced plans")
    parser.add_argument("--busy", action="store_true", help="keep a core busy meanwhile")
    parser.add_argument("--processor", action="store_true", help="limit seconds of the processor")
    parser.add_argument("--measure", action="store_true", help="measure peaks on gloo ranks")
    parser.add_argument("--record", type=Path, help="file to append records to")
    parser.add_argument("--table", type=Path, help="file of records to sum up")
    args = parser.parse_args()
    if args.table is not None:
        print(table(args.table))
        return 0
    if args.processor:
        vars(work)["time"] = SimpleNamespace(monotonic=time.process_time)
    seen, broken, seed = 0, 0, args.seed
    with busy() if args.busy else nullcontext():
        while seen < args.count:
            rung, beside = drawn(seed), random.Random(-1 - seed).random() < args.beside
            seed += 1
            if args.only not in str(rung):
                continue
            if args.measure:
                text, is_broken = measured_line(rung, args.limit)
                seen, broken = seen + 1, broken + is_broken
                print(f"{text} [{seed - 1}]", flush=True)
                continue
            record = {"seed": seed - 1, **row(rung, args.limit, beside_forced=beside)}
            seen, broken = seen + 1, broken + bool(record["broken"])
            print(f"{line(record)} [{seed - 1}]", flush=True)
            if args.record is not None:
                with args.record.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    print(f"{seen} samples, {broken} break a promise")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
