"""The pairwise solver against brute force, on and off its presolve, and its certificates."""

import itertools
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from helpers.problems.pairwise_cases import (
    FEASIBLE,
    REFUTED_OF_NINE,
    instance,
    make,
    optimum,
    presolved,
    pruned,
    second_opinion,
)
from partitioner.solver.pairwise.dual import Dual, Messages
from partitioner.solver.pairwise.model import CONFLICT, build
from partitioner.solver.pairwise.moves import Mover
from partitioner.solver.pairwise.problem import FORBIDDEN, evaluate
from partitioner.solver.pairwise.relax import reduce
from partitioner.solver.pairwise.solve import PairwiseSolution, Progress, solve, solve_exactly
from partitioner.solver.problem import SolverError

#: Starts of twenty seeds; every one is the same property, so that most are for the slow run.
SEEDS = [
    *range(0, 200, 20),
    *(pytest.param(start, marks=pytest.mark.slow) for start in range(200, 500, 20)),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", SEEDS)
def test_solve_is_the_optimum(start: int) -> None:
    feasible = 0
    for seed in range(start, start + 20):
        problem = instance(seed)
        best, answer = optimum(problem), solve(problem)
        assert answer.cost == best, seed
        if best is None:
            assert answer.status == "infeasible"
            assert answer.reason
            assert answer.chosen == ()
            assert answer.bound == math.inf
            continue
        feasible += 1
        assert answer.status == "optimal"
        assert answer.bound == best
        assert second_opinion(problem, answer.chosen)[::2] == (best, True)
        assert answer.cost == evaluate(problem, answer.chosen).cost
    assert feasible


@pytest.mark.slow
def test_a_known_choice_ends_the_search_where_nothing_is_better() -> None:
    for seed in range(100):
        problem = instance(seed)
        answer = solve(problem)
        if answer.cost is None:
            assert optimum(problem) is None
            continue
        again = solve(problem, start=answer.chosen)
        assert again.cost == answer.cost
        assert again.status == "optimal"
        assert again.trace[0][1] == answer.cost
        worst = solve(problem, start=tuple(int(size) - 1 for size in problem.sizes))
        assert worst.cost == answer.cost  # feasible or not


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", SEEDS)
def test_the_exact_program_is_the_optimum_with_and_without_presolve(start: int) -> None:
    for seed in range(start, start + 20):
        problem = instance(seed)
        model, best = pruned(problem), optimum(problem)
        if best is None:  # then presolve alone refutes it
            assert model is None or (model.rows.capacity < 0).any()
            continue
        assert model is not None
        for form in (model, reduce(model)):
            assert form is not None
            chosen, bound = solve_exactly(form, 60, 0.0)
            assert chosen is not None
            assert evaluate(problem, form.original(chosen)).cost == best
            assert bound == pytest.approx(best, abs=1e-6)


def test_the_exact_program_refutes_what_is_infeasible() -> None:
    # each node alone fits, and no pair of neighbours on the ring may be equal: an odd cycle
    differ = [[FORBIDDEN, 0, 0, FORBIDDEN]] * 3
    ring = [(0, 1), (1, 2), (0, 2)]
    problem = make([[0, 0]] * 3, [[0, 0]] * 3, [(0, 0)] * 3, ring, differ, None)
    model = pruned(problem)
    assert model is not None
    assert optimum(problem) is None
    assert solve_exactly(model, 60, 0.0) == (None, math.inf)


@pytest.mark.parametrize("bound", [-math.inf, 0.0])
def test_an_exact_program_that_is_stopped_closes_no_gap(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS has a bound of minus infinity where the time ends before its root is solved."""
    module = import_module("partitioner.solver.pairwise.solve")
    monkeypatch.setattr(module, "FIRST_TRY", 1)
    monkeypatch.setattr(module, "solve_exactly", lambda *_: (None, bound))
    answer = solve(instance(20, nodes=60, most=6, scale=1000), rounds=4)
    assert answer.cost is not None
    assert answer.status == "feasible"
    assert answer.bound < answer.cost


def test_a_choice_that_costs_less_than_a_bound_refutes_it() -> None:
    problem = make([[4, 6], [4, 9]], [[0, 0]] * 2, [(0, 0)] * 2, [], [], None)
    progress = Progress(problem, 0.0, 0.0, 60.0)
    progress.take((1, 1), "search")
    progress.prove(5, "message passing")
    progress.prove(14, "HiGHS")
    assert not progress.met
    progress.take((1, 0), "search")
    assert (progress.cost, progress.bound, progress.proved_by) == (10, 5, "message passing")
    progress.prove(8, "HiGHS")
    assert (progress.bound, progress.proved_by) == (8, "HiGHS")
    progress.close("HiGHS")
    assert progress.solution().status == "optimal"
    assert progress.solution().bound == progress.cost


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", SEEDS)
def test_bounds_are_never_above_the_optimum(start: int) -> None:
    for seed in range(start, start + 20):
        model, best = pruned(instance(seed)), optimum(instance(seed))
        if best is None:  # then presolve alone refutes it
            assert model is None or (model.rows.capacity < 0).any()
            continue
        assert model is not None
        model = reduce(model)
        assert model is not None
        dual = Dual(model)
        for _ in range(10):
            dual.ascend(3)
            assert dual.bound <= best + 1e-6
        dear = dual.dear(best)
        assert dual.bound <= best + 1e-6
        for v, (first, last) in enumerate(itertools.pairwise(model.graph.offsets)):
            assert not dear[first:last].all(), f"seed {seed}: every strategy of node {v} is dear"


@pytest.mark.parametrize("seed", [seed for seed in FEASIBLE if seed < 40])
def test_priced_out_strategies_are_in_no_choice_that_good(seed: int) -> None:
    problem = instance(seed)
    model, best = reduce(presolved(seed)), optimum(problem)
    assert model is not None
    assert best is not None
    dual = Dual(model)
    dual.ascend(10)
    dear = dual.dear(best + 3)
    sizes = np.diff(model.graph.offsets)
    for chosen in itertools.product(*map(range, sizes)):
        cost, _, feasible = second_opinion(problem, model.original(np.array(chosen)))
        if feasible and cost <= best + 3:
            assert not dear[model.graph.offsets[:-1] + np.array(chosen)].any()


def test_message_passing_is_exact_on_a_chain() -> None:
    costs = [[3, 0], [0, 4], [2, 2], [1, 5]]
    tables = [[0, 9, 9, 0], [0, 5, 5, 0], [0, 7, 7, 0]]
    problem = make(costs, costs, [(0, 1)] * 4, [(0, 1), (1, 2), (2, 3)], tables, None)
    messages = Messages(build(problem).graph)
    assert messages.sweep(messages.graph.unary) == optimum(problem) == 6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [seed for seed in range(60) if seed not in REFUTED_OF_NINE])
def test_moves_never_make_it_worse_and_keep_their_books(seed: int) -> None:
    problem, model = instance(seed, nodes=9), presolved(seed, nodes=9)
    mover = Mover(model, np.zeros(model.graph.nodes, dtype=np.int64), seed)
    other = np.diff(model.graph.offsets) - 1
    plain = model.graph.unary
    cost, excess = mover.cost(), max(0.0, mover.excess)
    for step in range(6):
        if step % 3 == 2:
            mover.cross(other, plain)
        else:
            mover.widen(plain, 4 if step % 3 else 1)
        assert mover.cost() <= cost
        assert mover.excess <= excess
        cost, excess = mover.cost(), max(0.0, mover.excess)
        outcome = evaluate(problem, model.original(mover.chosen))
        if cost < CONFLICT:
            assert outcome.cost == cost
            assert not outcome.forbidden
        if problem.limit is not None:
            assert excess == max(0, outcome.peak_usage - problem.limit)


def test_a_mover_knows_the_usage_above_capacity_after_each_crossing() -> None:
    draw = np.random.default_rng(0)
    intervals = np.sort(draw.integers(0, 30, (40, 2)), axis=1)
    usages = draw.integers(0, 9, 80)
    problem = make(
        [[0, 0]] * 40,
        usages.reshape(40, 2).tolist(),
        [(a, b) for a, b in intervals.tolist()],
        [],
        [],
        50,
    )
    model = build(problem)
    mover, taken = Mover(model, np.zeros(40, dtype=np.int64), 0), 0
    for _ in range(20):
        other, priced = draw.integers(0, 2, 40), draw.random(80)
        before, excess = mover.chosen.copy(), mover.excess
        mover.cross(other, priced)
        taken += int((mover.chosen != before).sum())
        assert mover.excess == Mover(model, mover.chosen, 0).excess <= max(0, excess)
        peak = evaluate(problem, model.original(mover.chosen)).peak_usage
        assert max(mover.excess, 0) == max(peak - 50, 0)
    assert taken


def steps(answer: PairwiseSolution) -> list[tuple[float, float]]:
    return [(cost, bound) for _, cost, bound in answer.trace]


def test_the_same_input_and_seed_give_the_same_answer() -> None:
    problem = instance(20, nodes=60, most=6, scale=1000)
    first, second = (solve(problem, seed=3, rounds=4) for _ in range(2))
    assert (first.chosen, first.cost, first.bound) == (second.chosen, second.cost, second.bound)
    assert first.status == "feasible"  # neither trivial nor infeasible
    assert steps(first) == steps(second)


def test_the_trace_improves_and_ends_at_the_answer() -> None:
    answer = solve(instance(20, nodes=60, most=6, scale=1000), rounds=6)
    assert answer.cost is not None
    known = steps(answer)
    assert all(a[0] >= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(known))
    assert known[-1] == (answer.cost, answer.bound)
    assert answer.bound <= answer.cost


def test_costs_beyond_64_bits_are_added_exactly() -> None:
    costs = [[9 * 10**18]] * 3
    problem = make(costs, [[0]] * 3, [(0, 0)] * 3, [], [], None)
    outcome = evaluate(problem, (0, 0, 0))
    assert outcome.cost == 27 * 10**18
    assert outcome.fault == "strategy 0 of node 0 is forbidden (cost 9000000000000000000)"


@pytest.mark.parametrize(
    ("costs", "tables", "limit", "reason"),
    [
        ([[FORBIDDEN], [1]], [], None, "every strategy of node 0 is forbidden"),
        ([[1, 1], [1, 1]], [[FORBIDDEN] * 4], None, "forbidden pairs leave some node without"),
        ([[1, 1], [1, 1]], [], 1, "at time 0 the least usage is 2, above the limit 1"),
    ],
)
def test_infeasible_with_a_reason(
    costs: list[list[int]], tables: list[list[int]], limit: int | None, reason: str
) -> None:
    usages = [[1] * len(strategies) for strategies in costs]
    problem = make(costs, usages, [(0, 2)] * 2, [(0, 1)] * len(tables), tables, limit)
    answer = solve(problem)
    assert answer.status == "infeasible"
    assert reason in answer.reason
    assert answer.gap == math.inf


def test_nothing_to_decide() -> None:
    answer = solve(make([], [], [], [], [], None))
    assert (answer.chosen, answer.cost, answer.bound, answer.status) == ((), 0, 0, "optimal")


@pytest.mark.parametrize("options", [{"gap": 1.0}, {"gap": -0.1}, {"time_limit_s": 0.0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(SolverError, match="must be in"):
        solve(instance(0), **options)


def test_a_problem_that_breaks_its_rules() -> None:
    problem = instance(3)
    with pytest.raises(SolverError, match="is negative"):
        replace(problem, costs=problem.costs - 100)
    with pytest.raises(SolverError, match="limit -1 is negative"):
        replace(problem, limit=-1)
    with pytest.raises(SolverError, match=r"1 strategies for 6 nodes"):
        evaluate(problem, (0,))
    with pytest.raises(SolverError, match=r"strategy 99 of node 0 is not within its"):
        evaluate(problem, (99, 0, 0, 0, 0, 0))
