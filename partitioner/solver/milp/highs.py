"""HiGHS, given a MILP as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from partitioner.solver.milp.program import Milp, MilpResult
from partitioner.solver.outcome import Status

#: HiGHS 1.15.1's presolve loops without end, whatever the time limit, on some infeasible programs
#: of under 100 columns (a test holds one), also in the sub-MIPs of its heuristics; with the rule
#: at fault switched off it crashes instead. So it is off, and so is all that calls it: the
#: problems are presolved here, and good plans come from elsewhere.
OPTIONS: Mapping[str, object] = {
    "presolve": "off",
    "mip_allow_restart": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_feasibility_tolerance": 1e-6,
    "random_seed": 0,
}


def new_highs() -> Any:
    """A HiGHS that prints nothing, not even while it is made: 1.16 greets on stdout there."""
    import highspy

    class Silent(highspy.Highs):
        def enableCallbacks(self) -> None:  # noqa: N802 - HiGHS calls it as it is made
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    solver = Silent()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    return solver


def solve_with_highs(
    milp: Milp,
    time_limit_s: float,
    gap: float,
    start: Mapping[int, float] | None = None,
    branches: int | None = None,
) -> MilpResult:
    """Solve with one thread and a fixed seed, silently; the arguments are `solve_milp`'s."""
    solver = new_highs()
    options: dict[str, object] = {
        "mip_rel_gap": gap,
        "mip_abs_gap": 1e-9,
        "threads": 1,
        "time_limit": float(time_limit_s),
        **OPTIONS,
    }
    if branches is not None:
        options["mip_max_nodes"] = branches
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(_program(milp))
    if start is not None:
        columns = np.array(list(start), dtype=np.int32)
        solver.setSolution(len(start), columns, np.array(list(start.values()), dtype=np.float64))
    solver.run()
    return _result(milp, solver)


def _program(milp: Milp) -> Any:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(milp.cost), len(milp.rows)
    lp.col_cost_ = np.array(milp.cost)
    lp.col_lower_, lp.col_upper_ = np.array(milp.lower), np.array(milp.upper)
    lp.row_lower_ = np.array([-math.inf if row.sense < 0 else row.side for row in milp.rows])
    lp.row_upper_ = np.array([math.inf if row.sense > 0 else row.side for row in milp.rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(row.columns) for row in milp.rows)])
    lp.a_matrix_.index_ = np.array([c for row in milp.rows for c in row.columns], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([v for row in milp.rows for v in row.values])
    types = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [types[integer] for integer in milp.integer]
    return lp


def _result(milp: Milp, solver: Any) -> MilpResult:
    from highspy import HighsModelStatus, SolutionStatus

    verdict, info = solver.getModelStatus(), solver.getInfo()
    if verdict in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):
        return MilpResult((), math.inf, math.inf, "infeasible")
    values: tuple[float, ...] = ()
    cost = math.inf
    if info.primal_solution_status == SolutionStatus.kSolutionStatusFeasible:
        values = tuple(map(float, solver.getSolution().col_value))
        cost = float(np.dot(milp.cost, values))
    bound = cost if verdict == HighsModelStatus.kOptimal else -math.inf
    if any(milp.integer):
        bound = float(info.mip_dual_bound)
    status: Status = "feasible"
    if verdict == HighsModelStatus.kOptimal:
        status = "optimal"
    elif verdict == HighsModelStatus.kTimeLimit:
        status = "time_limit"
    return MilpResult(values, cost, min(bound, cost), status, max(0, info.mip_node_count))
