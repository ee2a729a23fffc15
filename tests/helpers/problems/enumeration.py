"""The best plan of a small problem, by enumeration."""

from __future__ import annotations

import itertools
import math

from partitioner.solver.problem import Problem
from partitioner.solver.referee import Objective, evaluate_choices


def brute_force(problem: Problem, objective: Objective) -> tuple[tuple[int, ...], float] | None:
    """The best plan; None if no allowed plan fits."""
    best: tuple[int, ...] | None = None
    best_value = math.inf
    for chosen in itertools.product(*(range(len(choices)) for choices in problem.nodes)):
        if any(edge.pair(chosen) in edge.forbidden for edge in problem.edges):
            continue
        outcome = evaluate_choices(problem, chosen)
        if outcome.excess_bytes <= 0 and outcome.value(objective) < best_value:
            best, best_value = chosen, outcome.value(objective)
    return None if best is None else (best, best_value)
