"""Activations that a schedule holds: a stage's, from its forward pass to its B or W."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from partitioner.ir.pipeline.actions import Action, ActionKind, PipelineSchedule

_ENDS = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)


class Span(IntEnum):
    """The phases between which a stage keeps a tensor of a micro-batch.

    Where backward passes are not split, all that the forward pass leaves is `TO_INPUT`.
    """

    TO_INPUT = 0  #: From the forward pass to that of input gradients.
    TO_WEIGHT = 1  #: From the forward pass to that of weight gradients.
    BETWEEN = 2  #: From input gradients to weight gradients.


@dataclass(frozen=True)
class Moment:
    """Count what a lane keeps while it runs a pass of a stage."""

    stage: int  #: The stage that runs.
    part: int  #: The pass: 0 forward, 1 backward or input gradients, 2 weight gradients.
    #: Of each stage of the lane, the micro-batches of which it keeps the tensors of each `Span`,
    #: with those that the pass makes or frees.
    held: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class LaneMoments:
    """The moments at which a lane may hold most."""

    stages: tuple[int, ...]  #: The stages of the lane, ascending.
    #: Of two at which the same pass runs, one that holds no more of any stage and span is left out.
    moments: tuple[Moment, ...]


def lane_moments(schedule: PipelineSchedule) -> tuple[LaneMoments, ...]:
    """List for each lane the moments at which it may hold most."""
    lanes = []
    for lane in range(len(schedule.lanes)):
        stages = tuple(stage for stage, of in enumerate(schedule.lane_of) if of == lane)
        most: dict[tuple[int, int], list[Moment]] = {}
        for moment in _passes(schedule, lane, stages):
            others = most.setdefault((moment.stage, moment.part), [])
            if not any(_covers(other, moment) for other in others):
                others[:] = [*(other for other in others if not _covers(moment, other)), moment]
        every = tuple(moment for each in most.values() for moment in each)
        lanes.append(LaneMoments(stages, every))
    return tuple(lanes)


def _covers(moment: Moment, other: Moment) -> bool:
    """Test whether no stage holds less of any span than at another moment."""
    pairs = zip(moment.held, other.held, strict=True)
    return all(a >= b for one, two in pairs for a, b in zip(one, two, strict=True))


def _passes(schedule: PipelineSchedule, lane: int, stages: Sequence[int]) -> Iterator[Moment]:
    """Each pass of a lane, in order."""
    counts = {stage: [0, 0, 0] for stage in stages}
    splits = schedule.splits_backward

    def moment(stage: int, part: int) -> Moment:
        return Moment(stage, part, tuple((a, b, c) for a, b, c in counts.values()))

    for action in schedule.lanes[lane]:
        stage, spans = action.stage, counts[action.stage]
        if action.kind is ActionKind.FORWARD:
            spans[Span.TO_INPUT] += 1
            spans[Span.TO_WEIGHT] += 1
            yield moment(stage, 0)
            if not schedule.trains:
                spans[:] = 0, 0, 0
        if action.kind in (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_INPUT):
            spans[Span.BETWEEN] += splits
            yield moment(stage, 1)
            spans[Span.TO_INPUT] -= 1
        if action.kind in _ENDS:
            if splits:
                yield moment(stage, 2)
            spans[Span.TO_WEIGHT] -= 1
            spans[Span.BETWEEN] -= splits


def in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count for each stage the most micro-batches whose activations it holds at once.

    A stage that does not train holds those of the one micro-batch that it computes.
    """
    most = [0] * schedule.stages
    for lane in schedule.lanes:
        for counts in _held(lane, trains=schedule.trains):
            for stage, held in counts.items():
                most[stage] = max(most[stage], held)
    return tuple(most)


def lane_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count for each lane the most activations (of any of its stages) that it holds at once."""
    return lane_peak(schedule, [1] * schedule.stages)


def lane_peak(schedule: PipelineSchedule, bytes_by_stage: Sequence[int]) -> tuple[int, ...]:
    """Count for each lane the most bytes of activations that it holds at once.

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
