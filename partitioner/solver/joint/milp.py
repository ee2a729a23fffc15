"""A mixed-integer linear program as arrays, and its solution: with HiGHS, or through `foreign`.

HiGHS's status, bound and gap are read from the solver's own model: PuLP reports `Optimal` for a
run stopped by its time limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from partitioner.solver.joint.engines import HIGHS, Engine
from partitioner.solver.joint.lazy_pulp import load_pulp

Status = Literal["optimal", "feasible", "infeasible", "time_limit"]
Floats = npt.NDArray[np.float64]

#: A distance from an integer that still counts as integral (HiGHS's mip_feasibility_tolerance).
INTEGRALITY = 1e-6
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
    "mip_feasibility_tolerance": INTEGRALITY,
    "random_seed": 0,
}


@dataclass(frozen=True)
class Row:
    """Sum of value x column, compared with `side`: `sense` is -1 for <=, 0 for =, 1 for >=."""

    columns: tuple[int, ...]
    values: tuple[float, ...]
    sense: Literal[-1, 0, 1]
    side: float


@dataclass(frozen=True)
class Milp:
    """Minimise cost @ x with lower <= x <= upper, integral where `integer` says so, and rows."""

    cost: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    integer: tuple[bool, ...]
    names: tuple[str, ...]
    rows: tuple[Row, ...]

    def relaxed(self) -> Milp:
        """The linear program: no column is integral."""
        return replace(self, integer=(False,) * len(self.integer))


@dataclass(frozen=True)
class MilpResult:
    """What a solver found.

    Attributes:
        values: One value a column; empty if no feasible point was found.
        cost: Objective of the values; infinite if there are none.
        bound: No feasible point costs less.
        status: `optimal` is proven within the gap asked for; `feasible` was stopped otherwise
            than by time; `time_limit` may have values or not.
    """

    values: tuple[float, ...]
    cost: float
    bound: float
    status: Status


@dataclass
class MilpBuilder:
    """Collects columns and rows; `build` freezes them."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def column(
        self, name: str, *, cost: float = 0.0, upper: float = math.inf, integer: bool = False
    ) -> int:
        """Add a column that is at least 0; return its index."""
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integer.append(integer)
        self.names.append(name)
        return len(self.cost) - 1

    def row(
        self, terms: Iterable[tuple[int, float]], sense: Literal[-1, 0, 1], side: float
    ) -> None:
        """Add a row; terms of one column are summed; zeros, and a true row without terms, go."""
        total: dict[int, float] = {}
        for column, value in terms:
            total[column] = total.get(column, 0.0) + value
        kept = {column: value for column, value in total.items() if value}
        if kept or not _holds(0.0, sense, side):
            self.rows.append(Row(tuple(kept), tuple(kept.values()), sense, side))

    def build(self) -> Milp:
        """The program so far."""
        return Milp(
            tuple(self.cost),
            tuple(self.lower),
            tuple(self.upper),
            tuple(self.integer),
            tuple(self.names),
            tuple(self.rows),
        )


def _holds(value: float, sense: int, side: float) -> bool:
    if sense == 0:
        return value == side
    return value <= side if sense < 0 else value >= side


def solve_milp(
    milp: Milp,
    time_limit_s: float,
    gap: float,
    start: Mapping[int, float] | None = None,
    branches: int | None = None,
    engine: Engine = HIGHS,
) -> MilpResult:
    """Solve with one thread and, where the solver can be asked to, a fixed seed; silently.

    Args:
        milp: The program, in units of order 1.
        time_limit_s: Wall-clock limit.
        gap: Relative gap at which the solver may stop.
        start: Values of the integer columns to start from; HiGHS completes them, other solvers
            start from nothing.
        branches: Nodes of branch and bound, a limit that does not depend on the machine; of
            HiGHS only.
        engine: The solver.

    Raises:
        SolverError: A solver other than HiGHS fails.
    """
    if not milp.cost:
        return MilpResult((), 0.0, 0.0, "optimal")
    if engine.pulp is not None:
        from partitioner.solver.joint.foreign import solve_foreign

        return solve_foreign(milp, engine, max(time_limit_s, 0.01), gap)
    problem = to_pulp(milp)
    highs = _engine(milp, start)(
        msg=False,
        threads=1,
        timeLimit=max(time_limit_s, 0.01),
        gapRel=gap,
        gapAbs=1e-9,
        **OPTIONS,
        **({} if branches is None else {"mip_max_nodes": branches}),
    )
    problem.solve(highs)
    values = tuple(float(variable.varValue) for variable in problem.variables())
    return _result(milp, problem.solverModel, values)


