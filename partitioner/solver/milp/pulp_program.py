"""Programs as PuLP's objects, for the solvers that it drives and for the files that it writes.

Little of what PuLP reports of solvers other than HiGHS is used: 3.3 says `Optimal` of runs that the
time limit stopped. A run counts as optimal only if PuLP's status of the *solution* says so and the
time limit was not used up; only then is there a bound, from the gap that was asked for.
"""

from __future__ import annotations

import gzip
import inspect
import math
import tempfile
import time
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from partitioner.foundations.files import write_file
from partitioner.solver.milp.program import Milp, MilpResult
from partitioner.solver.outcome import Status
from partitioner.solver.problem import SolverError


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
    """Write a program with its names, whole or not at all; gzipped if the name ends in `.gz`.

    `.lp` is CPLEX's LP format, every other name MPS.
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


#: The gap at which solvers stop that PuLP passes none to. Their defaults: GLPK, Choco and MIPCL
#: 0, MOSEK (MSK_DPAR_MIO_TOL_REL_GAP) and SAS (RELOBJGAP) 1e-4.
DEFAULT_GAP = 1e-4
#: Values come as text of at least 8 digits, and satisfy rows within some 1e-7 of their scale.
PRECISION = 1e-6
#: Solvers that take whole seconds only.
_WHOLE_SECONDS = ("GLPK_CMD",)


def solve_with_pulp(
    milp: Milp, solver_name: str, label: str, time_limit_s: float, gap: float
) -> MilpResult:
    """Solve with a solver of PuLP's, with one thread where it takes that option, silently."""
    pulp = load_pulp()
    problem = to_pulp(milp)
    limit = math.ceil(time_limit_s) if solver_name in _WHOLE_SECONDS else time_limit_s
    with warnings.catch_warnings():
        # of PULP_CBC_CMD: PuLP 4 will have none, and is not allowed yet
        warnings.simplefilter("ignore", DeprecationWarning)
        solver_class = type(pulp.getSolver(solver_name, msg=False))
        known = inspect.signature(solver_class.__init__).parameters
        options = {"timeLimit": limit, "gapRel": gap, "gapAbs": 0.0, "threads": 1}
        options = {name: value for name, value in options.items() if name in known}
        solver = solver_class(msg=False, **options)
    start = time.monotonic()
    try:
        problem.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"solver {label} failed: {' '.join(str(error).split())}") from None
    in_time = time.monotonic() - start < limit
    if in_time and problem.status == pulp.LpStatusInfeasible:
        return MilpResult((), math.inf, math.inf, "infeasible")
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return MilpResult((), math.inf, -math.inf, "time_limit")
    values = tuple(float(variable.varValue or 0.0) for variable in problem.variables())
    cost = float(np.dot(milp.cost, values))
    bound = -math.inf
    status: Status = "feasible" if in_time else "time_limit"
    if in_time and problem.sol_status == pulp.LpSolutionOptimal:
        reached = (gap if "gapRel" in options else max(gap, DEFAULT_GAP)) * any(milp.integer)
        # the gap may be relative to the cost or to the bound
        bound = cost - (reached / (1 - reached) + PRECISION) * abs(cost)
        status = "optimal"
    return MilpResult(values, cost, bound, status)
