"""Schedules by name.

Those of any stages on any lanes are made by priorities and limits of what is in flight. Time is
simulated: whenever a lane is idle it starts the first of its actions, by priority, whose inputs are
there. Each stage runs its micro-batches in ascending order, forward and backward.

This never deadlocks, whatever the limits (of at least 1): of the oldest micro-batch that is not
done, some action can start, since no older micro-batch takes room in any stage, and the actions
of one micro-batch wait only for each other along the edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

from partitioner.ir.pipeline.actions import (
    UNIT_DURATIONS,
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)
from partitioner.ir.pipeline.textbook import dualpipev, interleaved, rounds, zbv, zero_bubble
from partitioner.ir.pipeline.timeline import Dataflow, Edge, check_lanes, dataflow, needs


def pipeline_schedule(
    name: str,
    lane_of: Sequence[int],
    micro_batches: int,
    edges: Iterable[Edge] | None = None,
) -> PipelineSchedule:
    """The schedule of that name.

    ``gpipe``, ``1f1b`` and ``forward`` serve any lanes and edges. On one lane a stage they are the
    orders of torch.distributed.pipelining, except that 1f1b also serves fewer micro-batches than
    stages, which PyTorch refuses. The others have a fixed order for a chain of stages:
    interleaved and zb1 with stage s on lane s mod L of L lanes, zbv and dualpipev with stages r
    and 2 L - 1 - r on lane r. Any edges fit them, since a chain orders all its stages. Their
    orders are PyTorch's (zb1's that of ScheduleInterleavedZeroBubble), with three differences: of
    one stage a lane, interleaved is refused (PyTorch runs ahead twice as far as 1F1B, for
    nothing) and zb1 serves any number of micro-batches; and a forward and a backward pass that
    DualPipeV overlaps are two actions, the forward pass first.

    Args:
        name: One of `SCHEDULES`.
        lane_of: Lane of each stage; all of 0, 1, ... up to the largest occur.
        micro_batches: At least 1.
        edges: Pairs of stages between which data flows forward; None: the chain.
    """
    if name not in SCHEDULES:
        raise PipelineScheduleError(f"unknown schedule {name!r}: there are {', '.join(SCHEDULES)}")
    lanes = tuple(lane_of)
    check_lanes(lanes, micro_batches)
    flow = dataflow(len(lanes), edges)
    if name in _POLICIES:
        policy = _POLICIES[name](lanes, micro_batches, flow)
        order = _list_schedule(lanes, micro_batches, flow, policy)
    else:
        order = _TEXTBOOK[name](lanes, micro_batches)
    return PipelineSchedule(name, lanes, micro_batches, order)


def textbook_lanes(name: str, stages: int) -> tuple[int, ...]:
    """The lanes that a schedule is published for.

    One lane a stage, but two stages a lane for interleaved (stage s on lane s mod L of L lanes),
    and for zbv and dualpipev (down to the last lane and back up).
    """
    if name not in _LOOPED and name not in _VEE:
        return tuple(range(stages))
    if stages % 2:
        raise PipelineScheduleError(
            f"{name}: {stages} stages do not fill lanes of two stages; name the lanes, or take "
            f"{stages - 1} or {stages + 1} stages"
        )
    half = range(stages // 2)
    return (*half, *(reversed(half) if name in _VEE else half))


_LOOPED = ("interleaved",)
_VEE = ("zbv", "dualpipev")
Order = tuple[tuple[Action, ...], ...]


_F, _B = ActionKind.FORWARD, ActionKind.FULL_BACKWARD


@dataclass(frozen=True)
class Policy:
    """The freedom of the list scheduler, beside what data flow demands."""

    trains: bool
    limits: tuple[int, ...]  #: Most micro-batches in flight, of each stage; not without training.
    forward_first: bool = False  #: A lane starts no backward pass before its last forward pass.


def _list_schedule(
    lane_of: tuple[int, ...], micro_batches: int, flow: Dataflow, policy: Policy
) -> Order:
    """The actions of each lane, in order.

    Forward passes come first: where a limit is reached none is offered, and one backward pass then
    makes room for one forward pass. Of these the oldest micro-batch, and of one micro-batch the
    stage nearest to its end.
    """
    stages_of = [
        [s for s, of in enumerate(lane_of) if of == lane] for lane in range(max(lane_of) + 1)
    ]
    started = dict.fromkeys(((s, kind) for s in range(len(lane_of)) for kind in (_F, _B)), 0)
    ends: dict[Action, int] = {}
    lanes: list[list[Action]] = [[] for _ in stages_of]
    free = [0] * len(stages_of)  # when each lane is idle again
    todo = len(lane_of) * micro_batches * (2 if policy.trains else 1)
    now = 0

    def may_start(action: Action) -> bool:
        stage, kind, _ = action
        forward, backward = started[stage, _F], started[stage, _B]
        if kind is _F:
            room = not policy.trains or forward - backward < policy.limits[stage]
            allowed = forward < micro_batches and room
        else:
            done = all(started[s, _F] == micro_batches for s in stages_of[lane_of[stage]])
            allowed = policy.trains and backward < forward and (done or not policy.forward_first)
        return allowed and all(
            any(need in ends and ends[need] <= now for need in alternatives)
            for alternatives in needs(action, flow)
        )

    while len(ends) < todo:
        for lane, stages in enumerate(stages_of):
            following = (Action(s, kind, started[s, kind]) for s in stages for kind in (_F, _B))
            ready = filter(may_start, following) if free[lane] <= now else ()
            action = min(ready, key=lambda a: (a.kind is _B, a.micro_batch, -a.stage), default=None)
            if action is not None:
                lanes[lane].append(action)
                started[action.stage, action.kind] += 1
                free[lane] = ends[action] = now + UNIT_DURATIONS[action.kind]
        now = min(end for end in free if end > now)
    return tuple(map(tuple, lanes))


def _one_f_one_b(lane_of: tuple[int, ...], _: int, flow: Dataflow) -> Policy:
    """A stage holds as many micro-batches as the longest way to an end has lanes in turn."""
    limits = [1] * len(lane_of)
    for stage in reversed(range(len(lane_of))):
        for after in flow.successors[stage]:
            hop = lane_of[after] != lane_of[stage]
            limits[stage] = max(limits[stage], limits[after] + hop)
    return Policy(True, tuple(limits))


_POLICIES: Mapping[str, Callable[[tuple[int, ...], int, Dataflow], Policy]] = {
    "gpipe": lambda lanes, count, _: Policy(True, (count,) * len(lanes), forward_first=True),
    "1f1b": _one_f_one_b,
    "forward": lambda lanes, count, _: Policy(False, (count,) * len(lanes)),
}


def _interleaved(lane_of: tuple[int, ...], micro_batches: int) -> Order:
    lanes, chunks = _looped("interleaved", lane_of)
    if chunks == 1:
        raise PipelineScheduleError(
            f"interleaved: one stage a lane (lanes {_text(lane_of)}) has nothing to interleave; "
            "take 1f1b, or two stages a lane or more"
        )
    _check_rounds("interleaved", lanes, micro_batches)
    return interleaved(lanes, chunks, micro_batches)


def _zero_bubble(lane_of: tuple[int, ...], micro_batches: int) -> Order:
    lanes, chunks = _looped("zb1", lane_of)
    if chunks > 1:
        _check_rounds("zb1", lanes, micro_batches)
    return zero_bubble(lanes, chunks, micro_batches)


def _dualpipev(lane_of: tuple[int, ...], micro_batches: int) -> Order:
    lanes = _vee("dualpipev", lane_of)
    if micro_batches < 2 * lanes:
        raise PipelineScheduleError(
            f"dualpipev: {micro_batches} micro-batches for {2 * lanes} stages; "
            "it needs at least as many micro-batches as stages"
        )
    return dualpipev(lanes, micro_batches)


_TEXTBOOK: Mapping[str, Callable[[tuple[int, ...], int], Order]] = {
    "interleaved": _interleaved,
    "zb1": _zero_bubble,
    "zbv": lambda lane_of, micro_batches: zbv(_vee("zbv", lane_of), micro_batches),
    "dualpipev": _dualpipev,
}

#: Names of all schedules; forward is of inference, the others train.
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb1", "zbv", "dualpipev", "forward"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def _looped(name: str, lane_of: tuple[int, ...]) -> tuple[int, int]:
    """Lanes and stages a lane, of stage s on lane s mod lanes."""
    lanes = max(lane_of) + 1
    chunks = len(lane_of) // lanes
    wanted = tuple(range(lanes)) * max(1, chunks)
    if lane_of != wanted:
        raise PipelineScheduleError(
            f"{name}: lanes {_text(lane_of)} of {len(lane_of)} stages; "
            f"it needs the same number of stages on each lane in turn, like {_text(wanted)}"
        )
    return lanes, chunks


def _vee(name: str, lane_of: tuple[int, ...]) -> int:
    """Lanes, of stages r and 2 lanes - 1 - r on lane r."""
    lanes = max(lane_of) + 1
    wanted = (*range(lanes), *reversed(range(lanes)))
    if lane_of != wanted:
        raise PipelineScheduleError(
            f"{name}: lanes {_text(lane_of)} of {len(lane_of)} stages; "
            f"it needs two stages on each lane, down and back up, like {_text(wanted)}"
        )
    return lanes


def _check_rounds(name: str, lanes: int, micro_batches: int) -> None:
    def fits(number: int) -> bool:
        return number % rounds(lanes, number) == 0

    if not fits(micro_batches):
        below = next(n for n in range(micro_batches, 0, -1) if fits(n))
        above = next(n for n in count(micro_batches) if fits(n))
        raise PipelineScheduleError(
            f"{name}: {micro_batches} micro-batches are not {rounds(lanes, micro_batches)} equal "
            f"rounds on {lanes} lanes; take {below} or {above} micro-batches"
        )


def _text(lane_of: Iterable[int]) -> str:
    return ",".join(map(str, lane_of))
