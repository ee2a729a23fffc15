"""The kinds of problem files: each is told, solved, written and refereed in its own way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.solver import Infeasible, Status
from partitioner.solver import solve as solve_placement
from partitioner.solver.formats import dnnp, dnnp_referee, iopddl
from partitioner.solver.formats.dnnp_problem import to_problem, to_solution
from partitioner.solver.milp.engines import Engine
from partitioner.solver.pairwise import evaluate as evaluate_pairwise
from partitioner.solver.pairwise import solve as solve_pairwise

#: The least time that is left for the search of a file that takes long to read, in seconds.
LEAST_S = 0.001


@dataclass(frozen=True)
class Search:
    """What is asked of a search.

    Attributes:
        deadline: Monotonic second at which to stop.
        gap: Relative gap at which to stop.
        seed: Of all random choices.
        engine: Solves the MILPs.
    """

    deadline: float
    gap: float
    seed: int
    engine: Engine

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(LEAST_S, self.deadline - time.monotonic())


@dataclass(frozen=True)
class Solved:
    """What was found, whatever the kind.

    Attributes:
        objective: What is minimised, in words.
        cost: Of the best solution; None if none was found.
        bound: No solution costs less; None if none is feasible.
        gap: (cost - bound) / cost; None without a solution.
        status: See `Solution`.
        reason: Why nothing is feasible; empty otherwise.
        solver: What found the solution / what proved the bound.
        seconds: Wall-clock time of the search.
        solution: What is written to a file; None if none was found.
        trace: (seconds, cost, bound) at every improvement, where the search keeps it.
    """

    objective: str
    cost: float | None
    bound: float | None
    gap: float | None
    status: Status
    reason: str
    solver: str
    seconds: float
    solution: Any
    trace: tuple[tuple[float, float | None, float | None], ...] = ()


@dataclass(frozen=True)
class Priced:
    """A referee's answer: figures by name, and why the solution is infeasible ("" if it is not)."""

    figures: tuple[tuple[str, str], ...]
    fault: str


@dataclass(frozen=True)
class Kind:
    """One kind of problem file.

    Attributes:
        is_problem: Whether JSON content is of this kind.
        solve: From the file's path, its content and what is asked.
        write: A solution into a file.
        evaluate: From the problem's path, its content and the solution's path.
    """

    is_problem: Callable[[Any], bool]
    solve: Callable[[Path, Any, Search], Solved]
    write: Callable[[Any, Path], None]
    evaluate: Callable[[Path, Any, Path], Priced]


def _solve_iopddl(path: Path, data: Any, search: Search) -> Solved:
    problem = iopddl.read(path, data)
    found = solve_pairwise(problem, search.left_s, search.gap, search.seed, engine=search.engine)
    known = found.cost is not None
    return Solved(
        "costs of nodes and edges",
        found.cost,
        _whole(found.bound),
        found.gap if known else None,
        found.status,
        found.reason,
        found.solver,
        found.seconds,
        found.chosen if known else None,
        tuple((spent, _whole(cost), _whole(bound)) for spent, cost, bound in found.trace),
    )


def _whole(value: float) -> int | None:
    """Costs and bounds of whole costs are whole; infinite ones are none."""
    return int(value) if math.isfinite(value) else None


def _evaluate_iopddl(path: Path, data: Any, solution: Path) -> Priced:
    outcome = evaluate_pairwise(iopddl.read(path, data), iopddl.read_solution(solution))
    limit = "no limit" if outcome.limit is None else f"limit {outcome.limit}"
    figures = (("cost", str(outcome.cost)), ("peak usage", f"{outcome.peak_usage} ({limit})"))
    return Priced(figures, outcome.fault)


def _solve_dnnp(path: Path, data: Any, search: Search) -> Solved:
    instance = dnnp.read(path, data)
    objective, start = "throughput (largest load of a device)", time.monotonic()
    try:
        found = solve_placement(
            to_problem(instance),
            time_limit_s=search.left_s,
            gap=search.gap,
            seed=search.seed,
            effort=2,
            engine=search.engine,
        )
    except Infeasible as error:
        status: Status = "infeasible" if error.proven else "time_limit"
        spent = time.monotonic() - start
        return Solved(objective, None, None, None, status, str(error), "none", spent, None)
    return Solved(
        objective,
        found.cost,
        found.bound,
        found.gap,
        found.status,
        "",
        found.solver,
        time.monotonic() - start,
        to_solution(instance, found.chosen),
    )


def _evaluate_dnnp(path: Path, data: Any, solution: Path) -> Priced:
    outcome = dnnp_referee.evaluate(dnnp.read(path, data), dnnp_referee.read_split(solution))
    if outcome.cost_s is None:
        return Priced((), outcome.fault)
    size = f"{outcome.fullest_bytes:.12g} (limit {outcome.limit_bytes:.12g})"
    return Priced((("cost", f"{outcome.cost_s:.12g}"), ("peak usage", size)), outcome.fault)


KINDS = (
    Kind(iopddl.is_problem, _solve_iopddl, iopddl.write_solution, _evaluate_iopddl),
    Kind(dnnp.is_problem, _solve_dnnp, dnnp_referee.write_split, _evaluate_dnnp),
)
