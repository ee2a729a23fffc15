"""Smaller problems with the same optimum."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import spmd
from helpers.problems.valid_problems import validate
from partitioner.solver.presolve.simplify import merge_equal, presolve
from partitioner.solver.problem import Edge, clique_positions
from partitioner.solver.referee import evaluate_choices


@pytest.mark.parametrize("limit", [math.inf, 22])
def test_some_problems_have_plans(limit: float) -> None:
    problems = (spmd(seed, 5, 4, classes=2, limit=limit, forbid=0.2) for seed in range(10))
    assert sum(brute_force(problem, "throughput") is not None for problem in problems) >= 3


@pytest.mark.parametrize("limit", [math.inf, 22])
@pytest.mark.parametrize("seed", range(10))
def test_presolve_keeps_the_optimum(seed: int, limit: float) -> None:
    problem = spmd(seed, 5, 4, classes=2, limit=limit, forbid=0.2)
    reduced = presolve(problem)
    best = brute_force(problem, "throughput")
    if not all(reduced.kept):
        assert best is None
        return
    smaller = brute_force(reduced.problem, "throughput")
    assert (best is None) == (smaller is None)
    if best is not None and smaller is not None:
        assert smaller[1] == best[1]
        assert evaluate_choices(problem, reduced.restore(smaller[0])).step_s == best[1]


def test_presolve_merges_parallel_edges() -> None:
    problem = spmd(1, 4, 3, forbid=0.0)
    reduced = presolve(replace(problem, edges=(*problem.edges, problem.edges[0])))
    ends = [(e.u, e.v) for e in reduced.problem.edges]
    assert len(ends) == len(set(ends))


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_edges_make_equal_become_one(seed: int) -> None:
    draw = random.Random(seed)
    problem = spmd(seed, 5, 3, classes=2, limit=[math.inf, 60][seed % 2], forbid=0.1)
    ties = []
    for u, v in draw.sample(list(itertools.combinations(range(5), 2)), 2):
        order = draw.sample(range(3), 3)
        apart = frozenset((p, q) for p in range(3) for q in range(3) if p != q or p == seed % 6)
        ties.append(Edge(u, v, (0, 1, 2), tuple(order), {}, apart))
    problem = replace(problem, edges=(*problem.edges, *ties))
    merged = merge_equal(problem)
    assert len(set(merged.leaders)) < 5
    best = brute_force(problem, "throughput")
    if not all(merged.problem.nodes):
        assert best is None
        return
    validate(merged.problem)
    smaller = brute_force(merged.problem, "throughput")
    assert (best is None) == (smaller is None)
    if best is not None and smaller is not None:
        assert smaller[1] == pytest.approx(best[1])
        whole = merged.restore(smaller[0])
        outcome, less = (
            evaluate_choices(problem, whole),
            evaluate_choices(merged.problem, smaller[0]),
        )
        assert outcome.step_s == pytest.approx(less.step_s)
        assert outcome.peak_bytes == pytest.approx(less.peak_bytes)
        assert merged.restore(merged.lower(whole)) == whole


def test_cliques_of_intervals() -> None:
    assert clique_positions([(0, 2), (1, 1), (2, 3)]).tolist() == [1, 2]
    assert clique_positions([(0, 9), (3, 9), (4, 4)]).tolist() == [4]
    assert clique_positions([]).tolist() == []
