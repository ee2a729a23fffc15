"""The budget of a search and its shares."""

import math

import pytest

from partitioner.search.request import PART, Budget, Request, silent
from partitioner.solver import work as work_module
from partitioner.solver.work import STEPS_PER_S

NOW_S = 100.0


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    """A budget of 30 seconds that begins now, at a clock that stands still."""
    monkeypatch.setattr(work_module, "now_s", lambda: NOW_S)
    return Budget.of(Request(time_limit_s=30, gap=0.1, seed=7))


def test_the_budget_of_a_request(budget: Budget) -> None:
    assert (budget.work.deadline, budget.work.left_s) == (NOW_S + 30, 30)
    assert budget.work.left == 30 * PART * STEPS_PER_S
    assert (budget.gap, budget.seed, budget.engine.name) == (0.1, 7, "highs")
    assert (budget.say, budget.best_s, budget.defers_memory) == (silent, math.inf, False)


def test_a_share_has_its_part_of_the_steps_and_all_the_time(budget: Budget) -> None:
    share = budget.share(3)
    assert share.work.left == pytest.approx(budget.work.left / 3)
    assert share.work.left_s == 30
    assert {**vars(share), "work": budget.work} == vars(budget)
    assert share.work.of_the_clock(3).left_s == 10
