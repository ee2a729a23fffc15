"""Programs as PuLP's objects, for the solvers that it drives and for the files that it writes."""

from __future__ import annotations

import gzip
import math
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from partitioner.foundations.files import write_file
from partitioner.solver.milp.program import Milp


@cache
def load_pulp() -> Any:
    """PuLP, imported when it is first needed.

    Its classes of solvers that are not installed keep the error of looking for them. From there a
    traceback leads to the frames of all callers of the first import, and all that those hold would
    live as long as the process: a model, its data, process groups with their threads.
    """
    import pulp

    for member in vars(pulp).values():
        error = getattr(member, "err", None)
        if isinstance(error, BaseException):
            error.__traceback__ = None
    return pulp


def program_format(path: Path) -> Literal["lp", "mps"] | None:
    """The format of programs that a file name asks for, `.lp` or `.mps`, also before `.gz`."""
    formats: Mapping[str, Literal["lp", "mps"]] = {".lp": "lp", ".mps": "mps"}
    return formats.get((path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower())


def write_program(milp: Milp, path: Path) -> None:
    """Write a program for other solvers, whole or not at all; gzipped if the name ends in `.gz`.

    Args:
        milp: The program; columns and rows that have names have them in the file, too.
        path: `.lp` is CPLEX's LP format, every other name MPS.

    Raises:
        FileError: The file cannot be written.
    """
    packed = path.suffix == ".gz"
    problem = to_pulp(milp, named=True)
    with tempfile.TemporaryDirectory(prefix="partitioner-program-") as folder:
        draft = Path(folder, "program")
        (problem.writeLP if program_format(path) == "lp" else problem.writeMPS)(draft)
        text = draft.read_bytes()
    write_file(path, gzip.compress(text, mtime=0) if packed else text)


def to_pulp(milp: Milp, *, named: bool = False) -> Any:
    """The program as a `pulp.LpProblem`, its columns in order, or with their names."""
    pulp = load_pulp()
    names = milp.names if named else ()
    problem = pulp.LpProblem("partition", pulp.LpMinimize)
    categories = (pulp.LpContinuous, pulp.LpInteger)
    variables = [
        problem.add_variable(
            # PuLP sorts by name: a number keeps the order
            (names[index] if names else "") or f"x{index:07d}",
            lower,
            None if math.isinf(upper) else upper,
            categories[integer],
        )
        for index, (lower, upper, integer) in enumerate(
            zip(milp.lower, milp.upper, milp.integer, strict=True)
        )
    ]
    costs = zip(variables, milp.cost, strict=True)
    problem.setObjective(
        pulp.LpAffineExpression({x: cost for x, cost in costs if cost or not named})
    )
    for index, row in enumerate(milp.rows):
        expression = pulp.LpAffineExpression(
            {variables[c]: v for c, v in zip(row.columns, row.values, strict=True)}
        )
        name = (row.name if named else "") or f"r{index:07d}"
        problem.addConstraint(pulp.LpConstraint(expression, row.sense, name, row.side))
    return problem
