"""Which MILP solver is used: HiGHS by default, or any that PuLP drives and finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError
from partitioner.solver.joint.lazy_pulp import load_pulp


class EngineError(OptionError):
    """A solver that is not known, or not on this machine."""


@dataclass(frozen=True)
class Engine:
    """A MILP solver.

    Attributes:
        label: How certificates name it.
        pulp: PuLP's name of it; None for HiGHS, which is given arrays.
    """

    label: str
    pulp: str | None = None

    @property
    def name(self) -> str:
        """How users name it."""
        return self.label.lower()


HIGHS = Engine("HiGHS")
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


def find(name: str) -> Engine:
    """The solver of a name, in small or capital letters.

    Args:
        name: "highs", a solver's name like "cbc" or "gurobi", or PuLP's own, like "SCIP_CMD".

    Raises:
        EngineError: There is none of this name, or it is not on this machine.
    """
    if not is_a(name, str):
        raise EngineError(f"solver is {name!r}; give a name like 'highs'")
    if name.lower() == HIGHS.name:
        return HIGHS
    pulp = load_pulp()

    given = {label.lower(): (label, names) for label, names in _PULP.items()}
    own = {listed.lower(): (listed, (listed,)) for listed in pulp.listSolvers()}
    if name.lower() not in {**own, **given}:
        raise EngineError(f"solver {name!r} is not known; there are {', '.join(available())}")
    label, names = {**own, **given}[name.lower()]
    installed = set(pulp.listSolvers(onlyAvailable=True))
    for listed in names:
        if listed in installed:
            return Engine(label, listed)
    raise EngineError(
        f"solver {name!r} was not found on this machine; there are {', '.join(available())}"
    )


def available() -> tuple[str, ...]:
    """Names of the solvers on this machine, the default first."""
    return (HIGHS.name, *_installed())


def _installed() -> Iterator[str]:
    pulp = load_pulp()

    installed = set(pulp.listSolvers(onlyAvailable=True))
    for label, names in _PULP.items():
        if installed.intersection(names):
            yield label.lower()
