"""Passes of a step: the boxes of a plan in stages, and their trace events."""

import itertools
import json

import pytest

from helpers.plans import staged_plans
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.schedule.passes import pass_text, passes
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.cost_model.schedule.trace_events import timeline_json
from partitioner.ir.phases import Part


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
