"""A list scheduler: any stages on any lanes, by priorities and limits of what is in flight.

Time is simulated. Whenever a lane is idle it starts the first of its actions, by priority, whose
inputs are there. Each stage runs its micro-batches in ascending order, forward and backward.

It never deadlocks, whatever the limits (of at least 1): of the oldest micro-batch that is not
done, some action can start, since no older micro-batch takes room in any stage, and the actions
of one micro-batch wait only for each other along the edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from partitioner.ir.pipeline.actions import Action, ActionKind
from partitioner.ir.pipeline.dataflow import Dataflow

_F, _B = ActionKind.FORWARD, ActionKind.FULL_BACKWARD


@dataclass(frozen=True)
class Policy:
    """The freedom of the list scheduler, beside what data flow demands."""

    trains: bool
    limits: tuple[int, ...]  #: Most micro-batches in flight, of each stage; not without training.
    forward_first: bool = False  #: A lane starts no backward pass before its last forward pass.


@dataclass
class _State:
    """The actions started so far, as the scheduler goes through time."""

    started: dict[tuple[int, ActionKind], int]  #: Next micro-batch of each stage, by kind.
    ends: dict[Action, int]
    lanes: list[list[Action]]
    free: list[int]  #: When each lane is idle again.


def list_schedule(
    lane_of: tuple[int, ...],
    micro_batches: int,
    flow: Dataflow,
    policy: Policy,
    durations: Mapping[ActionKind, int],
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each lane, in order."""
    kinds = (_F, _B) if policy.trains else (_F,)
    stages_of: list[list[int]] = [[] for _ in range(max(lane_of) + 1)]
    for stage, lane in enumerate(lane_of):
        stages_of[lane].append(stage)
    started = {(stage, kind): 0 for stage in range(len(lane_of)) for kind in kinds}
    state = _State(started, {}, [[] for _ in stages_of], [0] * len(stages_of))
    todo = len(lane_of) * micro_batches * len(kinds)
    now = 0
    while len(state.ends) < todo:
        for lane, stages in enumerate(stages_of):
            if state.free[lane] > now:
                continue
            candidates = _candidates(state, stages, micro_batches, policy)
            ready = [action for action in candidates if _ready(action, flow, state.ends, now)]
            if ready:
                action = min(ready, key=_priority)
                state.lanes[lane].append(action)
                state.started[action.stage, action.kind] += 1
                state.free[lane] = state.ends[action] = now + durations[action.kind]
        now = min(end for end in state.free if end > now)
    return tuple(map(tuple, state.lanes))


def _candidates(
    state: _State, stages: list[int], micro_batches: int, policy: Policy
) -> Iterator[Action]:
    """The next forward and backward pass of each stage of a lane, where the policy allows them."""
    forward_done = all(state.started[stage, _F] == micro_batches for stage in stages)
    for stage in stages:
        forward = state.started[stage, _F]
        backward = state.started.get((stage, _B), forward)
        room = not policy.trains or forward - backward < policy.limits[stage]
        if forward < micro_batches and room:
            yield Action(stage, _F, forward)
        if backward < forward and (forward_done or not policy.forward_first):
            yield Action(stage, _B, backward)


def _ready(action: Action, flow: Dataflow, ends: Mapping[Action, int], now: int) -> bool:
    stage, kind, m = action.stage, action.kind, action.micro_batch
    neighbours = flow.predecessors[stage] if kind is _F else flow.successors[stage]
    needs = [Action(other, kind, m) for other in neighbours]
    return all(need in ends and ends[need] <= now for need in needs)


def _priority(action: Action) -> tuple[int, int, int]:
    """The oldest micro-batch of all forward passes, else the oldest of all backward passes.

    Forward passes come first: where a limit is reached none is offered, and one backward pass
    then makes room for one forward pass. Of one micro-batch, the stage nearest to its end first.
    """
    return (action.kind is _B, action.micro_batch, -action.stage)
