"""The best plan and the best bound of a search."""

import math

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import spmd
from partitioner.solver.progress import Progress
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work


def test_a_plan_below_a_bound_refutes_it() -> None:
    problem = spmd(0, 5, 3, forbid=0.0)
    best = brute_force(problem, "throughput")
    assert best is not None
    chosen, cost = best
    worse = next(
        plan
        for plan in ((choice,) * 5 for choice in range(3))
        if evaluate_choices(problem, plan).value("throughput") > 1.01 * cost
    )
    progress = Progress(problem, "throughput", 0.0, Work(), 0)
    progress.offer(worse, "start")
    progress.prove(0.5 * cost, "elimination")
    progress.prove(progress.cost, "MILP")
    assert (progress.bound, progress.proved_by) == (progress.cost, "MILP")
    assert progress.status == "optimal"
    progress.offer(chosen, "local search")
    assert (progress.bound, progress.proved_by) == (0.5 * cost, "elimination")
    assert progress.status == "feasible"
    progress.prove(1.5 * cost, "MILP")
    assert (progress.bound, progress.proved_by) == (0.5 * cost, "elimination")


def test_a_plan_refutes_that_there_is_none() -> None:
    problem = spmd(0, 5, 3, forbid=0.0)
    progress = Progress(problem, "throughput", 0.0, Work(), 0)
    progress.prove(math.inf, "MILP")
    assert progress.status == "infeasible"
    progress.offer((0,) * 5, "start")
    assert (progress.bound, progress.proved_by) == (0.0, "none")
    assert progress.cost == pytest.approx(evaluate_choices(problem, (0,) * 5).value("throughput"))
