"""Elimination is exact, and gives up on wide graphs."""

import itertools
import math
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import placement, spmd
from partitioner.solver.joint import elimination
from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.solve import solve
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem
from partitioner.solver.referee import evaluate_choices


def test_most_problems_have_plans() -> None:
    plans = [brute_force(spmd(seed, 6, 3, forbid=0.1), "throughput") for seed in range(10)]
    assert sum(plan is not None for plan in plans) >= 5


@pytest.mark.parametrize("seed", range(10))
def test_elimination_is_exact(seed: int) -> None:
    problem = spmd(seed, 6, 3, forbid=0.1)
    best = brute_force(problem, "throughput")
    answer = Eliminator(problem).min_sum([1.0, 0.0])
    assert answer is not None
    if best is None:
        assert math.isinf(answer[1])
        return
    assert answer[1] == pytest.approx(best[1])
    assert evaluate_choices(problem, answer[0]).step_s == pytest.approx(best[1])


def test_elimination_prefers_fewer_bytes_at_a_price() -> None:
    problem = spmd(3, 8, 4)
    dear, cheap = (Eliminator(problem).min_sum([1.0, 0.0], price) for price in (100.0, 0.0))
    assert dear is not None
    assert cheap is not None
    peaks = [sum(evaluate_choices(problem, answer[0]).peak_bytes) for answer in (dear, cheap)]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("seed", range(6))
def test_elimination_is_exact_for_a_value_with_many_readers(seed: int) -> None:
    problem = spmd(seed, 7, 3, forbid=0.0)
    first = problem.edges[0]
    fan = tuple(
        replace(first, v=v, in_class=tuple((v + p) % 3 for p in range(3))) for v in range(1, 7)
    )
    problem = replace(problem, edges=(*fan, *(e for e in problem.edges if e.u)))
    best = brute_force(problem, "throughput")
    assert best is not None
    answer = Eliminator(problem).min_sum([1.0, 0.0])
    assert answer is not None
    assert answer[1] == pytest.approx(best[1])
    assert evaluate_choices(problem, answer[0]).step_s == pytest.approx(best[1])


@pytest.mark.parametrize("seed", range(4))
def test_elimination_bounds_the_peak(seed: int) -> None:
    problem = spmd(seed, 6, 3, forbid=0.0)
    best = brute_force(problem, "memory")
    assert best is not None
    eliminator = Eliminator(problem)
    bounds = [answer[1] for t in range(6) if (answer := eliminator.min_bytes(t)) is not None]
    assert 0.7 * best[1] <= max(bounds) <= best[1]


def test_elimination_gives_up_on_wide_graphs() -> None:
    problem = spmd(0, 30, 8, classes=8)
    edge = problem.edges[0]
    edges = tuple(
        replace(edge, u=u, v=v, items={(0, 1): (0,)})
        for u, v in itertools.combinations(range(30), 2)
    )
    wide = replace(problem, edges=edges, holds=())
    assert Eliminator(wide).min_sum([1.0, 0.0]) is None


def test_an_item_of_more_nodes_without_a_choice_than_an_array_has_axes() -> None:
    """One value read by many nodes that can run in one way only (numpy stops at 64 axes)."""
    count = 100
    item = Item(load_s=(5.0,), bytes=(1.0,), first=0, last=count)
    fixed = (Choice(load_s=(1.0,), group=0),)
    free = (*fixed, Choice(load_s=(2.0,), group=0))
    edges = tuple(Edge(0, v, (0, 1), (0,), {(0, 0): (0,)}) for v in range(1, count + 1))
    nodes = (free, *(fixed for _ in range(count)))
    names = tuple(f"n{i}" for i in range(count + 1))
    problem = Problem(1, (math.inf,), nodes, names, edges, (), (item,))
    answer = Eliminator(problem).min_sum([1.0])
    assert answer is not None
    assert answer[1] == pytest.approx(102.0)  # the dearer choice of n0 saves the item
    assert answer[0][0] == 1


def test_an_item_of_many_nodes_without_a_choice_is_eliminated() -> None:
    """Seventy nodes share a weight; numpy has no table of so many axes."""
    problem = placement(0, 70, 2)
    weight = Item((1.0, 0.0), (0.0, 0.0), 0, 69)
    problem = replace(
        problem,
        nodes=tuple(choices[:1] for choices in problem.nodes),
        edges=(),
        holds=tuple(Hold(v, ((0,),)) for v in range(70)),
        items=(weight,),
    )
    answer = Eliminator(problem).min_sum([1.0, 1.0])
    assert answer is not None
    assert answer[1] == pytest.approx(evaluate_choices(problem, answer[0]).step_s)


def test_of_plans_of_equal_load_the_one_that_holds_less_and_more_evenly_wins() -> None:
    choices = (Choice((1.0, 1.0), 0),) * 3  # uneven, heavy, even bytes
    bytes_of = ((8.0, 0.0), (9.0, 9.0), (3.0, 3.0))
    problem = Problem(
        devices=2,
        limit_bytes=(math.inf,) * 2,
        nodes=(choices,) * 3,
        names=("a", "b", "c"),
        edges=(),
        holds=tuple(
            Hold(node, ((3 * node,), (3 * node + 1,), (3 * node + 2,))) for node in range(3)
        ),
        items=tuple(Item((0.0, 0.0), held, 0, 2) for _ in range(3) for held in bytes_of),
    )
    solution = solve(problem)
    assert solution.chosen == (2, 2, 2)
    assert (solution.cost, solution.status) == (3.0, "optimal")


@pytest.mark.parametrize("seed", range(6))
def test_without_what_many_nodes_decide_the_value_is_a_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = spmd(seed, 6, 3)
    best = brute_force(problem, "throughput")
    assert best is not None
    weights = [1 / problem.devices] * problem.devices
    whole = Eliminator(problem).min_sum(weights)
    assert whole is not None
    monkeypatch.setattr(elimination, "MAX_SHARED", 1)
    narrow = Eliminator(problem)
    assert narrow.tables.wide.size
    assert narrow.min_sum(weights) is None
    near = narrow.min_near(weights)
    assert near is not None
    least = sum(min(sum(c.load_s) for c in choices) for choices in problem.nodes) / problem.devices
    assert least <= near[1] <= whole[1] * (1 + 1e-9)
    solution = solve(problem, gap=0.0)
    assert solution.cost == pytest.approx(best[1])
