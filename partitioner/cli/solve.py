"""The commands on problem files: `partition solve FILE`, `partition evaluate FILE SOLUTION`.

The kind of file is told from its content. Exit codes of `solve` are those of the command line;
`evaluate` exits with 0 for a feasible solution and with 1 for any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.cli.options import command, fraction, safe, seconds, solver_options
from partitioner.files import check_file
from partitioner.ir.errors import PartitionerError

if TYPE_CHECKING:
    from partitioner.solver.formats.files import Kind, Solved

_ABOUT = "JSON of google/iopddl or msr-fiddle/dnn-partitioning, plain or gzipped"


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
    from partitioner.solver.formats.files import Search
    from partitioner.solver.milp.engines import find

    engine = find(args.solver)
    kind, data = _read(Path(args.file))
    search = Search(start + args.time_limit, args.gap, args.seed, engine)
    found = kind.solve(Path(args.file), data, search)
    if args.output is not None and found.solution is not None:
        kind.write(found.solution, args.output)
    print(json.dumps(_facts(found), indent=1) if args.json else safe(_text(found)))
    if found.cost is not None:
        return 0
    return 3 if found.status == "infeasible" else 1


def evaluate_command(argv: Sequence[str]) -> int:
    """Check and price a solution of a problem file."""
    parser = command(
        "evaluate",
        "Check and price a solution of a problem file, exactly.",
        FILE=_ABOUT,
        SOLUTION="JSON as `partition solve -o` writes it",
    )
    args = parser.parse_args(argv)
    kind, data = _read(Path(args.file))
    found = kind.evaluate(Path(args.file), data, Path(args.solution))
    for name, value in found.figures:
        print(f"{name:10}  {value}")
    print(f"infeasible: {found.fault}" if found.fault else "feasible")
    return 1 if found.fault else 0


def _read(path: Path) -> tuple[Kind, Any]:
    """The kind that the file's content shows, and the content."""
    from partitioner.solver.formats.files import KINDS
    from partitioner.solver.formats.json_files import read_json

    data = read_json(path)
    for kind in KINDS:
        if kind.is_problem(data):
            return kind, data
    raise PartitionerError(
        f'{path}: no known kind of problem (iopddl has a "problem" object, dnn-partitioning '
        '"nodes" and "maxFPGAs")'
    )


def _facts(found: Solved) -> dict[str, object]:
    return {
        "objective": found.objective,
        "cost": found.cost,
        "bound": found.bound,
        "gap": found.gap,
        "status": found.status,
        "seconds": found.seconds,
        "solver": found.solver,
        "reason": found.reason or None,
        "trace": [list(entry) for entry in found.trace],
    }


def _text(found: Solved) -> str:
    rows = [("objective", found.objective)]
    if found.cost is None:
        why = found.reason or "no feasible solution was found in time"
        rows.append(("status", f"{found.status}: {why}"))
    else:
        assert found.gap is not None
        rows += [
            ("cost", _number(found.cost)),
            ("bound", _number(found.bound or 0)),
            ("gap", f"{found.gap:.4%}"),
            ("status", found.status),
        ]
    rows += [("seconds", f"{found.seconds:.1f}"), ("solver", found.solver)]
    return "\n".join(f"{name:9}  {value}" for name, value in rows)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"
