"""Each exact step of the pairwise search on its own, against brute force."""

import itertools

import numpy as np
import pytest

from helpers.problems.pairwise_cases import (
    FEASIBLE,
    INFEASIBLE,
    REFUTED_OF_NINE,
    choices,
    instance,
    make,
    optimum,
    presolved,
    pruned,
    second_opinion,
)
from partitioner.solver.pairwise.dual import Dual, Messages
from partitioner.solver.pairwise.model import CONFLICT, Model, build, peaks
from partitioner.solver.pairwise.moves import Mover
from partitioner.solver.pairwise.relax import fold, reduce, relax
from partitioner.solver.pairwise.solve import solve


def least(model: Model) -> float:
    """Cost of the best choice within the rows; infinite if there is none."""
    mover, best = Mover(model, np.zeros(model.graph.nodes, dtype=np.int64), 0), np.inf
    for chosen in choices(model):
        mover.restart(chosen)
        if mover.feasible:
            best = min(best, mover.cost())
    return best


def test_presolve_alone_refutes_what_is_infeasible() -> None:
    for seed in range(80):
        model = pruned(instance(seed))
        refuted = model is None or bool((model.rows.capacity < 0).any())
        assert refuted == (seed in INFEASIBLE)
        assert (optimum(instance(seed)) is None) == refuted
    refuted_of_nine = [seed for seed in range(60) if pruned(instance(seed, nodes=9)) is None]
    assert refuted_of_nine == sorted(REFUTED_OF_NINE)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", FEASIBLE)
def test_folding_keeps_the_optimum_and_lifts_to_it(seed: int) -> None:
    model = presolved(seed)
    folded = fold(model)
    assert least(folded.model) == least(model)
    before, after = (Mover(m, m.graph.offsets[:-1] * 0, 0) for m in (model, folded.model))
    for chosen in choices(folded.model):
        before.restart(folded.lift(chosen))
        after.restart(chosen)
        assert before.excess == after.excess or max(before.excess, after.excess) <= 0
        if after.cost() < CONFLICT:
            assert before.cost() == after.cost()


def test_folding_takes_trees_and_cycles_away() -> None:
    costs, table = [[3, 0], [0, 4], [2, 2], [1, 5]], [0, 9, 9, 0]
    ring = [(0, 1), (1, 2), (2, 3), (0, 3)]
    problem = make(costs, costs, [(0, 1)] * 4, ring, [table] * 4, None)
    folded = fold(build(problem))
    assert len(folded.steps) == 4
    assert not len(folded.model.graph.heads)
    assert folded.model.graph.unary.sum() == optimum(problem)


def test_nodes_that_memory_sees_are_not_folded() -> None:
    problem = make([[0, 1]] * 2, [[1, 0]] * 2, [(0, 2)] * 2, [(0, 1)], [[0, 1, 1, 0]], 1)
    assert fold(build(problem)).steps == ()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", FEASIBLE)
def test_a_relaxation_is_never_above_and_with_all_rows_equal(seed: int) -> None:
    model, best = presolved(seed), optimum(instance(seed))
    assert best is not None
    rows = len(model.rows.capacity)
    for flags in itertools.islice(itertools.product([False, True], repeat=rows), 16):
        relaxation = relax(model, np.array(flags, dtype=np.bool_))
        assert relaxation is not None
        assert least(relaxation.model) <= best
    whole = relax(model, np.ones(rows, dtype=np.bool_))
    assert whole is not None
    assert least(whole.model) == best


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", FEASIBLE)
def test_choices_of_a_relaxation_lift_at_the_same_cost_and_lower_again(seed: int) -> None:
    problem, model = instance(seed), presolved(seed)
    relaxation = relax(model, np.zeros(len(model.rows.capacity), dtype=np.bool_))
    assert relaxation is not None
    small = relaxation.model
    mover = Mover(small, np.zeros(small.graph.nodes, dtype=np.int64), 0)
    for chosen in choices(small)[:50]:
        mover.restart(chosen)
        full = relaxation.lift(chosen)
        if mover.cost() < CONFLICT:
            assert second_opinion(problem, model.original(full))[0] == mover.cost()
        left = np.diff(small.graph.offsets) > 1
        again = small.within(relaxation.whole.original(full))
        assert np.array_equal(again[left], chosen[left])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", FEASIBLE)
def test_bounds_of_relaxations_that_gain_rows_are_never_above_the_optimum(seed: int) -> None:
    model, best = presolved(seed), optimum(instance(seed))
    assert best is not None
    keep, former = np.zeros(len(model.rows.capacity), dtype=np.bool_), Dual(model)
    former.ascend(5)
    for row in [None, *range(len(keep))]:
        keep[[] if row is None else [row]] = True
        relaxation = relax(model, keep)
        assert relaxation is not None
        dual = Dual(relaxation.model)
        dual.inherit(former)
        dual.ascend(40)
        assert dual.bound <= best + 1e-6
        former = dual


def test_messages_are_inherited_where_strategies_are_the_same() -> None:
    model = build(instance(20, nodes=30, most=5))
    old, same = Messages(model.graph), Messages(model.graph)
    old.sweep(model.graph.unary)
    same.inherit(old, model.labels, model.labels)
    assert np.array_equal(old.inbox, same.inbox)
    assert old.inbox.any()
    smaller = reduce(model)
    assert smaller is not None
    other = Messages(smaller.graph)
    other.inherit(old, smaller.labels, model.labels)
    assert set(other.inbox.tolist()) <= set(old.inbox.tolist())


def test_peaks_are_the_worst_of_each_run() -> None:
    over = np.array([1.0, 3, 2, 0, -1, 5, 5, -2, 1])
    assert peaks(over).tolist() == [1, 5, 8]
    assert peaks(np.array([-1.0, 0.0])).tolist() == []
    assert peaks(np.zeros(0)).tolist() == []


def test_rows_that_are_left_out_leave_the_others_as_they_were() -> None:
    model = build(instance(12, nodes=12))
    rows = model.rows
    assert len(rows.capacity) > 2
    keep = np.arange(len(rows.capacity)) % 2 == 0
    usage = np.arange(model.graph.nodes, dtype=np.float64)
    few = rows.only(keep)
    assert np.array_equal(few.load(usage), rows.load(usage)[keep])
    assert np.array_equal(few.number, rows.number[keep])


def test_more_rounds_are_never_worse() -> None:
    problem = instance(20, nodes=60, most=6, scale=1000)
    costs = [solve(problem, rounds=rounds).cost for rounds in (1, 3, 6)]
    assert all(cost is not None for cost in costs)
    assert costs == sorted(costs, key=lambda cost: -(cost or 0))
