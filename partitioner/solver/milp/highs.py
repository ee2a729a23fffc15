"""HiGHS, given a MILP through PuLP's interface or, a large one, as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from partitioner.solver.milp.program import Milp, MilpResult
from partitioner.solver.milp.pulp_program import load_pulp, to_pulp
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
#: Columns of programs that go through PuLP. Its objects take about as long as the formulation, and
#: more than the relaxation of a larger program may take.
MOST_PULP_COLUMNS = 20_000


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
    options: dict[str, object] = {
        "mip_rel_gap": gap,
        "mip_abs_gap": 1e-9,
        "threads": 1,
        "time_limit": float(time_limit_s),
        **OPTIONS,
    }
    if branches is not None:
        options["mip_max_nodes"] = branches
    if len(milp.cost) <= MOST_PULP_COLUMNS:
        problem = to_pulp(milp)
        problem.solve(_pulp_highs()(options, start or {}))
        return _result(milp, problem.solverModel)
    solver = _configured(options)
    solver.passModel(
        _program(
            list(zip(milp.cost, milp.lower, milp.upper, milp.integer, strict=True)),
            [(row.columns, row.values, row.sense, row.side) for row in milp.rows],
        )
    )
    _run(solver, start or {})
    return _result(milp, solver)


@cache
def _pulp_highs() -> Any:
    """PuLP's interface to HiGHS, with what it lacks.

    It prints nothing, begins with a given point, and passes the program in one call: PuLP's own
    calls HiGHS for each column and row, which takes as long as the formulation. The result is read
    from HiGHS: PuLP keeps no bound, and fails where a limit of nodes stopped the run.
    """
    pulp = load_pulp()

    class Highs(pulp.HiGHS):  # type: ignore[misc, name-defined]
        def __init__(self, options: Mapping[str, object], start: Mapping[int, float]) -> None:
            super().__init__(msg=False, **options)
            self.start = start

        def actualSolve(self, lp: Any, **_: object) -> int:  # noqa: N802
            lp.solverModel = _configured(self.optionsDict)
            self.buildSolverModel(lp)
            _run(lp.solverModel, self.start)
            return int(pulp.LpStatusNotSolved)  # the result is read from HiGHS

        def buildSolverModel(self, lp: Any) -> None:  # noqa: N802
            columns, rows = lp.variables(), lp.constraints()
            for index, column in enumerate(columns):
                column.index = index
            for index, row in enumerate(rows):
                row.index = index
            lp.solverModel.passModel(
                _program(
                    [
                        (
                            lp.objective.get(x, 0.0),
                            x.lowBound,
                            math.inf if x.upBound is None else x.upBound,
                            x.cat == pulp.LpInteger,
                        )
                        for x in columns
                    ],
                    [
                        ([x.index for x in row], row.values(), row.sense, 0.0 - row.constant)
                        for row in rows
                    ],
                )
            )

    return Highs


def _configured(options: Mapping[str, object]) -> Any:
    solver = new_highs()
    for name, value in options.items():
        solver.setOptionValue(name, value)
    return solver


def _run(solver: Any, start: Mapping[int, float]) -> None:
    if start:
        columns = np.array(list(start), dtype=np.int32)
        solver.setSolution(len(start), columns, np.array(list(start.values()), dtype=np.float64))
    solver.run()


def _program(
    columns: Sequence[tuple[float, float, float, bool]],
    rows: Sequence[tuple[Sequence[int], Iterable[float], int, float]],
) -> Any:
    """A program for HiGHS, of (cost, lower, upper, integral) and (columns, values, sense, side)."""
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(columns), len(rows)
    costs, lower, upper, integer = zip(*columns, strict=True)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = map(np.array, (costs, lower, upper))
    lp.row_lower_ = np.array([-math.inf if sense < 0 else side for *_, sense, side in rows])
    lp.row_upper_ = np.array([math.inf if sense > 0 else side for *_, sense, side in rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(indices) for indices, *_ in rows)])
    lp.a_matrix_.index_ = np.array([c for indices, *_ in rows for c in indices], dtype=np.int32)
    lp.a_matrix_.value_ = np.array([v for _, values, *_ in rows for v in values], dtype=np.float64)
    types = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [types[is_integer] for is_integer in integer]
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
