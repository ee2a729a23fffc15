"""Hundreds of small random problems: the optimum, its bound, its price, with and without presolve.

`test_optimum` checks each kind more closely; here many problems are checked.
"""

from collections.abc import Callable
from importlib import import_module

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import dnnp, hops, placement, shared_holds, spmd, uneven
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.files import to_problem
from partitioner.solver.joint.solve import solve
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.presolve.simplify import Reduced
from partitioner.solver.problem import Problem
from partitioner.solver.referee import Objective, evaluate_choices

KINDS: tuple[Callable[[int], Problem], ...] = (
    lambda seed: spmd(seed, 4, 3, forbid=0.2),
    lambda seed: spmd(seed, 4, 3, limit=12 + seed % 12),
    lambda seed: shared_holds(spmd(seed, 4, 3, limit=20 + seed % 12), seed),
    lambda seed: hops(seed, 4),
    lambda seed: placement(seed, 4, 2, scale=1 + seed % 3),
    lambda seed: placement(seed, 4, 2, limit=8 + seed % 12),
    lambda seed: placement(seed, 2, 2, limit=8 + seed % 12, per_group=2),
    lambda seed: shared_holds(placement(seed, 4, 2), seed),
    lambda seed: uneven(placement(seed, 3, 3, limit=8 + seed % 12)),
    lambda seed: to_problem(parse(dnnp(seed, 5))),
)
#: Seeds of a test: a problem of each kind in turn.
CHUNK = 50
#: Problems that the slower tests look at.
FEW = range(0, 60, 30)
TOLERANCE = 1e-4


def random_problem(seed: int) -> Problem:
    return KINDS[seed % len(KINDS)](1000 + seed)


def answer(problem: Problem, objective: Objective) -> Solution | None:
    try:
        return solve(problem, objective, gap=0.0, reason_s=0.0)
    except Infeasible:
        return None


def agree(problem: Problem, objective: Objective, slack: float, seed: int) -> bool:
    """Solver and brute force; whether anything is feasible."""
    best, solution = brute_force(problem, objective), answer(problem, objective)
    assert (best is None) == (solution is None), seed
    if best is None or solution is None:
        return False
    assert solution.cost == evaluate_choices(problem, solution.chosen).value(objective), seed
    assert evaluate_choices(problem, solution.chosen).excess_bytes == 0, seed
    assert best[1] * (1 - 1e-9) <= solution.cost <= best[1] * (1 + slack) + 1e-9, seed
    assert solution.bound <= best[1] * (1 + 1e-9), seed
    return True


@pytest.fixture
def little_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few moves of local search, so that bounds and the exact program decide (and fast)."""
    monkeypatch.setattr("partitioner.solver.joint.solve.POLISH", 50)
    monkeypatch.setattr("partitioner.solver.joint.incumbents.EFFORT_PER_CHOICE", 5)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("little_luck")
@pytest.mark.parametrize("start", range(0, 500, CHUNK))
def test_throughput(start: int) -> None:
    seeds = range(start, start + CHUNK)
    feasible = [agree(random_problem(s), "throughput", TOLERANCE, s) for s in seeds]
    assert 0.5 * CHUNK < sum(feasible) < CHUNK


@pytest.mark.slow
@pytest.mark.parametrize("start", FEW)
def test_memory(start: int) -> None:
    feasible = [
        agree(random_problem(s), "memory", 1.1e-3, s) for s in range(start, start + FEW.step)
    ]
    assert any(feasible)


@pytest.mark.parametrize("start", FEW)
def test_latency(start: int) -> None:
    """Exact where all devices carry the same; else a search that ends near the optimum."""
    feasible = [agree(random_problem(s), "latency", 0.1, s) for s in range(start, start + FEW.step)]
    assert any(feasible)


@pytest.mark.usefixtures("little_luck")
@pytest.mark.parametrize("start", FEW)
def test_presolve_changes_no_optimum(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(start, start + FEW.step)
    with_it = [answer(random_problem(s), "throughput") for s in seeds]
    monkeypatch.setattr(
        import_module("partitioner.solver.joint.solve"),
        "presolve",
        lambda problem: Reduced(
            problem,
            tuple(tuple(range(len(c))) for c in problem.nodes),
            range(len(problem.nodes)),
        ),
    )
    without = [answer(random_problem(s), "throughput") for s in seeds]
    assert any(plan is not None for plan in without)
    for seed, a, b in zip(seeds, with_it, without, strict=True):
        assert (a is None) == (b is None), seed
        if a is not None and b is not None:
            assert a.cost == pytest.approx(b.cost, rel=TOLERANCE), seed
