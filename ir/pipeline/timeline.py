"""Execution of a schedule: each lane runs its actions in order, each as soon as it can start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from partitioner.ir.pipeline.actions import (
    UNIT_DURATIONS,
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)
from partitioner.ir.pipeline.dataflow import Dataflow, Edge, dataflow


def start_times(
    schedule: PipelineSchedule,
    edges: Iterable[Edge] | None = None,
    durations: Mapping[ActionKind, int] = UNIT_DURATIONS,
) -> tuple[tuple[int, ...], ...]:
    """Find when each action of each lane starts; communication takes no time.

    Args:
        schedule: Whose actions stand on the lanes of their stages.
        edges: Pairs of stages between which data flows forward; None: the chain.
        durations: Time units of each kind that computes.

    Raises:
        PipelineScheduleError: The lanes wait for each other, or for an action that no lane runs.
    """
    flow = dataflow(schedule.stages, edges)
    ends: dict[Action, int] = {}
    starts: list[list[int]] = [[] for _ in schedule.lanes]
    runnable = list(range(len(schedule.lanes)))
    while runnable:
        before = len(ends)
        for lane in runnable:
            _advance(schedule, lane, flow, durations, ends, starts[lane])
        runnable = [lane for lane in runnable if len(starts[lane]) < len(schedule.lanes[lane])]
        if runnable and len(ends) == before:
            raise PipelineScheduleError(_deadlock(schedule, runnable[0], flow, ends, starts))
    return tuple(tuple(lane) for lane in starts)


def makespan(
    schedule: PipelineSchedule,
    starts: tuple[tuple[int, ...], ...],
    durations: Mapping[ActionKind, int] = UNIT_DURATIONS,
) -> int:
    """Find when the last action ends, from the start times."""
    lanes = zip(schedule.lanes, starts, strict=True)
    return max(t[-1] + durations[actions[-1].kind] for actions, t in lanes if actions)


def bubble_share(
    schedule: PipelineSchedule,
    starts: tuple[tuple[int, ...], ...],
    durations: Mapping[ActionKind, int] = UNIT_DURATIONS,
) -> float:
    """The share of all lanes' time, from 0 to the last end, in which a lane is idle."""
    busy = sum(durations[action.kind] for lane in schedule.lanes for action in lane)
    return 1 - busy / (len(schedule.lanes) * makespan(schedule, starts, durations))


def _advance(
    schedule: PipelineSchedule,
    lane: int,
    flow: Dataflow,
    durations: Mapping[ActionKind, int],
    ends: dict[Action, int],
    starts: list[int],
) -> None:
    """Run a lane until its next action waits for one that has not been run."""
    actions = schedule.lanes[lane]
    free = starts[-1] + durations[actions[len(starts) - 1].kind] if starts else 0
    while len(starts) < len(actions):
        action = actions[len(starts)]
        ready = free
        for alternatives in _needs(action, flow):
            end = next((ends[need] for need in alternatives if need in ends), None)
            if end is None:
                return
            ready = max(ready, end)
        starts.append(ready)
        free = ends[action] = ready + durations[action.kind]


def _needs(action: Action, flow: Dataflow) -> Iterator[tuple[Action, ...]]:
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
    missing = next(n for n in _needs(action, flow) if not any(need in ends for need in n))
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
