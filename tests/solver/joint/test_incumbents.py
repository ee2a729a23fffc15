"""A first plan, node after node: it is allowed where a node has an allowed choice left."""

import math
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import spmd
from partitioner.solver.joint import elimination
from partitioner.solver.joint.incumbents import along
from partitioner.solver.joint.solve import solve
from partitioner.solver.problem import Choice, Edge, Item, Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work


def chain(forbidden: frozenset[tuple[int, int]]) -> Problem:
    """Three nodes: the second choice of the first costs more, and the pairs (0, 1) cost 5."""
    choices = (Choice((1.0,), 0), Choice((2.0,), 0))
    last = (Choice((9.0,), 0), Choice((1.0,), 0))
    edges = tuple(
        Edge(u, u + 1, (0, 1), (0, 1), {(0, 1): (0,), (1, 0): (0,)}, forbidden) for u in range(2)
    )
    items = (Item((5.0,), (0.0,), 0, 2),)
    nodes = (choices, choices, last)
    return Problem(1, (float("inf"),), nodes, ("x", "y", "z"), edges, (), items)


def test_each_node_takes_what_costs_least_beside_those_before() -> None:
    chosen, steps = along(chain(frozenset()))
    assert chosen == (0, 0, 1)
    assert steps > 0


def test_an_item_is_paid_once() -> None:
    # once the item is paid, changing again is free
    problem = chain(frozenset({(0, 0)}))
    assert along(problem)[0] == (0, 1, 1)
    assert evaluate_choices(problem, (0, 1, 1)).load_s == (1.0 + 2.0 + 1.0 + 5.0,)


def test_a_forbidden_pair_is_not_taken() -> None:
    chosen, _ = along(chain(frozenset({(0, 1)})))
    assert chosen == (0, 0, 0)


def test_a_node_without_an_allowed_choice_ends_the_plan() -> None:
    """(0, 0) is cheapest for the first two nodes, and leaves the last one none."""
    problem = chain(frozenset({(0, 1)}))
    dead_end = replace(problem.edges[1], forbidden=frozenset({(0, 0), (0, 1)}))
    problem = replace(problem, edges=(problem.edges[0], dead_end))
    assert along(problem)[0] is None
    held = tuple(replace(item, bytes=(8.0,)) for item in problem.items)
    tight = replace(problem, items=held, limit_bytes=(9.0,))
    solution = solve(tight, "throughput", Work())
    assert solution.chosen == (1, 1, 1)


@pytest.mark.parametrize("seed", range(8))
def test_random_problems_get_a_plan_that_is_no_better_than_the_best(seed: int) -> None:
    problem = spmd(seed, 6, 3)
    best = brute_force(problem, "throughput")
    assert best is not None
    chosen, _ = along(problem)
    assert chosen is not None
    assert evaluate_choices(problem, chosen).value("throughput") >= best[1] - 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_a_wide_problem_has_a_plan_when_little_work_is_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elimination, "eliminate", lambda *_: None)
    problem = spmd(seed, 6, 3, forbid=0.1)
    if brute_force(problem, "throughput") is None:
        pytest.skip("every plan takes a forbidden pair")
    work = Work.within(30.0, 2000.0)
    assert math.isfinite(solve(problem, work=work).cost)


def test_that_a_problem_is_too_wide_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "eliminate", lambda *_: None)
    work = Work(steps=1e9)
    eliminator = elimination.Eliminator(spmd(0, 6, 3), work)
    assert eliminator.min_near([1.0, 1.0]) is None
    spent = work.spent
    assert spent > 0
    assert eliminator.min_sum([1.0, 1.0]) is None
    assert work.spent == spent


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_that_fits_is_found_when_no_work_is_left(seed: int) -> None:
    problem = spmd(seed, 6, 3)
    least = brute_force(problem, "memory")
    assert least is not None
    tight = replace(problem, limit_bytes=(1.3 * least[1],) * problem.devices)
    found = solve(tight, work=Work.within(60.0, steps=1), reason_s=0.0)
    assert evaluate_choices(tight, found.chosen).excess_bytes == 0
