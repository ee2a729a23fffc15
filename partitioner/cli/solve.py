"""The commands on problem files: `partition solve FILE`, `partition evaluate FILE SOLUTION`.

The file's content tells its format. Exit codes of `solve` are those of the command line;
`evaluate` exits with 0 for a feasible solution and with 1 for any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partitioner.cli.options import command, fraction, safe, seconds, solver_options
from partitioner.files import check_file

if TYPE_CHECKING:
    from partitioner.solver.formats.files import Solved

_ABOUT = "JSON of google/iopddl, msr-fiddle/dnn-partitioning or msr-fiddle/piper, plain or gzipped"


def solve_command(argv: Sequence[str]) -> int:
    """Solve a problem file: cost, bound, gap and status on stdout."""
    parser = command(
        "solve", "Solve a problem file; its kind is told from its content.", FILE=_ABOUT
    )
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
    solver_options(parser)
    args = parser.parse_args(argv)
    if args.output is not None:
        check_file(args.output)
    start = time.monotonic()
    from partitioner.solver.formats.files import Search, read_problem
    from partitioner.solver.formats.json_files import write_solution
    from partitioner.solver.milp.engines import find

    engine = find(args.solver)
    problem_format, problem = read_problem(Path(args.file))
    search = Search(start + args.time_limit, args.gap, args.seed, engine)
    solved = problem_format.solve(problem, search)
    if args.output is not None and solved.solution is not None:
        write_solution(solved.solution, args.output)
    print(json.dumps(_facts(solved), indent=1) if args.json else safe(_text(solved)))
    if solved.cost is not None:
        return 0
    return 3 if solved.status == "infeasible" else 1


def evaluate_command(argv: Sequence[str]) -> int:
    """Check and price a solution of a problem file."""
    parser = command(
        "evaluate",
        "Check and price a solution of a problem file, exactly.",
        FILE=_ABOUT,
        SOLUTION="JSON as `partition solve -o` writes it",
    )
    args = parser.parse_args(argv)
    from partitioner.solver.formats.files import read_problem
    from partitioner.solver.formats.json_files import read

    problem_format, problem = read_problem(Path(args.file))
    solution = read(Path(args.solution), problem_format.parse_solution)
    priced = problem_format.evaluate(problem, solution)
    for name, value in priced.figures:
        print(f"{name:10}  {value}")
    print(f"infeasible: {priced.fault}" if priced.fault else "feasible")
    return 1 if priced.fault else 0


def _facts(solved: Solved) -> dict[str, object]:
    facts = vars(solved) | {"reason": solved.reason or None}
    del facts["solution"]
    return facts


def _text(solved: Solved) -> str:
    rows = [("objective", solved.objective)]
    if solved.cost is None:
        why = solved.reason or "no feasible solution was found in time"
        rows.append(("status", f"{solved.status}: {why}"))
    else:
        assert solved.gap is not None
        rows += [
            ("cost", _number(solved.cost)),
            ("bound", _number(solved.bound or 0)),
            ("gap", f"{solved.gap:.4%}"),
            ("status", solved.status),
        ]
    rows += [("seconds", f"{solved.seconds:.1f}"), ("solver", solved.solver)]
    return "\n".join(f"{name:9}  {value}" for name, value in rows)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"
