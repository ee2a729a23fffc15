"""The critical path explains every instant up to the last end."""

import itertools

import pytest

import partitioner
from helpers.plans.cost_cases import compute, tasks
from partitioner import examples
from partitioner.cost_model.schedule.critical_path import critical_path
from partitioner.cost_model.schedule.simulate import Timeline, simulate
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.exchange import Transfer
from partitioner.ir.program import Comm, CommKind


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
    result = partitioner.compile(model, devices=3, strategy=strategy, time_limit_s=3)
    _explained(simulate(result.schedule, requests))


def test_nothing_ran() -> None:
    assert critical_path(Timeline(())) == ()


def test_a_collective_that_takes_its_devices_different_times() -> None:
    """Device 1 comes last and is done first: the path still goes back through it."""
    ranks = (0, 1)
    moves = tuple(Transfer(a, b, (((0, 1),),), (((0, 1),),)) for a, b in ((0, 1), (1, 0)))
    comm = Comm(1, CommKind.ALL_TO_ALL, ranks, "p", "q", "float32", moves)
    exchange = Task("all_to_all p", {0: 5.0, 1: 1.0}, (), (), None, comm)
    schedule = tasks(
        compute("a", 0, ("x",), {"p": 4}, seconds=1.0),
        compute("b", 1, ("x",), {"r": 4}, seconds=3.0),
        exchange,
        compute("c", 0, ("p",), {"y": 4}, seconds=1.0),
    )
    timeline = simulate(schedule)
    names = [(timeline.events[i].name, timeline.events[i].device) for i in critical_path(timeline)]
    assert names == [("b", 1), ("all_to_all p", 1), ("all_to_all p", 0), ("c", 0)]
    _explained(timeline)
