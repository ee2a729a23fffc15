import itertools
import json

import pytest

from helpers.plans.cost_cases import compute, key, send, tasks
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.schedule.readings import timeline_json
from partitioner.cost_model.schedule.simulate import Event, Timeline, simulate, step_seconds
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.program import Comm, CommKind


def times(timeline: Timeline, device: int) -> list[tuple[str, int, float, float]]:
    return [
        (event.name, event.request, event.start_s, event.end_s)
        for event in timeline.events
        if event.device == device
    ]


def pipeline() -> Schedule:
    """2 s on device 0, 1 s to send, 3 s on device 1."""
    return tasks(
        compute("a", 0, ("x",), {"p": 4}, seconds=2.0),
        send("p", 0, 1, 4),
        compute("b", 1, ("p",), {"y": 4}, seconds=3.0, hops=1),
    )


def test_one_request_through_two_devices() -> None:
    timeline = simulate(pipeline())
    assert times(timeline, 0) == [("a", 0, 0, 2), ("send p", 0, 2, 3)]
    assert times(timeline, 1) == [("send p", 0, 2, 3), ("b", 0, 3, 6)]
    assert timeline.latency_s == timeline.makespan_s == 6


def test_seconds_of_a_whole_batch_are_those_of_its_timeline() -> None:
    assert step_seconds(pipeline()) == simulate(pipeline()).makespan_s == 6


def test_requests_overlap_in_a_pipeline() -> None:
    timeline = simulate(pipeline(), requests=3)
    assert times(timeline, 0)[2:4] == [("a", 1, 3, 5), ("send p", 1, 5, 6)]
    # Device 1 is busy 4 s a request: it receives for 1 s and computes for 3 s.
    assert [row for row in times(timeline, 1) if row[0] == "b"] == [
        ("b", 0, 3, 6),
        ("b", 1, 7, 10),
        ("b", 2, 11, 14),
    ]
    assert timeline.latency_s == 6
    assert timeline.makespan_s == 6 + 2 * 4


def test_a_device_that_comes_back() -> None:
    """0 -> 1 -> 0, with other work on 0 meanwhile."""
    schedule = tasks(
        compute("a", 0, ("x",), {"p": 4}),
        send("p", 0, 1, 4),
        compute("side", 0, ("p",), {"s": 4}, seconds=1.5),
        compute("b", 1, ("p",), {"q": 4}, seconds=2.0, hops=1),
        send("q", 1, 0, 4, hops=1),
        compute("c", 0, ("q", "s"), {"y": 4}, hops=2),
    )
    timeline = simulate(schedule)
    assert times(timeline, 0) == [
        ("a", 0, 0, 1),
        ("send p", 0, 1, 2),
        ("side", 0, 2, 3.5),
        ("send q", 0, 4, 5),
        ("c", 0, 5, 6),
    ]
    assert times(timeline, 1) == [("send p", 0, 1, 2), ("b", 0, 2, 4), ("send q", 0, 4, 5)]
    many = simulate(schedule, requests=50)
    # Device 0 has 1 + 1 + 1.5 + 1 + 1 s of work a request and no reason to wait.
    assert (many.makespan_s - many.latency_s) / 49 == pytest.approx(5.5, rel=0.05)
    order = [(name, request) for name, request, _, _ in times(many, 0)]
    assert order[:10] == [
        ("a", 0),
        ("send p", 0),
        ("side", 0),
        ("a", 1),
        ("send p", 1),
        ("side", 1),
        ("a", 2),
        ("send p", 2),
        ("side", 2),
        ("send q", 0),
    ]


def all_reduce(seconds: float) -> Task:
    comm = Comm(0, CommKind.ALL_REDUCE, (0, 1), "p", "p", "float32", reduce="sum")
    devices = {0: seconds, 1: seconds}
    reads = tuple((device, key("p", device)) for device in devices)
    return Task("all_reduce p", devices, reads, (), comm=comm)


def test_a_collective_waits_for_its_last_device() -> None:
    schedule = tasks(
        compute("a", 0, ("x",), {"p": 4}, seconds=1.0),
        compute("b", 1, ("x",), {"p": 4}, seconds=3.0),
        all_reduce(0.5),
        compute("c", 0, ("p",), {"y": 4}),
    )
    timeline = simulate(schedule)
    assert times(timeline, 0) == [("a", 0, 0, 1), ("all_reduce p", 0, 3, 3.5), ("c", 0, 3.5, 4.5)]
    assert times(timeline, 1) == [("b", 0, 0, 3), ("all_reduce p", 0, 3, 3.5)]


def test_a_node_on_a_group_starts_where_it_can() -> None:
    group = Task("g", {0: 1.0, 1: 2.0}, (), (), placed=compute("n", 0, (), {}).placed)
    schedule = tasks(compute("a", 0, ("x",), {"p": 4}, seconds=5.0), group)
    timeline = simulate(schedule)
    assert times(timeline, 0)[1] == ("g", 0, 5, 6)
    assert times(timeline, 1) == [("g", 0, 0, 2)]


def test_a_sender_does_not_wait_for_a_busy_receiver() -> None:
    schedule = tasks(
        compute("busy", 1, ("x",), {"q": 4}, seconds=10.0),
        compute("a", 0, ("x",), {"p": 4}),
        send("p", 0, 1, 4),
        compute("next", 0, ("p",), {"r": 4}),
    )
    timeline = simulate(schedule)
    assert times(timeline, 0) == [("a", 0, 0, 1), ("send p", 0, 1, 2), ("next", 0, 2, 3)]
    assert times(timeline, 1) == [("busy", 0, 0, 10), ("send p", 0, 10, 11)]


def test_devices_are_never_in_two_places() -> None:
    timeline = simulate(pipeline(), requests=7)
    assert {event.request for event in timeline.events} == set(range(7))
    for device in (0, 1):
        rows = times(timeline, device)
        assert all(before[3] <= after[2] for before, after in itertools.pairwise(rows))
        assert len(rows) == 14


def test_trace_events() -> None:
    data = json.loads(timeline_json(simulate(pipeline(), requests=2)))
    assert data["displayTimeUnit"] == "ms"
    events = data["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["device 0", "device 1"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 8
    assert spans[0] == {
        "ph": "X",
        "name": "a",
        "cat": "compute",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 2e6,
        "args": {"request": 0},
    }
    assert {event["tid"] for event in spans if event["cat"] == "comm"} == {1}
    assert all({"ph", "pid", "name"} <= set(event) for event in events)


def test_nothing_to_run() -> None:
    timeline = simulate(tasks())
    assert (timeline.latency_s, timeline.makespan_s) == (0, 0)
    assert json.loads(timeline_json(timeline)) == {"displayTimeUnit": "ms", "traceEvents": []}


def test_at_least_one_request() -> None:
    with pytest.raises(CostError, match="0 requests were asked for"):
        simulate(tasks(), requests=0)


def test_events_are_plain_data() -> None:
    assert simulate(tasks(compute("a", 0, (), {"y": 1}))).events == (
        Event(0, "compute", "a", 0, 1, 0),
    )
