"""The referee of schedules: complete, on the right lanes, in order, and free of deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from partitioner.ir.pipeline.actions import (
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)
from partitioner.ir.pipeline.timeline import Edge, start_times

_F, _B = ActionKind.FORWARD, ActionKind.FULL_BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def check(schedule: PipelineSchedule, edges: Iterable[Edge] | None = None) -> None:
    """Refuse a schedule that cannot run.

    Each stage runs each micro-batch forward once, on its own lane and in ascending order (a
    buffer like a running mean sees the micro-batches in that order). If there is a backward pass
    at all, each stage runs each micro-batch backward once, whole or as I and later W. Executing
    the lanes proves that no action waits for ever: F waits for F of all stages before it, B and I
    wait for F of the stage and for B or I of all stages after it.

    Args:
        edges: Pairs of stages between which data flows forward; None: the chain.

    Raises:
        PipelineScheduleError: The first fault, with its lane and action.
    """
    check_lanes(schedule.lane_of, schedule.micro_batches)
    if len(schedule.lanes) != max(schedule.lane_of) + 1:
        raise PipelineScheduleError(
            f"{len(schedule.lanes)} rows of actions for {max(schedule.lane_of) + 1} lanes"
        )
    for lane, actions in enumerate(schedule.lanes):
        _check_lane(schedule, lane, actions)
    _check_complete(schedule)
    start_times(schedule, edges)


def check_lanes(lane_of: tuple[int, ...], micro_batches: int) -> None:
    """Refuse no stage, a lane without one, or no micro-batch, by a PipelineScheduleError."""
    if not lane_of:
        raise PipelineScheduleError("a schedule has at least one stage")
    if micro_batches < 1:
        raise PipelineScheduleError(
            f"{micro_batches} micro-batches: a schedule has at least one micro-batch"
        )
    used = set(lane_of)
    if min(used) < 0:
        raise PipelineScheduleError(f"lane {min(used)}: lanes count from 0")
    if len(used) != max(used) + 1:
        empty = next(lane for lane in range(max(used)) if lane not in used)
        raise PipelineScheduleError(
            f"lane {empty} runs no stage: lanes of the stages are {','.join(map(str, lane_of))}, "
            f"and all of 0..{max(used)} must be among them"
        )


def _check_lane(schedule: PipelineSchedule, lane: int, actions: tuple[Action, ...]) -> None:
    following = dict.fromkeys(range(schedule.stages), 0)
    for action in actions:
        stage, kind, m = action.stage, action.kind, action.micro_batch
        if not kind.computes:
            raise PipelineScheduleError(
                f"lane {lane}: {action} computes nothing; a schedule holds F, B, I and W"
            )
        if not 0 <= stage < schedule.stages or not 0 <= m < schedule.micro_batches:
            raise PipelineScheduleError(
                f"lane {lane}: {action} is out of range: there are stages "
                f"0..{schedule.stages - 1} and micro-batches 0..{schedule.micro_batches - 1}"
            )
        if schedule.lane_of[stage] != lane:
            raise PipelineScheduleError(
                f"lane {lane}: {action} is of stage {stage}, "
                f"which lane {schedule.lane_of[stage]} runs"
            )
        if kind is _F and m != following[stage]:
            raise PipelineScheduleError(
                f"lane {lane}: {action} stands where {Action(stage, _F, following[stage])} "
                "is due: a stage runs its micro-batches forward once each, in ascending order"
            )
        following[stage] += kind is _F


def _check_complete(schedule: PipelineSchedule) -> None:
    counts = Counter(action for lane in schedule.lanes for action in lane)
    trains = any(action.kind is not _F for action in counts)
    for stage, lane in enumerate(schedule.lane_of):
        for m in range(schedule.micro_batches):
            forward, whole, inputs, weights = (
                counts[Action(stage, kind, m)] for kind in (_F, _B, _I, _W)
            )
            if forward != 1:
                raise PipelineScheduleError(f"lane {lane}: {Action(stage, _F, m)} is missing")
            if trains and (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                raise PipelineScheduleError(
                    f"lane {lane}: stage {stage} runs micro-batch {m} backward "
                    f"{whole} times as {Action(stage, _B, m)}, {inputs} as "
                    f"{Action(stage, _I, m)}, {weights} as {Action(stage, _W, m)}: "
                    "it must be one B, or one I and one W"
                )
