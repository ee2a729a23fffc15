"""The work of a search: its steps, its shares and the clock that stops it."""

import math

import pytest

from partitioner.solver import work as work_module
from partitioner.solver.work import Work

NOW_S = 100.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The second that the clock shows."""
    shown = [NOW_S]
    monkeypatch.setattr(work_module, "now_s", lambda: shown[0])
    return shown


def test_a_share_is_of_the_steps_left_and_the_whole_pays_for_it() -> None:
    whole = Work(NOW_S + 30, 1000.0)
    whole.spend(400)
    share = whole.share(3)
    assert (share.left, share.left_s) == (200, 30)
    share.spend(250)
    assert (share.left, whole.left, whole.spent) == (0, 350, 650)
    assert share.over
    assert not whole.over
    assert not share.stopped


def test_the_clock_stops_a_share_and_the_whole(clock: list[float]) -> None:
    whole = Work(NOW_S + 30, 1000.0)
    share = whole.share(2)
    clock[0] += 29.9
    assert not share.over
    clock[0] += 0.1
    assert not share.stopped  # nothing has asked yet, so nothing was cut off
    assert share.over
    assert share.late
    assert (share.stopped, whole.stopped) == (True, True)


def test_work_that_is_done_is_not_stopped_by_the_clock(clock: list[float]) -> None:
    work = Work(NOW_S + 30, 10.0)
    work.spend(10)
    clock[0] += 40
    assert work.over
    assert not work.stopped


def test_without_limits_work_is_never_over() -> None:
    work = Work()
    work.spend(1e30)
    assert (work.left, work.left_s, work.over) == (math.inf, math.inf, False)
