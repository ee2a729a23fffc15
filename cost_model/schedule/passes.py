"""Passes of a step of a plan with stages: a stage's forward, backward or weight pass as one box."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from partitioner.cost_model.schedule.simulate import Timeline
from partitioner.cost_model.schedule.task_list import Schedule
from partitioner.ir.phases import Part

#: Letters of the passes of a stage, as in `ir.pipeline`; B is the half of a split backward pass,
#: too, that other stages wait for.
LETTERS = {Part.FORWARD: "F", Part.BACKWARD: "B", Part.WEIGHT: "W", Part.DELIVER: "D"}


@dataclass(frozen=True, slots=True)
class Pass:
    """A phase of a micro-batch on a device, without what it sends and receives."""

    device: int
    part: Part
    stage: int  #: 0 for the parts of no stage.
    micro_batch: int  #: 0 for the parts that run once a step.
    label: str  #: "F2"; "1F2" where the device runs several stages; "setup", "reduce".
    start_s: float
    end_s: float
    events: tuple[int, ...]  #: Its events, as indices into `Timeline.events`.


def passes(schedule: Schedule, timeline: Timeline) -> tuple[Pass, ...]:
    """The passes of a step by device and start; none of a plan without stages."""
    order = schedule.order
    if order is None:
        return ()
    inside: dict[tuple[int, int, int], list[int]] = {}
    for index, event in enumerate(timeline.events):
        task = schedule.tasks[event.task]
        if task.phase == task.target_phase and event.end_s > event.start_s:
            inside.setdefault((event.device, task.phase, event.request), []).append(index)
    several = Counter(order.table.lane_of)
    lane_of = {device: lane for lane, devices in enumerate(order.lanes) for device in devices}
    boxes = []
    for (device, phase, micro_batch), indices in inside.items():
        part, stage = order.phases.of(phase)
        name = LETTERS.get(part, part.value)
        label = name if order.phases.is_once(phase) else f"{name}{micro_batch}"
        if part is not Part.DELIVER and part in LETTERS and several[lane_of[device]] > 1:
            label = f"{stage}{label}"
        span = timeline.events[indices[0]].start_s, timeline.events[indices[-1]].end_s
        boxes.append(Pass(device, part, stage, micro_batch, label, *span, tuple(indices)))
    return tuple(sorted(boxes, key=lambda box: (box.device, box.start_s, box.end_s)))


def pass_text(box: Pass) -> str:
    """A pass in words: ``"forward pass of stage 1, micro-batch 2"``."""
    if box.part in (Part.SETUP, Part.REDUCE):
        return f"{box.part}, once a step"
    if box.part is Part.DELIVER:
        return f"results of micro-batch {box.micro_batch}"
    return f"{box.part} pass of stage {box.stage}, micro-batch {box.micro_batch}"
