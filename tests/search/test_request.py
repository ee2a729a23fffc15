"""The budget of a search and its shares."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

import partitioner
from partitioner.examples import build
from partitioner.search.outcome import Outcome
from partitioner.search.request import LEAST_CLOCK, PART, SHORT_S, Budget, Request, silent
from partitioner.search.ways.table import LAST_SHARE
from partitioner.search.ways.way import Weighing
from partitioner.solver import work as work_module
from partitioner.solver.outcome import Infeasible
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


def test_the_steps_of_a_short_limit_are_those_of_a_longer_one_at_most(budget: Budget) -> None:
    for limit_s in (1.0, 6.0, PART * SHORT_S, 10.0, SHORT_S):
        short = Budget.of(replace(Request(), time_limit_s=limit_s))
        assert short.work.left == min(limit_s, PART * SHORT_S) * STEPS_PER_S
    assert budget.with_steps(1.0).work.left == budget.work.left
    assert budget.with_steps(1e9).work.left == 1e9


@pytest.mark.parametrize(("spent_s", "left_s"), [(0, 30), (10, 20), (29, 30 * LEAST_CLOCK)])
def test_a_search_has_what_tracing_leaves_of_the_limit(
    spent_s: float, left_s: float, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partitioner.search.request.now_s", lambda: NOW_S)
    begun = Budget.of(Request(time_limit_s=30), begun_s=NOW_S - spent_s)
    assert begun.work.left_s == left_s
    assert begun.work.left == budget.work.left


def test_the_clock_begins_with_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [NOW_S]
    seen: list[Budget] = []
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def weighed(weighing: Weighing) -> Outcome:
        seen.append(weighing.budget)
        raise Infeasible("nothing fits")

    def slow(stage: str) -> None:
        now[0] += 7.0 if stage == "reading the model" else 0.0

    monkeypatch.setattr(Weighing, "best", weighed)
    with pytest.raises(Infeasible, match="nothing fits"):
        partitioner.compile(build("tiny"), devices=2, time_limit_s=30, progress=slow)
    assert now[0] == NOW_S + 7
    left_s = 30 - 7  # of which the last part is for changes of the best plan
    assert seen[0].work.left_s == pytest.approx(left_s * (1 - LAST_SHARE))
