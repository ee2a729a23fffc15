"""The commands on problem files: `partition solve FILE`, `partition evaluate FILE SOLUTION`.

The file's content tells its format. Exit codes of `solve` are those of the command line;
`evaluate` exits with 0 for a feasible solution and with 1 for any other.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from partitioner.cli.options import Json, Seed, Solver, listed
from partitioner.cli.terminal import aside
from partitioner.foundations import units
from partitioner.foundations.files import check_file
from partitioner.report.text.tables import safe

if TYPE_CHECKING:
    from partitioner.solver.formats.files import Solved

Problem = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="JSON of google/iopddl, msr-fiddle/dnn-partitioning or msr-fiddle/piper, plain or "
        "gzipped.",
    ),
]


def solve(
    file: Problem,
    time_limit: Annotated[float, listed("solve", "time_limit")] = 60.0,
    gap: Annotated[float, listed("solve", "gap")] = 0.0,
    solver: Solver = "highs",
    seed: Seed = 0,
    output: Annotated[Path | None, listed("solve", "output")] = None,
    as_json: Json = False,
) -> int:
    """Solve a problem file of another project; its content tells the format."""
    if output is not None:
        check_file(output)
    from partitioner.solver.work import now_s

    start = now_s()
    from partitioner.solver.formats.files import Search, read_problem
    from partitioner.solver.formats.json_files import write_solution
    from partitioner.solver.milp.engines import find
    from partitioner.solver.work import COMPILATION

    engine = find(solver)
    problem_format, problem = read_problem(file)
    search = Search(start + time_limit, gap, seed, engine)
    with COMPILATION.told_to(lambda text: aside(f"{text} ...")):
        solved = problem_format.solve(problem, search)
    if output is not None and solved.solution is not None:
        write_solution(solved.solution, output)
    facts = {name: value for name, value in vars(solved).items() if name != "solution"}
    facts["reason"] = solved.reason or None
    print(json.dumps(facts, indent=1) if as_json else safe(_text(solved)))
    if solved.cost is not None:
        return 0
    return 3 if solved.status == "infeasible" else 1


def evaluate(
    file: Problem,
    solution: Annotated[
        Path,
        typer.Argument(metavar="SOLUTION", help="JSON as `partition solve -o` writes it."),
    ],
) -> int:
    """Check and price a solution of a problem file, exactly."""
    from partitioner.solver.formats.files import read_problem
    from partitioner.solver.formats.json_files import read

    problem_format, problem = read_problem(file)
    choices = read(solution, problem_format.parse_solution)
    priced = problem_format.evaluate(problem, choices)
    for name, value in priced.figures:
        print(f"{name:10}  {value}")
    print(f"infeasible: {priced.fault}" if priced.fault else "feasible")
    return 1 if priced.fault else 0


def _text(solved: "Solved") -> str:
    rows = [("objective", solved.objective)]
    if solved.cost is None:
        why = solved.reason or "no feasible solution was found in time"
        rows.append(("status", f"{solved.status}: {why}"))
    else:
        assert solved.gap is not None
        rows += [
            ("cost", _number(solved.cost)),
            ("bound", _number(solved.bound or 0)),
            ("gap", units.share(solved.gap)),
            ("status", solved.status),
        ]
    rows += [("seconds", f"{solved.seconds:.1f}"), ("solver", solved.solver)]
    return "\n".join(f"{name:9}  {value}" for name, value in rows)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.10g}"
