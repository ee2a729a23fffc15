"""The critical path explains every instant up to the last end."""

import itertools

import pytest

import partitioner
from partitioner import examples
from partitioner.cost_model.critical import critical_path
from partitioner.cost_model.simulate import Timeline, simulate


def _explained(timeline: Timeline) -> None:
    path = critical_path(timeline)
    events = [timeline.events[index] for index in path]
    assert events[-1].end_s == timeline.makespan_s
    assert events[0].start_s == pytest.approx(0.0, abs=1e-12)
    slack = 1e-9 * timeline.makespan_s
    covered = 0.0
    for event in events:
        assert event.start_s <= covered + slack  # no instant of the path is left unexplained
        covered = max(covered, event.end_s)
    assert covered == pytest.approx(timeline.makespan_s)
    for one, two in itertools.pairwise(events):
        same_device = one.device == two.device
        assert same_device or (one.task, one.request) == (two.task, two.request)


@pytest.mark.parametrize("strategy", ["auto", "intra", "inter"])
@pytest.mark.parametrize("requests", [1, 3])
def test_the_path_covers_the_whole_timeline(strategy: str, requests: int) -> None:
    model = examples.build("mlp", layers=4, hidden=64)
    result = partitioner.compile(model, 3, strategy=strategy, time_limit_s=3)
    _explained(simulate(result.schedule, requests))


def test_nothing_ran() -> None:
    assert critical_path(Timeline(())) == ()
