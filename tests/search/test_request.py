"""The budget of a search and its shares."""

import math

import pytest

from partitioner.search import request as request_module
from partitioner.search.request import LEAST_S, Budget, Request, silent

NOW_S = 100.0


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Budget:
    """A budget of 30 seconds that begins now, at a clock that stands still."""
    monkeypatch.setattr(request_module.time, "monotonic", lambda: NOW_S)
    return Budget.of(Request(time_limit_s=30, gap=0.1, seed=7))


def test_the_budget_of_a_request(budget: Budget) -> None:
    assert (budget.deadline, budget.left_s) == (NOW_S + 30, 30)
    assert (budget.gap, budget.seed, budget.engine.name) == (0.1, 7, "highs")
    assert (budget.say, budget.best_s, budget.defers_memory) == (silent, math.inf, False)


@pytest.mark.parametrize(
    ("left_s", "spaces", "share_s"),
    [
        (30, 1, 30),
        (30, 3, 10),
        (LEAST_S, 2, LEAST_S / 2),
        (LEAST_S / 4, 1, LEAST_S),
        (LEAST_S / 4, 2, LEAST_S / 2),
    ],
)
def test_a_share_of_the_time_left(
    budget: Budget,
    monkeypatch: pytest.MonkeyPatch,
    left_s: float,
    spaces: int,
    share_s: float,
) -> None:
    monkeypatch.setattr(request_module.time, "monotonic", lambda: budget.deadline - left_s)
    share = budget.share(spaces)
    assert share.left_s == pytest.approx(share_s)
    assert {**vars(share), "deadline": budget.deadline} == vars(budget)


@pytest.mark.parametrize("late_s", [0, 5])
def test_after_the_deadline_a_share_is_the_budget(
    budget: Budget, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    monkeypatch.setattr(request_module.time, "monotonic", lambda: budget.deadline + late_s)
    assert budget.share(4) is budget
