"""Micro-batches that a schedule holds: a stage's from its forward pass to its B or W."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partitioner.ir.pipeline.actions import Action, ActionKind, PipelineSchedule

_ENDS = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)


def in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count for each stage the most micro-batches whose activations it holds at once.

    A stage that does not train holds those of the one micro-batch that it computes.
    """
    return tuple(max(held) for held in zip(*_held(schedule), strict=True))


def lane_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count for each lane the most activations (of any of its stages) that it holds at once."""
    return tuple(max(map(sum, _held_by(schedule, lane))) for lane in schedule.lanes)


def _held(schedule: PipelineSchedule) -> Iterator[tuple[int, ...]]:
    for lane in schedule.lanes:
        yield from _held_by(schedule, lane)


def _held_by(schedule: PipelineSchedule, lane: Sequence[Action]) -> Iterator[tuple[int, ...]]:
    """Micro-batches of each stage that a lane holds during each of its forward passes."""
    held = [0] * schedule.stages
    for action in lane:
        if action.kind is ActionKind.FORWARD:
            held[action.stage] += 1
            yield tuple(held)
        if action.kind in _ENDS or not schedule.trains:
            held[action.stage] -= 1
