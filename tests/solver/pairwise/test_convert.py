"""Problems as pairwise ones: every plan costs the same, and so does the best."""

import math
import random

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import hops, placement, shared_holds, spmd
from partitioner.solver.pairwise.convert import PER_SECOND, convert
from partitioner.solver.pairwise.problem import evaluate
from partitioner.solver.pairwise.solve import solve
from partitioner.solver.problem import Choice, Edge, Item, Problem, SolverError
from partitioner.solver.referee import evaluate_choices

#: Costs are rounded one by one, each to within half a picosecond.
ROUNDING = 100


DRAWS = {
    "spmd": lambda seed: spmd(seed, 6, 3, forbid=0.15),
    "spmd, limited": lambda seed: spmd(seed, 5, 3, limit=20 + seed % 5),
    "shared holds": lambda seed: shared_holds(spmd(seed, 6, 3, limit=40 + seed % 9), seed),
    "hops": hops,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", range(12))
def test_every_plan_costs_and_holds_the_same(draw: str, seed: int) -> None:
    problem = DRAWS[draw](seed)
    converted = convert(problem)
    assert converted.uneven == 0
    rng = random.Random(seed)
    allowed = 0
    for _ in range(60):
        chosen = tuple(rng.randrange(len(choices)) for choices in problem.nodes)
        outcome = evaluate(converted.pairwise, converted.assign(chosen))
        try:
            true = evaluate_choices(problem, chosen)
        except SolverError:
            assert outcome.forbidden
            continue
        allowed += 1
        assert not outcome.forbidden
        assert outcome.cost == pytest.approx(true.step_s * PER_SECOND, abs=ROUNDING)
        assert converted.restore(converted.assign(chosen)) == chosen
        if problem.limited:
            assert outcome.peak_usage == max(true.peak_bytes)
            assert bool(outcome.fault) == (true.excess_bytes > 0)
    assert allowed


@pytest.mark.parametrize("draw", DRAWS)
def test_some_draws_have_plans(draw: str) -> None:
    plans = [brute_force(DRAWS[draw](seed), "throughput") for seed in range(12)]
    assert sum(plan is not None for plan in plans) >= 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", range(12))
def test_the_best_is_the_best(draw: str, seed: int) -> None:
    problem = DRAWS[draw](seed)
    converted = convert(problem)
    answer = solve(converted.pairwise)
    best = brute_force(problem, "throughput")
    if best is None:
        assert answer.status == "infeasible"
        return
    assert answer.status == "optimal"
    assert answer.cost == pytest.approx(best[1] * PER_SECOND, abs=ROUNDING)
    plan = evaluate_choices(problem, converted.restore(answer.chosen))
    assert plan.excess_bytes == 0
    assert plan.step_s == pytest.approx(best[1])


@pytest.mark.parametrize("seed", range(6))
def test_unlike_devices_give_an_upper_estimate(seed: int) -> None:
    problem = placement(seed, 5, 3, limit=30.0)
    converted = convert(problem)
    assert 0 < converted.uneven <= converted.figures
    rng = random.Random(seed)
    for _ in range(20):
        chosen = tuple(rng.randrange(len(choices)) for choices in problem.nodes)
        outcome = evaluate(converted.pairwise, converted.assign(chosen))
        true = evaluate_choices(problem, chosen)
        assert not outcome.forbidden
        assert outcome.cost >= true.step_s * PER_SECOND - ROUNDING
        assert outcome.peak_usage >= max(true.peak_bytes)


def test_an_item_of_one_edge_without_bytes_needs_no_auxiliary_node() -> None:
    choices = tuple(Choice((s, s), 0) for s in (1.0, 2.0))
    edge = Edge(0, 1, (0, 1), (0, 1), {(0, 1): (0,), (1, 0): (0,)})
    item = Item((0.5, 0.5), (0.0, 0.0), 0, 1)
    problem = Problem(2, (math.inf,) * 2, (choices,) * 2, ("a", "b"), (edge,), (), (item,))
    converted = convert(problem).pairwise
    assert converted.nodes == 2
    assert converted.limit is None
    assert converted.edge_costs.tolist() == [0, 5 * 10**11, 5 * 10**11, 0]


def test_what_the_format_cannot_say_is_refused() -> None:
    slow = (Choice((1000.0,), 0),)
    with pytest.raises(SolverError, match="'a' takes 1000 s: costs are picoseconds, and 1000 s"):
        convert(Problem(1, (math.inf,), (slow,), ("a",), (), (), ()))
    choices = tuple(Choice((1.0,), 0) for _ in range(2))
    edges = tuple(Edge(u, u + 1, (0, 1), (0, 1), {(0, 1): (0,)}) for u in (0, 2))
    problem = Problem(
        1, (9.0,), (choices,) * 4, tuple("abcd"), edges, (), (Item((1.0,), (1.0,), 0, 3),)
    )
    with pytest.raises(SolverError, match="item 0 is triggered by edges without a common node"):
        convert(problem)
