"""A problem of one column, which stands for devices of equal work: its plan, or why none fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partitioner.cost_model.equal_devices.even_mesh import EvenMesh
from partitioner.ir.graph import Graph
from partitioner.problem.build import Built
from partitioner.problem.memory_kinds import parts_text, planned_parts
from partitioner.solver import Infeasible, Solution, evaluate_choices
from partitioner.solver.joint.shortage import shortage_message
from partitioner.solver.milp.engines import Engine
from partitioner.solver.outcome import relative_gap
from partitioner.solver.presolve.merge_equal import merge_equal
from partitioner.solver.problem import Problem
from partitioner.solver.work import Work

#: The least seconds of a search that has begun.
LEAST_S = 0.01


def minimised(
    problem: Problem,
    work: Work,
    gap: float,
    rounds: int,
    engine: Engine,
    patience: int,
    start: Sequence[int] | None = None,
    *,
    least_s: float = 0.0,
) -> Solution | None:
    """A plan of little load within the column's memory; None if none was found.

    The clock that stops `work` stops the search, but not before it has taken `least_s` seconds; the
    other arguments are those of `pairwise.solve`. `start` is a plan that fits, so that nothing that
    costs more is of use.
    """
    from partitioner.solver.pairwise import solve  # they load Numba
    from partitioner.solver.pairwise.convert import PER_SECOND, convert

    merged = merge_equal(problem)
    if not all(merged.problem.nodes):
        return None
    converted = convert(merged.problem)
    outcome = solve(
        converted.pairwise,
        max(work.left_s, least_s, LEAST_S),
        gap,
        rounds=rounds,
        engine=engine,
        patience=patience,
        start=converted.assign(merged.lower(start)) if start is not None else None,
    )
    if outcome.status == "time_limit" and not work.left_s:
        work.stop()
    if outcome.cost is None:
        return None
    chosen = merged.restore(converted.restore(outcome.chosen))
    cost = evaluate_choices(problem, chosen).load_s[0]
    bound = min(cost, outcome.bound / PER_SECOND)
    met = relative_gap(cost, bound) <= gap
    return Solution(chosen, cost, bound, "optimal" if met else "feasible", None, outcome.solver)


def refused(
    graph: Graph, even: EvenMesh, built: Built, chosen: Sequence[int], room: float
) -> Infeasible:
    """The refusal of a plan above a `room`, as if the axes after this one cut all its bytes."""
    outcome = evaluate_choices(built.problem, chosen)
    position = outcome.peak_position[0]
    name = built.problem.names[position]
    limit = even.cluster.devices[even.device].memory_bytes
    lines = room / limit
    held = math.ceil(outcome.peak_bytes[0] / lines)
    message = shortage_message(
        proven=False,
        least=False,
        where=f"on each device at {name!r}",
        short=held - limit,
        held=held,
        limit=limit,
    )
    parts = planned_parts(graph, built, chosen, position)
    each = parts_text({kind: round(size / lines) for kind, size in parts.items()})
    return Infeasible(
        f"{message}; there it holds {each}; this is {even.mesh}",
        device=even.device,
        position=position,
        name=name,
        bytes_short=float(held - limit),
        proven=False,
    )
