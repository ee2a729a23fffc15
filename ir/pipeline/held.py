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
        for counts in _held(lane, trains=schedule.trains):
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
                for counts in _held(lane, trains=schedule.trains)
            ),
            default=0,
        )
        for lane in schedule.lanes
    )


def held_together(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Of each stage, the micro-batches whose activations it holds where its lane holds most."""
    together = [0] * schedule.stages
    for lane in schedule.lanes:
        counts = max(_held(lane, trains=schedule.trains), key=lambda c: sum(c.values()), default={})
        for stage, held in counts.items():
            together[stage] = held
    return tuple(together)


def _held(lane: Sequence[Action], *, trains: bool) -> Iterator[dict[int, int]]:
    """Micro-batches held by stage, after each forward pass of a lane."""
    counts: dict[int, int] = {}
    for action in lane:
        if action.kind is ActionKind.FORWARD:
            counts = (
                {**counts, action.stage: counts.get(action.stage, 0) + 1}
                if trains
                else {action.stage: 1}
            )
            yield counts
        elif action.kind in _ENDS:
            counts = {**counts, action.stage: counts[action.stage] - 1}
