"""Choices read off by decimation, and moves of all nodes but a cutset, against brute force."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from helpers.problems.pairwise_cases import FEASIBLE, choices, instance, make, optimum, presolved
from partitioner.solver.pairwise import moves
from partitioner.solver.pairwise.dual import Dual, dive
from partitioner.solver.pairwise.jit import seeded
from partitioner.solver.pairwise.model import Model, build
from partitioner.solver.pairwise.moves import Mover, eliminated_order


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", FEASIBLE)
@pytest.mark.parametrize("table", [1, 6, 30, 10**6])
def test_the_best_given_a_cutset(seed: int, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cutset(presolved(seed), table, seed, monkeypatch)


def check_cutset(model: Model, table: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = replace(model, rows=model.rows.only(np.zeros(len(model.rows.capacity), dtype=np.bool_)))
    graph = free.graph
    monkeypatch.setattr(moves, "TABLE", table)
    start = np.diff(graph.offsets) - 1
    order = eliminated_order(np.log2(table), 1e9, 1, seeded(seed), graph)
    widened = moves.best_given_cutset(start, graph.unary, 1, seeded(seed), graph)
    fixed = order.place < 0
    assert np.array_equal(widened[fixed], start[fixed])
    mover, best = Mover(free, start, 0), np.inf
    for chosen in choices(free):
        if np.array_equal(chosen[fixed], start[fixed]):
            mover.restart(chosen)
            best = min(best, mover.cost())
    mover.restart(widened)
    assert mover.cost() == best


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("table", [30, 300, 10**6])
def test_the_best_given_a_cutset_of_a_complete_graph(
    seed: int, table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(2, 5, 6).tolist()
    costs = [draw.integers(0, 20, size).tolist() for size in sizes]
    edges = list(itertools.combinations(range(6), 2))
    tables = [draw.integers(0, 20, sizes[u] * sizes[v]).tolist() for u, v in edges]
    model = build(make(costs, costs, [(0, 0)] * 6, edges, tables, None))
    check_cutset(model, table, seed, monkeypatch)


def test_tables_keep_within_their_limit() -> None:
    model = build(instance(20, nodes=80, most=6))
    sizes = np.diff(model.graph.offsets)
    order = eliminated_order(np.log2(100), 2000.0, 2, seeded(1), model.graph)
    tables = [
        sizes[v] * np.prod(sizes[order.scope[order.first[k] : order.first[k + 1]]])
        for k, v in enumerate(order.nodes)
    ]
    assert 6 < max(tables) <= 100
    assert sum(tables) <= 2000
    assert ((order.place < 0) & (sizes > 1)).any()


def star(arms: int) -> Model:
    """Every other arm must equal the last node, the rest must differ; nothing else costs."""
    nothing = [[0, 0]] * (arms + 1)
    tables = [[0, 2, 2, 0] if arm % 2 else [2, 0, 0, 2] for arm in range(arms)]
    edges = [(arm, arms) for arm in range(arms)]
    return build(make(nothing, nothing, [(0, 0)] * (arms + 1), edges, tables, None))


def test_a_dive_lets_all_arms_follow_their_hub() -> None:
    model = star(12)
    dual = Dual(model)
    dual.ascend(3)
    chosen = dive(dual, np.zeros(13))
    assert chosen is not None
    assert Mover(model, chosen, 0).cost() == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(30))
def test_a_dive_on_a_tree_is_the_optimum(seed: int) -> None:
    draw = np.random.default_rng(seed)
    costs = draw.integers(0, 20, (7, 3)).tolist()
    edges = [(int(draw.integers(v)), v) for v in range(1, 7)]
    tables = draw.integers(0, 20, (6, 9)).tolist()
    problem = make(costs, costs, [(0, 0)] * 7, edges, tables, None)
    model = build(problem)
    dual = Dual(model)
    dual.ascend(30)
    chosen = dive(dual, np.zeros(7))
    assert chosen is not None
    assert Mover(model, chosen, 0).cost() == optimum(problem)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", FEASIBLE)
def test_a_dive_changes_nothing(seed: int) -> None:
    dual = Dual(presolved(seed))
    dual.ascend(5)
    before = dual.messages.inbox.copy(), dual.price.copy()
    assert dive(dual, np.zeros(dual.model.graph.nodes)) is not None
    for was, now in zip(before, (dual.messages.inbox, dual.price), strict=True):
        assert np.array_equal(was, now)


def test_a_dive_gives_up_when_time_is_up() -> None:
    model = star(3)
    assert dive(Dual(model), np.zeros(4), until=0.0) is None
