"""MILPs: the results of HiGHS, and the rows of the formulation."""

import pytest

from helpers.problems.solver_instances import knapsack, placement, spmd
from partitioner.solver.milp.engines import solve_milp
from partitioner.solver.milp.formulation import formulate
from partitioner.solver.milp.program import MilpBuilder
from partitioner.solver.work import Work


def test_milp_finds_the_optimum_and_its_bound() -> None:
    build = MilpBuilder()
    a, b = (build.column(cost=-1.0, upper=1.0, integer=True) for _ in range(2))
    build.row([(a, 2.0), (b, 2.0)], -1, 3.0)
    result = solve_milp(build.build(), Work.within(10), 0.0)
    assert (result.status, result.cost, result.bound) == ("optimal", -1.0, -1.0)
    relaxed = solve_milp(build.build().relaxed(), Work.within(10), 0.0)
    assert (relaxed.status, relaxed.bound) == ("optimal", -1.5)


def test_milp_says_infeasible() -> None:
    build = MilpBuilder()
    a = build.column(upper=1.0, integer=True)
    build.row([(a, 2.0)], 0, 1.0)
    assert solve_milp(build.build(), Work.within(10), 0.0).status == "infeasible"


def test_milp_takes_a_start_and_reports_the_time_limit() -> None:
    milp = knapsack(40)
    start = dict.fromkeys(range(40), 0.0)
    result = solve_milp(milp, Work.within(0.0), 0.0, start)
    assert result.status == "time_limit"
    assert result.values
    assert result.bound <= result.cost <= 0.0


def test_a_row_without_columns_is_kept_only_if_it_is_false() -> None:
    build = MilpBuilder()
    build.column(upper=1.0)
    build.row([], -1, 0.0)
    assert build.build().rows == ()
    build.row([], 1, 1.0)
    assert solve_milp(build.build(), Work.within(10), 0.0).status == "infeasible"


def test_a_limit_of_steps_gives_the_best_so_far_with_its_bound() -> None:
    start = dict.fromkeys(range(40), 0.0)
    result = solve_milp(knapsack(40), Work.within(60, steps=1), 0.0, start)
    assert result.status == "feasible"
    assert result.values
    assert result.bound < result.cost


def test_milp_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve_milp(knapsack(5), Work.within(10), 0.0)
    assert capfd.readouterr() == ("", "")


def test_memory_rows_are_only_those_that_can_bind() -> None:
    loose, tight = (formulate(spmd(2, 6, 3, limit=limit), "throughput") for limit in (1e9, 15))
    free = formulate(spmd(2, 6, 3), "throughput")
    assert len(loose.milp.rows) == len(free.milp.rows) < len(tight.milp.rows)


def test_one_distinct_device_needs_no_maximum() -> None:
    assert not formulate(spmd(0, 4, 2), "throughput").min_max
    assert formulate(placement(0, 4, 2), "throughput").min_max


def test_a_program_is_not_written_behind_the_time_limit() -> None:
    problem, late = spmd(1, 30, 5), Work.within(0.0)
    assert formulate(problem, "throughput", work=Work.within(60)) is not None
    assert formulate(problem, "throughput", work=late) is None
    assert late.stopped
