"""The relaxed MILP and its rounded plan, and what the MILP proves."""

import math
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import spmd
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.frontends.onnx.load import load_onnx
from partitioner.search.request import Request
from partitioner.search.spaces.explicit import first_problem
from partitioner.solver.joint.incumbents import Search, relax, seek
from partitioner.solver.joint.solve import round_relaxation, run_milp, solve
from partitioner.solver.milp.engines import HIGHS, node_steps_of
from partitioner.solver.milp.formulation import formulate
from partitioner.solver.presolve.simplify import presolve
from partitioner.solver.problem import Problem
from partitioner.solver.referee import evaluate_choices
from partitioner.solver.work import Work


def search_of(problem: Problem, *, seconds: float = 60.0, steps: float = math.inf) -> Search:
    work = Work.within(seconds, steps)
    return Search(presolve(problem).problem, "throughput", 0.01, work, 0)


@pytest.mark.parametrize("limit", [math.inf, 22.0])
@pytest.mark.parametrize("seed", range(8))
def test_a_rounded_relaxation_bounds_all_plans_and_is_one(seed: int, limit: float) -> None:
    problem = spmd(seed, 6, 3, limit=limit, forbid=0.1)
    best = brute_force(problem, "throughput")
    search = search_of(problem)
    round_relaxation(search)
    if best is None:
        assert search.best is None
        return
    assert search.proved_by == HIGHS.relaxation
    assert 0 < search.bound <= best[1] * (1 + 1e-6)
    assert search.best is not None
    assert search.cost >= best[1] * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_relaxation_is_rounded_within_memory(seed: int) -> None:
    """Its choices at prices of a byte are near the bound; local search makes only a few moves."""
    free = spmd(seed, 30, 5)
    search = search_of(free)
    round_relaxation(search)
    assert search.best is not None
    peak = max(evaluate_choices(search.problem, search.best).peak_bytes)
    limited = search_of(replace(free, limit_bytes=(round(0.85 * peak),) * free.devices))
    round_relaxation(limited)
    assert limited.best is not None
    assert evaluate_choices(limited.problem, limited.best).excess_bytes == 0
    assert search.bound <= limited.bound <= limited.cost <= 1.1 * limited.bound


def test_a_relaxation_out_of_time_leaves_the_search_to_other_methods() -> None:
    search = search_of(spmd(1, 500, 6), seconds=0.0)
    assert round_relaxation(search)
    assert search.bound == 0.0
    assert search.work.stopped


@pytest.mark.parametrize("limit", [math.inf, 60.0])
def test_a_dear_relaxation_waits_until_a_plan_fits(limit: float) -> None:
    problem = spmd(1, 30, 5, limit=limit)
    form = formulate(search_of(problem).problem, "throughput")
    assert form is not None
    waits = math.isfinite(limit)
    for shares, source in (
        (1.9, "elimination" if waits else HIGHS.relaxation),
        (2.1, HIGHS.relaxation),
    ):
        search = search_of(problem)
        relax(search)
        assert (search.best is None) == waits
        search.bound = 0.0  # elimination may have proven all
        search.work = Work.within(60, shares * node_steps_of(form.milp))
        assert round_relaxation(search) == (source == HIGHS.relaxation)
        assert search.proved_by == source


def test_a_relaxation_that_takes_few_steps_comes_before_local_search() -> None:
    problem = spmd(1, 30, 5)
    form = formulate(search_of(problem).problem, "throughput")
    assert form is not None
    steps = node_steps_of(form.milp)
    assert round_relaxation(search_of(problem, steps=4.1 * steps), 4.0)
    assert not round_relaxation(search_of(problem, steps=3.9 * steps), 4.0)


@pytest.mark.slow
def test_highs_proves_no_more_of_resnet50_than_there_is() -> None:
    """With the known cost as the limit of the load's column, HiGHS 1.15.1 proved 17.23 ms."""
    graph = load_onnx(examples.build("resnet50")).graph
    _, built = first_problem(graph, resolve_cluster("2xcpu"), Request(strategy="intra"))
    search = search_of(built.problem)
    relax(search)
    seek(search)
    run_milp(search, "throughput")
    better = solve(built.problem)
    assert better.cost < 0.98 * 17.23e-3
    assert search.bound <= better.cost * (1 + 1e-6)
