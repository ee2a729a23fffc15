"""Activations that a schedule holds: a stage's, from its forward pass to its B or W."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partitioner.ir.pipeline.actions import Action, ActionKind, PipelineSchedule

_ENDS = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)


def in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Of each stage, the most micro-batches whose activations it holds at once.

    A stage that does not train holds those of the one micro-batch that it computes.
    """
    most = [0] * schedule.stages
    for lane in schedule.lanes:
        for counts, _ in _held(lane, trains=schedule.trains):
            for stage, held in counts.items():
                most[stage] = max(most[stage], held)
    return tuple(most)


def lane_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Of each lane, the most activations (of any of its stages) that it holds at once."""
    return lane_peak(schedule, [1] * schedule.stages)


def lane_peak(schedule: PipelineSchedule, bytes_by_stage: Sequence[int]) -> tuple[int, ...]:
    """Of each lane, the most bytes of activations that it holds at once.

    Args:
        schedule: The order of actions, which alone decides what is held.
        bytes_by_stage: Bytes that one micro-batch leaves in each stage for its backward pass.
    """
    return tuple(
        max(
            (
                sum(bytes_by_stage[stage] * held for stage, held in counts.items())
                for counts, _ in _held(lane, trains=schedule.trains)
            ),
            default=0,
        )
        for lane in schedule.lanes
    )


def held_together(schedule: PipelineSchedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each stage, the micro-batches whose activations it holds where its lane holds most.

    Then those of them whose input gradients are done: what was computed again for them is held for
    their weight gradients. Where a lane holds most more than once, most of these count.
    """
    together, waiting = [0] * schedule.stages, [0] * schedule.stages
    for lane in schedule.lanes:
        moments = _held(lane, trains=schedule.trains)
        most = max(moments, key=lambda both: [sum(c.values()) for c in both], default=({}, {}))
        for counts, stages in zip(most, (together, waiting), strict=True):
            for stage, held in counts.items():
                stages[stage] = held
    return tuple(together), tuple(waiting)


def _held(
    lane: Sequence[Action], *, trains: bool
) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Micro-batches held by stage, and those of which only weight gradients are due.

    After each forward pass of a lane, and after each input gradient.
    """
    counts: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for action in lane:
        stage = action.stage
        if action.kind is ActionKind.FORWARD:
            counts = {**counts, stage: counts.get(stage, 0) + 1} if trains else {stage: 1}
            yield counts, waiting
        elif action.kind is ActionKind.BACKWARD_INPUT:
            waiting = {**waiting, stage: waiting.get(stage, 0) + 1}
            yield counts, waiting
        elif action.kind in _ENDS:
            counts = {**counts, stage: counts[stage] - 1}
            if action.kind is ActionKind.BACKWARD_WEIGHT:
                waiting = {**waiting, stage: waiting[stage] - 1}
