"""Interchangeable groups, and plans with their groups renamed."""

import random
from dataclasses import replace

import pytest

from helpers.problems.solver_instances import placement
from partitioner.solver.problem import canonical, symmetric_groups
from partitioner.solver.referee import evaluate_choices


def test_canonical_plans_cost_the_same_and_open_groups_in_order() -> None:
    problem = placement(6, 8, 3)
    rng = random.Random(0)
    for _ in range(20):
        chosen = [rng.randrange(3) for _ in range(8)]
        renamed = canonical(problem, chosen)
        before, after = (evaluate_choices(problem, plan) for plan in (chosen, renamed))
        assert sorted(before.load_s) == pytest.approx(sorted(after.load_s))
        assert canonical(problem, renamed) == renamed


def test_groups_that_differ_are_not_interchangeable() -> None:
    problem = placement(0, 4, 3)
    assert symmetric_groups(problem) == ((0, 1, 2),)
    slow = replace(problem.nodes[0][1], load_s=(0.0, 99.0, 0.0))
    nodes = ((problem.nodes[0][0], slow, problem.nodes[0][2]), *problem.nodes[1:])
    assert symmetric_groups(replace(problem, nodes=nodes)) == ((0, 2),)
    assert symmetric_groups(replace(problem, limit_bytes=(1.0, 2.0, 1.0))) == ((0, 2),)
