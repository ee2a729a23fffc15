"""The reason of a refusal claims no more than the plans that are known allow."""

import math
from dataclasses import replace
from importlib import import_module

import pytest

from helpers.problems.enumeration import brute_force
from helpers.problems.solver_instances import spmd
from partitioner.solver.joint.solve import seek_least
from partitioner.solver.milp.program import MilpResult
from partitioner.solver.outcome import Infeasible, short_of_memory
from partitioner.solver.problem import Problem
from partitioner.solver.progress import Progress
from partitioner.solver.work import Work


@pytest.fixture
def short() -> tuple[Problem, tuple[int, ...], float]:
    """A problem whose memory is 3 bytes short, the plan of least peak, and its peak."""
    problem = spmd(0, 5, 3, forbid=0.0)
    best = brute_force(problem, "memory")
    assert best is not None
    plan, peak = best
    return replace(problem, limit_bytes=(peak - 3.0,) * problem.devices), plan, peak


def progress_of(problem: Problem) -> Progress:
    return Progress(problem, "throughput", 0.0, Work.within(60), 0)


def claim(monkeypatch: pytest.MonkeyPatch, result: MilpResult) -> None:
    """Let the MILP solver claim this."""
    shortage = import_module("partitioner.solver.joint.solve")
    monkeypatch.setattr(shortage, "solve_milp", lambda *_, **__: result)


def test_the_least_shortage_is_proven(short: tuple[Problem, tuple[int, ...], float]) -> None:
    problem, plan, _ = short
    for known in (None, plan):
        progress = progress_of(problem)
        if known is not None:
            progress.offer(known, "test")
        assert seek_least(progress)
        assert progress.closest is not None


def test_a_known_plan_refutes_that_all_are_forbidden(
    short: tuple[Problem, tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, plan, _ = short
    claim(monkeypatch, MilpResult((), math.inf, math.inf, "infeasible"))
    with pytest.raises(Infeasible, match="forbidden pair"):
        seek_least(progress_of(problem))
    progress = progress_of(problem)
    progress.offer(plan, "test")
    assert not seek_least(progress)
    assert progress.closest == plan


@pytest.mark.parametrize(("proven", "least"), [(0.0, False), (3.0, True), (3.5, False)])
def test_bytes_are_short_only_as_far_as_the_nearest_plan_bears_it_out(
    short: tuple[Problem, tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
    proven: float,
    least: bool,
) -> None:
    problem, plan, peak = short
    bound = proven / (peak - 3)  # in units of the limit
    claim(monkeypatch, MilpResult((), bound, bound, "optimal"))
    progress = progress_of(problem)
    progress.offer(plan, "test")
    assert seek_least(progress) == least


@pytest.mark.parametrize(("short", "said"), [(1, "1 byte is short"), (2, "2 bytes are short")])
def test_one_byte_is_said_so(short: int, said: str) -> None:
    refusal = short_of_memory(100 + short, 100, device=0, proven=True, least=True)
    wanted = f"no plan fits: {said} on device 0 ({100 + short} bytes held, limit 100"
    assert str(refusal).startswith(wanted)
