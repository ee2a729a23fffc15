"""The relaxed MILP and its rounded plan, and what the MILP proves."""

import math

import pytest
from solver_instances import spmd

from partitioner import examples
from partitioner.cost_model.resolve import resolve_cluster
from partitioner.frontends.onnx.load import load_onnx
from partitioner.search.explicit import first_problem
from partitioner.search.request import Request
from partitioner.solver import Problem, brute_force, solve
from partitioner.solver.joint.incumbents import relax, seek
from partitioner.solver.joint.programs import round_relaxation, run_milp
from partitioner.solver.joint.search import Search
from partitioner.solver.milp.engines import node_steps_of
from partitioner.solver.milp.formulation import formulate
from partitioner.solver.presolve import presolve
from partitioner.solver.work import Work


def search_of(problem: Problem, *, seconds: float = 60.0) -> Search:
    return Search(presolve(problem).problem, "throughput", 0.01, Work.within(seconds), 0)


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
    assert search.proved_by == "HiGHS LP"
    assert 0 < search.bound <= best[1] * (1 + 1e-6)
    if search.best is not None:
        assert search.cost >= best[1] * (1 - 1e-9)
    elif math.isinf(limit):
        pytest.fail("without limits the relaxation has a plan")


def test_a_relaxation_out_of_time_leaves_the_search_to_other_methods() -> None:
    search = search_of(spmd(1, 500, 6), seconds=0.0)
    round_relaxation(search)
    assert search.bound == 0.0
    assert search.work.stopped


def test_a_relaxation_of_more_than_half_of_the_steps_is_left_out() -> None:
    search = search_of(spmd(1, 60, 6))
    form = formulate(search.problem, "throughput")
    assert form is not None
    for steps, source in ((1.9, "none"), (2.1, "HiGHS LP")):
        search.work = Work.within(60, steps * node_steps_of(form.milp))
        round_relaxation(search)
        assert search.proved_by == source


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
