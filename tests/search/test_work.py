"""The search by work: a clock never changes a plan, it stops the search, and the limit is held."""

import itertools
import random
from collections.abc import Callable

import pytest

from helpers.plans.searching import search
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.plan import Certificate
from partitioner.search.outcome import Outcome
from partitioner.search.request import Request
from partitioner.solver import work as work_module
from partitioner.solver.work import STEPS_PER_S, Work

#: Its placement on four devices leaves a gap that several methods take turns to close. No MILP is
#: among them: HiGHS has a clock of its own.
MODEL = load_onnx(examples.build("mlp", layers=24, hidden=64, batch=4)).graph
LIMIT_S = 6.0
#: Share of the time limit by which it may be exceeded.
OVERRUN = 0.1


def found(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> Outcome:
    monkeypatch.setattr(work_module, "now_s", clock)
    return search(MODEL, resolve_cluster("4xh100"), Request(time_limit_s=LIMIT_S, gap=0.0))


def certificate(outcome: Outcome) -> Certificate:
    assert outcome.plan.certificate is not None
    return outcome.plan.certificate


def test_a_slow_clock_and_a_fast_one_make_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    uneven = itertools.accumulate(draw.choice((0.0, 1e-5, 1e-4)) for _ in itertools.count())
    still = found(monkeypatch, lambda: 0.0)
    busy = found(monkeypatch, lambda: next(uneven))
    assert next(uneven) > 0.01  # the clock was looked at, and went on
    assert certificate(still).status != "time_limit"
    assert still.plan.to_json() == busy.plan.to_json()


@pytest.mark.parametrize("slowness", [6, 10])
def test_the_clock_stops_the_search_within_its_limit(
    monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    """On a machine so many times as slow, whose clock goes on with the steps."""
    shown = [0.0]
    spend = Work.spend

    def spent(work: Work, steps: float) -> None:
        spend(work, steps)
        if work.parent is None:
            shown[0] += slowness * steps / STEPS_PER_S

    monkeypatch.setattr(Work, "spend", spent)
    outcome = found(monkeypatch, lambda: shown[0])
    assert LIMIT_S <= shown[0] < (1 + OVERRUN) * LIMIT_S
    assert certificate(outcome).status == "time_limit"
    assert certificate(outcome).bound <= certificate(outcome).cost
