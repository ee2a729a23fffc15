"""A MILP through PuLP's own interface, for solvers of which it alone knows how they are called.

Little of what PuLP reports is used: 3.3 says `Optimal` of runs that the time limit stopped. A run
counts as optimal only if PuLP's status of the *solution* says so and the time limit was not used
up; only then is there a bound, from the gap that was asked for.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from partitioner.solver.joint.engines import Engine
from partitioner.solver.joint.lazy_pulp import load_pulp
from partitioner.solver.joint.milp import Milp, MilpResult, Status, to_pulp
from partitioner.solver.problem import SolverError

#: The gap at which solvers stop that PuLP passes none to. Their defaults: GLPK, Choco and MIPCL
#: 0, MOSEK (MSK_DPAR_MIO_TOL_REL_GAP) and SAS (RELOBJGAP) 1e-4.
DEFAULT_GAP = 1e-4
#: Values come as text of at least 8 digits, and satisfy rows within some 1e-7 of their scale.
PRECISION = 1e-6
#: Those that take whole seconds only.
_WHOLE_SECONDS = ("GLPK_CMD",)


def solve_foreign(milp: Milp, engine: Engine, time_limit_s: float, gap: float) -> MilpResult:
    """Solve with a solver that PuLP drives, one thread where it can be asked to, silently.

    Args:
        milp: The program, in units of order 1.
        engine: The solver.
        time_limit_s: Wall-clock limit.
        gap: Relative gap at which the solver may stop.

    Raises:
        SolverError: The solver fails.
    """
    pulp = load_pulp()

    problem = to_pulp(milp)
    limit = math.ceil(time_limit_s) if engine.pulp in _WHOLE_SECONDS else time_limit_s
    wanted = {"timeLimit": limit, "gapRel": gap, "gapAbs": 0.0, "threads": 1}
    solver, taken = _solver(engine, wanted)
    start = time.monotonic()
    try:
        problem.solve(solver)
    except pulp.PulpSolverError as error:
        raise SolverError(f"solver {engine.name} failed: {' '.join(str(error).split())}") from None
    in_time = time.monotonic() - start < limit
    proven = in_time and problem.sol_status == pulp.LpSolutionOptimal
    if in_time and problem.status == pulp.LpStatusInfeasible:
        return MilpResult((), math.inf, math.inf, "infeasible")
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return MilpResult((), math.inf, -math.inf, "time_limit")
    values = tuple(float(variable.varValue or 0.0) for variable in problem.variables())
    cost = float(np.dot(milp.cost, values))
    bound = -math.inf
    if proven:
        reached = (gap if "gapRel" in taken else max(gap, DEFAULT_GAP)) * any(milp.integer)
        # the gap may be relative to the cost or to the bound
        bound = cost - (reached / (1 - reached) + PRECISION) * abs(cost)
    status: Status = "optimal" if proven else "feasible" if in_time else "time_limit"
    return MilpResult(values, cost, bound, status)


def _solver(engine: Engine, wanted: Mapping[str, object]) -> tuple[Any, frozenset[str]]:
    """PuLP's solver with those of the options that it takes, and their names."""
    pulp = load_pulp()

    with warnings.catch_warnings():
        # of PULP_CBC_CMD: PuLP 4 will have none, and is not allowed yet
        warnings.simplefilter("ignore", DeprecationWarning)
        kind = type(pulp.getSolver(engine.pulp, msg=False))
        known = inspect.signature(kind.__init__).parameters
        taken = {name: value for name, value in wanted.items() if name in known}
        return kind(msg=False, **taken), frozenset(taken)
