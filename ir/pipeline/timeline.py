"""Execution of a schedule: each lane runs its actions in order, each as soon as it can start.

An action waits for others, which follow from the edges between stages. The referee of schedules
(`check`) says whether they are complete, on the right lanes, in order, and free of deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.ir.pipeline.actions import (
    UNIT_DURATIONS,
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)

Edge = tuple[int, int]  #: Data flows forward from the first stage to the second, a later one.


@dataclass(frozen=True)
class Dataflow:
    """Neighbours of each stage, ascending."""

    predecessors: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]


def dataflow(stages: int, edges: Iterable[Edge] | None = None) -> Dataflow:
    """The neighbours of each stage; without `edges`, those of the chain 0-1, 1-2, ..."""
    pairs = [(i, i + 1) for i in range(stages - 1)] if edges is None else sorted(set(edges))
    for i, j in pairs:
        if not 0 <= i < j < stages:
            raise PipelineScheduleError(
                f"edge {i}-{j}: an edge leads from a stage to a later one of 0..{stages - 1}"
            )
    return Dataflow(
        tuple(tuple(i for i, j in pairs if j == stage) for stage in range(stages)),
        tuple(tuple(j for i, j in pairs if i == stage) for stage in range(stages)),
    )


def start_times(
    schedule: PipelineSchedule, edges: Iterable[Edge] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Find when each action of each lane starts, in `UNIT_DURATIONS`; communication takes no time.

    Data flows forward along the edges; None: the chain.
    """
    flow = dataflow(schedule.stages, edges)
    ends: dict[Action, int] = {}
    starts: list[list[int]] = [[] for _ in schedule.lanes]
    runnable = list(range(len(schedule.lanes)))
    while runnable:
        before = len(ends)
        for lane in runnable:
            for action in schedule.lanes[lane][len(starts[lane]) :]:
                waits = [[ends[n] for n in some if n in ends] for some in needs(action, flow)]
                if not all(waits):
                    break
                free = ends[schedule.lanes[lane][len(starts[lane]) - 1]] if starts[lane] else 0
                start = max(free, *(end for end, *_ in waits), 0)
                starts[lane].append(start)
                ends[action] = start + UNIT_DURATIONS[action.kind]
        runnable = [lane for lane in runnable if len(starts[lane]) < len(schedule.lanes[lane])]
        if runnable and len(ends) == before:
            raise PipelineScheduleError(_deadlock(schedule, runnable[0], flow, ends, starts))
    return tuple(map(tuple, starts))


def makespan(schedule: PipelineSchedule, starts: tuple[tuple[int, ...], ...]) -> int:
    """Find when the last action ends, from the start times."""
    lanes = zip(schedule.lanes, starts, strict=True)
    return max(t[-1] + UNIT_DURATIONS[actions[-1].kind] for actions, t in lanes if actions)


def bubble_share(schedule: PipelineSchedule, starts: tuple[tuple[int, ...], ...]) -> float:
    """The share of all lanes' time, from 0 to the last end, in which a lane is idle."""
    busy = sum(UNIT_DURATIONS[action.kind] for lane in schedule.lanes for action in lane)
    return 1 - busy / (len(schedule.lanes) * makespan(schedule, starts))


def needs(action: Action, flow: Dataflow) -> Iterator[tuple[Action, ...]]:
    """The actions that this one waits for; of each tuple, one is enough."""
    stage, kind, m = action.stage, action.kind, action.micro_batch
    if kind is ActionKind.FORWARD:
        for before in flow.predecessors[stage]:
            yield (Action(before, kind, m),)
        return
    if kind is ActionKind.BACKWARD_WEIGHT:
        yield (Action(stage, ActionKind.BACKWARD_INPUT, m),)
        return
    yield (Action(stage, ActionKind.FORWARD, m),)
    for after in flow.successors[stage]:
        yield (
            Action(after, ActionKind.FULL_BACKWARD, m),
            Action(after, ActionKind.BACKWARD_INPUT, m),
        )


def _deadlock(
    schedule: PipelineSchedule,
    lane: int,
    flow: Dataflow,
    ends: Mapping[Action, int],
    starts: list[list[int]],
) -> str:
    action = schedule.lanes[lane][len(starts[lane])]
    missing = next(n for n in needs(action, flow) if not any(need in ends for need in n))
    present = {a for row in schedule.lanes for a in row}
    need = next((n for n in missing if n in present), missing[0])
    if need not in present:
        return f"lane {lane}: {action} waits for {need}, which no lane runs"
    other = schedule.lane_of[need.stage]
    if other == lane:
        return f"lane {lane}: {action} waits for {need}, which stands after it"
    stuck = schedule.lanes[other][len(starts[other])]
    after = "" if stuck == need else f" after {stuck}"
    return (
        f"lane {lane}: {action} waits for {need}, which lane {other} runs{after} "
        "and cannot start: the lanes wait for each other"
    )


#: Kinds that end what a stage holds of a micro-batch from its forward pass on.
_ENDS = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)


def in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count the micro-batches that each stage holds at most: one without training."""
    held = (counts for lane in schedule.lanes for counts in _held_by(schedule, lane))
    return tuple(map(max, zip(*held, strict=True)))


def lane_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Count for each lane the most activations (of any of its stages) that it holds at once."""
    return tuple(max(map(sum, _held_by(schedule, lane))) for lane in schedule.lanes)


def _held_by(schedule: PipelineSchedule, lane: Sequence[Action]) -> Iterator[tuple[int, ...]]:
    """Micro-batches of each stage that a lane holds during each of its forward passes."""
    held = [0] * schedule.stages
    for action in lane:
        if action.kind is ActionKind.FORWARD:
            held[action.stage] += 1
            yield tuple(held)
        if action.kind in _ENDS or not schedule.trains:
            held[action.stage] -= 1


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
