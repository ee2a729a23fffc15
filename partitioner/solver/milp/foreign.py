"""MILP solvers other than HiGHS, through PuLP, which knows how each is called.

Little of what PuLP reports is used: 3.3 says `Optimal` of runs that the time limit stopped. A run
counts as optimal only if PuLP's status of the *solution* says so and the time limit was not used
up; only then is there a bound, from the gap that was asked for.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings

import numpy as np

from partitioner.solver.milp.program import Milp, MilpResult
from partitioner.solver.milp.pulp_program import load_pulp, to_pulp
from partitioner.solver.outcome import Status
from partitioner.solver.problem import SolverError

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
    """Solve with a solver that PuLP drives, with one thread where it takes that option, silently.

    Args:
        milp: The program.
        solver_name: PuLP's name of the solver.
        label: Its name in errors.
        time_limit_s: Wall-clock limit.
        gap: Relative gap at which the solver may stop.

    Raises:
        SolverError: The solver fails.
    """
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