def to_pulp(milp: Milp) -> Any:
    """The program as a `pulp.LpProblem` for any solver that PuLP drives; its columns in order."""
    pulp = load_pulp()

    problem = pulp.LpProblem("partition", pulp.LpMinimize)
    kinds = (pulp.LpContinuous, pulp.LpInteger)
    variables = [
        problem.add_variable(
            f"x{index:07d}",  # PuLP sorts by name: this keeps the order
            lower,
            None if math.isinf(upper) else upper,
            kinds[integer],
        )
        for index, (lower, upper, integer) in enumerate(
            zip(milp.lower, milp.upper, milp.integer, strict=True)
        )
    ]
    problem.setObjective(pulp.LpAffineExpression(dict(zip(variables, milp.cost, strict=True))))
    for index, row in enumerate(milp.rows):
        expression = pulp.LpAffineExpression(
            {variables[c]: v for c, v in zip(row.columns, row.values, strict=True)}
        )
        problem.addConstraint(pulp.LpConstraint(expression, row.sense, f"r{index:07d}", row.side))
    return problem


def _engine(milp: Milp, start: Mapping[int, float] | None) -> Any:
    """PuLP's HiGHS class, taught to pass the model as arrays and to start from a solution."""
    pulp = load_pulp()

    class ArrayHiGHS(pulp.HiGHS):  # type: ignore[misc,name-defined]
        def buildSolverModel(self, lp: Any) -> None:  # noqa: N802
            for index, variable in enumerate(lp.variables()):
                variable.index = index
            for index, constraint in enumerate(lp._constraints.values()):  # noqa: SLF001
                constraint.index = index
            lp.solverModel.passModel(_highs_lp(milp))

        def callSolver(self, lp: Any) -> None:  # noqa: N802
            if start is not None:
                columns = np.array(list(start), dtype=np.int32)
                values = np.array(list(start.values()), dtype=np.float64)
                lp.solverModel.setSolution(len(start), columns, values)
            super().callSolver(lp)

        def findSolutionValues(self, lp: Any) -> tuple[int, int]:  # noqa: N802
            try:
                found: tuple[int, int] = super().findSolutionValues(lp)
            except KeyError:  # PuLP 3.3 sets the values, but knows no stop at the branch limit
                return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
            return found

    return ArrayHiGHS


def _highs_lp(milp: Milp) -> Any:
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
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[integer] for integer in milp.integer]
    return lp


def _result(milp: Milp, model: Any, values: tuple[float, ...]) -> MilpResult:
    import highspy

    verdict = model.getModelStatus()
    info = model.getInfo()
    if verdict in (
        highspy.HighsModelStatus.kInfeasible,
        highspy.HighsModelStatus.kUnboundedOrInfeasible,
    ):
        return MilpResult((), math.inf, math.inf, "infeasible")
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    cost = math.inf
    if found:
        cost = float(np.dot(milp.cost, values))
    if any(milp.integer):
        bound = float(info.mip_dual_bound)
    else:
        bound = cost if verdict == highspy.HighsModelStatus.kOptimal else -math.inf
    return MilpResult(values if found else (), cost, min(bound, cost), _status(verdict, found))


def _status(verdict: Any, found: bool) -> Status:
    import highspy

    if verdict == highspy.HighsModelStatus.kOptimal:
        return "optimal"
    if verdict == highspy.HighsModelStatus.kTimeLimit or not found:
        return "time_limit"
    return "feasible"
