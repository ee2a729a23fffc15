"""Solver == brute force on small random problems of every kind, and every certificate holds."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import placement, spmd, uneven
from partitioner.solver.joint import solve as solve_module
from partitioner.solver.joint.solve import solve
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.presolve.simplify import keep_choices
from partitioner.solver.problem import Problem, SolverError
from partitioner.solver.referee import Objective, evaluate_choices
from partitioner.solver.work import Work

TOLERANCE = 1e-4

KINDS: dict[str, Callable[[int], Problem]] = {
    "spmd": lambda seed: spmd(seed, 6, 3, forbid=0.15),
    "spmd, limited": lambda seed: spmd(seed, 5, 3, limit=20 + seed % 5),
    "placement": lambda seed: placement(seed, 6, 2),
    "placement, limited": lambda seed: placement(seed, 5, 3, limit=12 + seed % 9),
    "hybrid": lambda seed: placement(seed, 4, 2, per_group=2),
    "hybrid, limited": lambda seed: placement(seed, 4, 2, limit=14 + seed % 9, per_group=2),
    "uneven": lambda seed: uneven(placement(seed, 5, 3)),
}


def answer(problem: Problem, objective: Objective, **options: float) -> Solution | None:
    try:
        return solve(problem, objective, gap=0.0, **options)
    except Infeasible:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_most_problems_of_a_kind_have_plans(kind: str) -> None:
    plans = [brute_force(KINDS[kind](seed), "throughput") for seed in range(8)]
    assert sum(plan is not None for plan in plans) >= 4
    assert any(plan is not None for plan in plans[:3])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_throughput_is_the_optimum(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    best, solution = brute_force(problem, "throughput"), answer(problem, "throughput")
    assert (best is None) == (solution is None)
    if best is None or solution is None:
        return
    assert solution.cost == pytest.approx(best[1], rel=TOLERANCE)
    assert solution.bound <= best[1] * (1 + 1e-9)
    assert solution.status == "optimal"
    outcome = evaluate_choices(problem, solution.chosen)
    assert solution.cost == outcome.step_s
    assert outcome.excess_bytes == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_memory_is_the_optimum_within_its_tolerance(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    best, solution = brute_force(problem, "memory"), answer(problem, "memory")
    assert (best is None) == (solution is None)
    if best is None or solution is None:
        return
    assert solution.cost <= best[1] * (1 + 1.1e-3)
    assert solution.bound <= best[1] * (1 + 1e-9)
    limits = tuple(min(limit, best[1]) for limit in problem.limit_bytes)
    fastest = brute_force(replace(problem, limit_bytes=limits), "throughput")
    assert fastest is not None
    step = evaluate_choices(problem, solution.chosen).step_s
    assert step <= fastest[1] * (1 + TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_latency_is_bounded_and_near_the_optimum(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    best, solution = brute_force(problem, "latency"), answer(problem, "latency")
    assert (best is None) == (solution is None)
    if best is None or solution is None:
        return
    assert solution.bound <= best[1] * (1 + 1e-9)
    assert best[1] * (1 - 1e-9) <= solution.cost <= best[1] * 1.1
    assert solution.cost == evaluate_choices(problem, solution.chosen).latency_s
    assert solution.order == tuple(range(len(problem.nodes)))
    if kind.startswith("spmd"):
        assert solution.cost == pytest.approx(best[1], rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["spmd, limited", "placement, limited", "hybrid, limited"])
@pytest.mark.parametrize("seed", range(3))
def test_infeasible_says_how_many_bytes_are_short(kind: str, seed: int) -> None:
    problem = KINDS[kind](seed)
    least = brute_force(replace(problem, limit_bytes=(math.inf,) * problem.devices), "memory")
    assert least is not None
    problem = replace(problem, limit_bytes=(least[1] - 2.5,) * problem.devices)
    with pytest.raises(
        Infeasible, match=r"no plan fits: 3 bytes are short on device \d at 'n"
    ) as at:
        solve(problem)
    error = at.value
    assert error.exit_code == 3
    assert error.bytes_short == pytest.approx(2.5)
    assert error.proven
    assert error.name in problem.names


def test_least_peak_just_fits() -> None:
    problem = KINDS["placement, limited"](1)
    least = brute_force(problem, "memory")
    assert least is not None
    fits = replace(problem, limit_bytes=(least[1],) * problem.devices)
    assert evaluate_choices(fits, solve(fits).chosen).excess_bytes == 0


def test_forbidden_pairs_alone_can_rule_everything_out() -> None:
    problem = spmd(0, 3, 2, classes=2, forbid=0.0)
    pairs = frozenset((o, i) for o in range(2) for i in range(2))
    edges = (replace(problem.edges[0], forbidden=pairs), *problem.edges[1:])
    with pytest.raises(Infeasible, match="every combination of choices takes a forbidden pair"):
        solve(replace(problem, edges=edges))


def test_a_ring_of_forbidden_pairs_is_found_by_the_solver() -> None:
    """Three nodes of two classes that must differ pairwise: each choice by itself is possible."""
    problem = placement(0, 3, 2)
    same = frozenset({(0, 0), (1, 1)})
    edge = problem.edges[0]
    edges = tuple(
        replace(edge, u=u, v=v, items={}, forbidden=same) for u, v in ((0, 1), (1, 2), (0, 2))
    )
    with pytest.raises(Infeasible, match="every combination of choices takes a forbidden pair"):
        solve(replace(problem, edges=edges))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_requests_get_equal_plans(kind: str) -> None:
    problem = KINDS[kind](5)
    assert answer(problem, "throughput") == answer(problem, "throughput")


@pytest.mark.parametrize("seed", range(6))
def test_symmetry_breaking_keeps_the_optimum(seed: int) -> None:
    problem = placement(seed, 6, 3)
    free = replace(problem, interchangeable=())
    assert solve(problem, gap=0).cost == pytest.approx(solve(free, gap=0).cost, rel=TOLERANCE)


def test_a_pinned_node_is_kept_beside_interchangeable_groups() -> None:
    problem = placement(3, 6, 3)
    edges = tuple(
        replace(
            edge,
            out_class=edge.out_class[2:] if edge.u == 2 else edge.out_class,
            in_class=edge.in_class[2:] if edge.v == 2 else edge.in_class,
        )
        for edge in problem.edges
    )
    pinned = replace(
        problem,
        nodes=(*problem.nodes[:2], problem.nodes[2][2:], *problem.nodes[3:]),
        edges=edges,
        holds=tuple(replace(h, items=h.items[2:]) if h.node == 2 else h for h in problem.holds),
    )
    best = brute_force(pinned, "throughput")
    assert best is not None
    assert solve(pinned, gap=0).cost == pytest.approx(best[1], rel=TOLERANCE)


def test_a_time_limit_returns_the_incumbent_with_its_bound() -> None:
    problem = placement(1, 40, 4, scale=2)
    solution = solve(problem, work=Work.within(0.05), gap=0.0)
    assert solution.status == "time_limit"
    assert 0 < solution.bound <= solution.cost
    assert solution.cost == evaluate_choices(problem, solution.chosen).step_s


def test_options_are_checked() -> None:
    with pytest.raises(SolverError, match="objective 'speed': one of throughput, memory, latency"):
        solve(spmd(0, 2, 2), "speed")  # type: ignore[arg-type]


def test_a_problem_without_nodes_is_solved() -> None:
    assert solve(Problem(1, (math.inf,), (), (), (), (), ())).chosen == ()


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
def test_a_problem_without_a_choice_is_proven_without_a_search(objective: Objective) -> None:
    """The loads of its devices differ: no bound on their mean proves it."""
    problem = placement(0, 6, 3)
    pinned = keep_choices(problem, [(node % 2,) for node in range(6)])
    work = Work.within(30)
    solution = solve(pinned, objective, work, gap=0.0)
    assert (solution.status, solution.bound) == ("optimal", solution.cost)
    assert solution.cost == evaluate_choices(problem, [node % 2 for node in range(6)]).value(
        objective
    )
    assert work.spent == 0


def test_a_short_latency_is_not_looked_for_behind_the_limit_beside_a_known_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, looked = placement(1, 6, 2, per_group=2), list[str]()
    for name in ("starts", "seek", "propose"):
        monkeypatch.setattr(solve_module, name, lambda _, name=name: looked.append(name) or ())
    solve(problem, "latency", Work.within(0.0), cutoff=1e6)
    assert looked == []
    solve(problem, "latency", Work.within(0.0))
    assert looked == ["starts", "propose"]
