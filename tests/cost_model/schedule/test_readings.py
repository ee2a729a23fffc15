"""Critical path, passes of a step, and trace events of a timeline."""

import itertools
import json

import pytest

import partitioner
from helpers.plans import staged_plans
from helpers.plans.cost_cases import compute, tasks
from partitioner import examples
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.schedule.readings import critical_path, pass_text, passes, timeline_json
from partitioner.cost_model.schedule.simulate import Timeline, simulate
from partitioner.cost_model.schedule.tasks import Task
from partitioner.ir.exchange import Transfer
from partitioner.ir.phases import Part
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


def test_a_device_runs_its_passes_in_the_order_of_the_schedule() -> None:
    result = staged_plans.staged("1f1b")
    boxes = passes(result.schedule, simulate(result.schedule))
    labels = [box.label for box in boxes if box.device == 0]
    assert " ".join(labels) == "setup F0 F1 B0 F2 B1 F3 B2 B3 reduce"


@pytest.mark.parametrize("name", staged_plans.CASES)
def test_boxes_do_not_overlap_and_hold_all_compute(name: str) -> None:
    schedule = staged_plans.staged(name).schedule
    timeline = simulate(schedule)
    boxes = passes(schedule, timeline)
    for before, after in itertools.pairwise(boxes):
        assert before.device < after.device or before.end_s <= after.start_s
    inside = {index for box in boxes for index in box.events}
    for index, event in enumerate(timeline.events):
        if event.kind == "compute" and event.end_s > event.start_s:
            assert index in inside
    assert timeline.turn == "micro-batch"


def test_labels_name_the_stage_where_a_device_runs_several() -> None:
    result = staged_plans.staged("interleaved")
    boxes = passes(result.schedule, simulate(result.schedule))
    stages = {box.label: box.stage for box in boxes if box.part is Part.FORWARD}
    assert stages["0F1"] == 0
    assert stages["2F1"] == 2


def test_weight_passes_of_a_split_schedule_are_boxes_of_their_own() -> None:
    result = staged_plans.staged("zb1")
    boxes = passes(result.schedule, simulate(result.schedule))
    last = {box.label: pass_text(box) for box in boxes if box.device == 1}
    assert {"B3", "W3"} <= last.keys()
    assert last["W3"] == "weight pass of stage 1, micro-batch 3"
    assert last["reduce"] == "reduce, once a step"


def test_trace_events_speak_of_micro_batches_and_have_a_lane_of_passes() -> None:
    result = staged_plans.staged("1f1b")
    timeline = simulate(result.schedule)
    boxes = passes(result.schedule, timeline)
    events = json.loads(timeline_json(timeline, boxes))["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "comm", "passes"} <= lanes
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"].get("micro-batch") for event in spans} >= {0, 1, 2, 3}
    assert not any("request" in event["args"] for event in spans)
    (box,) = (event for event in spans if event["name"] == "F3" and event["pid"] == 1)
    assert box["args"] == {"pass": "forward pass of stage 1, micro-batch 3"}


def test_a_step_is_no_stream_of_requests() -> None:
    with pytest.raises(CostError, match="one step of 4 micro-batches"):
        simulate(staged_plans.staged("1f1b").schedule, requests=2)
