"""One problem of one column: of devices that all do alike."""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.solver import Solution, evaluate_choices
from partitioner.solver.merge_equal import merge_equal
from partitioner.solver.milp.engines import Engine
from partitioner.solver.outcome import relative_gap
from partitioner.solver.problem import Problem


def minimised(
    problem: Problem,
    time_limit_s: float,
    gap: float,
    rounds: int,
    engine: Engine,
    patience: int,
    start: Sequence[int] | None = None,
) -> Solution | None:
    """A plan of little load on one column within its memory; None if none was found.

    Args:
        problem: The problem.
        time_limit_s: See `pairwise.solve`, as `gap`, `rounds`, `engine` and `patience`.
        gap: Relative.
        rounds: Of bound and search.
        engine: MILP solver.
        patience: Rounds that gain next to nothing.
        start: A plan that fits: nothing that costs more is of use.
    """
    from partitioner.solver.pairwise import solve  # they load Numba
    from partitioner.solver.pairwise.convert import PER_SECOND, convert

    merged = merge_equal(problem)
    if not all(merged.problem.nodes):
        return None
    converted = convert(merged.problem)
    found = solve(
        converted.pairwise,
        time_limit_s,
        gap,
        rounds=rounds,
        engine=engine,
        patience=patience,
        start=converted.assign(merged.lower(start)) if start is not None else None,
    )
    if found.cost is None:
        return None
    chosen = merged.restore(converted.restore(found.chosen))
    cost = evaluate_choices(problem, chosen).load_s[0]
    bound = min(cost, found.bound / PER_SECOND)
    met = relative_gap(cost, bound) <= gap
    return Solution(chosen, cost, bound, "optimal" if met else "feasible", None, found.solver)
