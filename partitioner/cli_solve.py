"""The commands on problem files: `partition solve FILE`, `partition evaluate FILE SOLUTION`.

The kind of file is told from its content. Exit codes of `solve` are those of the command line;
`evaluate` exits with 0 for a feasible solution and with 1 for any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner.cli_options import command, fraction, natural, seconds
from partitioner.files import check_file
from partitioner.ir.errors import PartitionerError

if TYPE_CHECKING:
    from partitioner.solver.pairwise import Pairwise, PairwiseSolution


def solve_command(argv: Sequence[str]) -> int:
    """Solve a problem file: cost, bound, gap and status on stdout."""
    about = "Solve a problem file of the contest on intra-operator parallelism (iopddl)."
    parser = command("solve", about, FILE="JSON, plain or gzipped")
    add = parser.add_argument
    add(
        "--time-limit",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds, reading included (default 60)",
    )
    add("--gap", type=fraction, default=0.0, metavar="P", help="stop at this gap (default 0)")
    add("-o", "--output", type=Path, metavar="SOLUTION", help="file to write the solution to")
    add("--json", action="store_true", help="print the facts as JSON, with the trace")
    add("--seed", type=natural, default=0, metavar="N", help="of the search (default 0)")
    args = parser.parse_args(argv)
    if args.output is not None:
        check_file(args.output)
    import time

    start = time.monotonic()
    problem = _read(Path(args.file))
    from partitioner.solver.pairwise import solve

    left = max(0.001, args.time_limit - (time.monotonic() - start))
    found = solve(problem, left, args.gap, args.seed)
    if args.output is not None and found.cost is not None:
        from partitioner.solver.pairwise.iopddl import write_solution

        write_solution(found.chosen, args.output)
    print(json.dumps(_facts(found), indent=1) if args.json else _text(found))
    if found.cost is not None:
        return 0
    return 3 if found.status == "infeasible" else 1


def evaluate_command(argv: Sequence[str]) -> int:
    """Check and price a solution of a problem file."""
    about = "Check and price a solution of a problem file, exactly."
    parser = command(
        "evaluate",
        about,
        FILE="the problem: JSON, plain or gzipped",
        SOLUTION="JSON list of strategy indices",
    )
    args = parser.parse_args(argv)
    problem = _read(Path(args.file))
    from partitioner.solver.pairwise import evaluate
    from partitioner.solver.pairwise.iopddl import read_solution

    outcome = evaluate(problem, read_solution(Path(args.solution)))
    limit = "no limit" if outcome.limit is None else f"limit {outcome.limit}"
    print(f"cost        {outcome.cost}")
    print(f"peak usage  {outcome.peak_usage} ({limit})")
    print(f"infeasible: {outcome.fault}" if outcome.fault else "feasible")
    return 1 if outcome.fault else 0


def _read(path: Path) -> Pairwise:
    """A problem of whichever kind the file's content shows."""
    from partitioner.solver.json_files import read_json
    from partitioner.solver.pairwise import iopddl

    data = read_json(path)
    if iopddl.is_problem(data):
        return iopddl.read(path, data)
    raise PartitionerError(f'{path}: no known kind of problem (iopddl has a "problem" object)')


def _facts(found: PairwiseSolution) -> dict[str, object]:
    known = found.cost is not None
    return {
        "status": found.status,
        "cost": found.cost,
        "bound": None if math.isinf(found.bound) else found.bound,
        "gap": found.gap if known else None,
        "seconds": found.seconds,
        "reason": found.reason or None,
        "trace": [
            [spent, None if math.isinf(cost) else cost, bound] for spent, cost, bound in found.trace
        ],
    }


def _text(found: PairwiseSolution) -> str:
    if found.cost is None:
        why = found.reason or "no feasible choice was found in time"
        return f"status  {found.status}: {why}"
    return (
        f"cost    {found.cost}\n"
        f"bound   {found.bound:.0f}\n"
        f"gap     {found.gap:.4%}\n"
        f"status  {found.status} ({found.seconds:.1f} s)"
    )
