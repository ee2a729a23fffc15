"""The MILP solver that is used: HiGHS by default, or any that PuLP drives and finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError
from partitioner.solver.milp.highs import solve_with_highs
from partitioner.solver.milp.program import Milp, MilpResult
from partitioner.solver.milp.pulp_program import load_pulp, solve_with_pulp
from partitioner.solver.work import STEPS_PER_S, Work


class EngineError(OptionError):
    """A solver that is not known, or not on this machine."""


@dataclass(frozen=True)
class Engine:
    """A MILP solver."""

    label: str  #: Its name in certificates.
    pulp: str | None = None  #: PuLP's name of it; None for HiGHS, which is given arrays.

    @property
    def name(self) -> str:
        """Name the engine in options and messages."""
        return self.label.lower()

    @property
    def integer_program(self) -> str:
        """Say in a certificate that this solver's integer program found or proved something."""
        return f"{self._through} (integer program)"

    @property
    def relaxation(self) -> str:
        """Say in a certificate that this solver's linear relaxation did."""
        return f"{self._through} (linear relaxation)"

    @property
    def _through(self) -> str:
        return self.label if self.pulp is None else f"{self.label} through PuLP"


HIGHS = Engine("HiGHS")
#: The least wall-clock limit of a solver, in seconds.
LEAST_S = 0.01
#: Names of solvers in options; PuLP's own names, like "SCIP_CMD", are understood too.
SolverName = Literal[
    "highs",
    "cbc",
    "choco",
    "copt",
    "cplex",
    "cuopt",
    "cylp",
    "fscip",
    "glpk",
    "gurobi",
    "mipcl",
    "mosek",
    "sas",
    "scip",
    "xpress",
]
#: PuLP 3.3's names of each solver, the preferred first. CBC comes with PuLP.
_PULP: Mapping[str, tuple[str, ...]] = {
    "CBC": ("PULP_CBC_CMD", "COIN_CMD", "COINMP_DLL"),
    "CHOCO": ("CHOCO_CMD",),
    "COPT": ("COPT", "COPT_CMD", "COPT_DLL"),
    "CPLEX": ("CPLEX_PY", "CPLEX_CMD"),
    "cuOpt": ("CUOPT",),
    "CyLP": ("CyLP",),
    "FSCIP": ("FSCIP_CMD",),
    "GLPK": ("GLPK_CMD", "PYGLPK"),
    "Gurobi": ("GUROBI", "GUROBI_CMD"),
    "MIPCL": ("MIPCL_CMD",),
    "MOSEK": ("MOSEK",),
    "SAS": ("SAS94", "SASCAS"),
    "SCIP": ("SCIP_PY", "SCIP_CMD"),
    "XPRESS": ("XPRESS_PY", "XPRESS"),
}


#: Steps of one node of branch and bound, for each entry of the rows: HiGHS solves the relaxation of
#: ResNet-50 on 4 devices (14,916 entries) in 0.4 s.
NODE_STEPS = 40


def node_steps_of(milp: Milp) -> float:
    """Steps of one node of branch and bound, the root too."""
    return NODE_STEPS * max(1, sum(len(row.columns) for row in milp.rows))


def solve_milp(
    milp: Milp,
    work: Work,
    gap: float,
    start: Mapping[int, float] | None = None,
    engine: Engine = HIGHS,
) -> MilpResult:
    """Solve with one thread and, where the solver takes one, a fixed seed; silently.

    Args:
        work: Steps left for nodes of branch and bound; the root is always solved. Solvers other
            than HiGHS count no nodes: they have the seconds that the steps usually take.
        start: Values of the integer columns to start from; HiGHS completes them, other solvers
            start from nothing.

    Raises:
        SolverError: A solver other than HiGHS fails.
    """
    if not milp.cost:
        return MilpResult((), 0.0, 0.0, "optimal")
    node_steps = node_steps_of(milp)
    if engine.pulp is None:
        most = work.left / node_steps
        nodes = max(1, int(most)) if math.isfinite(most) else None
        result = solve_with_highs(milp, max(work.left_s, LEAST_S), gap, start, nodes)
    else:
        limit_s = max(min(work.left_s, work.left / STEPS_PER_S), LEAST_S)
        result = solve_with_pulp(milp, engine.pulp, engine.name, limit_s, gap)
    work.spend(max(1, result.branches) * node_steps)
    if result.status == "time_limit":
        work.stop()
    return result


def find(name: str) -> Engine:
    """The solver of a name like "highs", "cbc" or "Gurobi", or of PuLP's own, like "SCIP_CMD"."""
    if not is_a(name, str):
        raise EngineError(f"solver is {name!r}; give a name like 'highs'")
    if name.lower() == HIGHS.name:
        return HIGHS
    pulp = load_pulp()
    by_label = {**{listed: (listed,) for listed in pulp.listSolvers()}, **_PULP}
    by_name = {label.lower(): (label, names) for label, names in by_label.items()}
    if name.lower() not in by_name:
        raise EngineError(f"solver {name!r} is not known; there are {', '.join(available())}")
    label, names = by_name[name.lower()]
    installed = set(pulp.listSolvers(onlyAvailable=True))
    for listed in names:
        if listed in installed:
            return Engine(label, listed)
    raise EngineError(
        f"solver {name!r} was not found on this machine; there are {', '.join(available())}"
    )


def available() -> tuple[str, ...]:
    """Names of the solvers on this machine, the default first."""
    installed = set(load_pulp().listSolvers(onlyAvailable=True))
    labels = (label.lower() for label, names in _PULP.items() if installed.intersection(names))
    return (HIGHS.name, *labels)
