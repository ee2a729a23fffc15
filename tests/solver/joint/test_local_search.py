"""Moves, local search, and plans of short latency."""

import random
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import hops, placement, shared_holds, spmd, uneven
from partitioner.solver.joint.latency import Latency, critical_path_s, list_schedule
from partitioner.solver.joint.local_search import State, local_search, tables
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices, latency_s


@pytest.mark.parametrize("seed", range(5))
def test_moves_keep_the_sums(seed: int) -> None:
    problem = placement(seed, 8, 3, limit=20, per_group=2)
    rng = random.Random(seed)
    state = State(tables(problem), [0] * 8, bytes_matter=True)
    for _ in range(200):
        state.move(rng.randrange(8), rng.randrange(6))
    outcome = evaluate_choices(problem, state.chosen)
    assert state.load == pytest.approx(outcome.load_s)
    assert state.peaks() == pytest.approx(outcome.peak_bytes)
    assert state.excess_bytes() == pytest.approx(outcome.excess_bytes)


def test_local_search_improves_and_repeats_itself() -> None:
    problem = placement(4, 20, 3)
    worse = evaluate_choices(problem, [0] * 20).step_s
    first, second = (local_search(problem, [0] * 20, effort=3000, seed=7) for _ in range(2))
    assert first == second
    assert evaluate_choices(problem, first).step_s < 0.6 * worse


def test_local_search_takes_no_forbidden_pair() -> None:
    problem = placement(4, 12, 2)
    edges = tuple(replace(edge, forbidden=frozenset({(0, 1)})) for edge in problem.edges)
    problem = replace(problem, edges=edges)
    plan = local_search(problem, [1] * 12, effort=3000)
    assert evaluate_choices(problem, plan).step_s < evaluate_choices(problem, [1] * 12).step_s


@pytest.mark.parametrize("seed", range(5))
def test_latency_bounds_and_proposals(seed: int) -> None:
    problem = placement(seed, 6, 2)
    best = brute_force(problem, "latency")
    assert best is not None
    assert critical_path_s(problem) <= best[1] * (1 + 1e-9)
    proposed = evaluate_choices(problem, list_schedule(tables(problem))).latency_s
    assert best[1] * (1 - 1e-9) <= proposed <= 1.6 * best[1]


def allowed(problem: Problem) -> Problem:
    """The problem without forbidden pairs."""
    edges = tuple(replace(edge, forbidden=frozenset()) for edge in problem.edges)
    return replace(problem, edges=edges)


LATE_PROBLEMS = {
    "one group": lambda seed: spmd(seed, 14, 4, forbid=0.0),
    "hops": lambda seed: allowed(hops(seed, 14)),
    "devices": lambda seed: placement(seed, 14, 3, per_group=2),
    "unlike devices": lambda seed: uneven(placement(seed, 14, 3)),
    "shared": lambda seed: shared_holds(placement(seed, 14, 2), seed),
}


@pytest.mark.parametrize("kind", LATE_PROBLEMS)
def test_the_latency_that_is_searched_by_is_the_referees(kind: str) -> None:
    for seed in range(12):
        problem: Problem = LATE_PROBLEMS[kind](seed)
        seconds, rng = Latency(tables(problem)), random.Random(seed)
        for _ in range(20):
            chosen = [rng.randrange(len(choices)) for choices in problem.nodes]
            assert seconds(chosen) == latency_s(problem, chosen)
