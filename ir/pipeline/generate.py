"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Literal, get_args

from partitioner.ir.pipeline.actions import (
    UNIT_DURATIONS,
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)
from partitioner.ir.pipeline.check import check_lanes
from partitioner.ir.pipeline.dataflow import Dataflow, Edge, dataflow
from partitioner.ir.pipeline.list_scheduler import Policy, list_schedule
from partitioner.ir.pipeline.textbook import dualpipev, interleaved, rounds, zbv, zero_bubble


def pipeline_schedule(
    name: str,
    lane_of: Sequence[int],
    micro_batches: int,
    edges: Iterable[Edge] | None = None,
    durations: Mapping[ActionKind, int] = UNIT_DURATIONS,
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
        durations: Time units of each kind that computes, which gpipe, 1f1b and forward go by.

    Raises:
        PipelineScheduleError: The schedule does not serve these lanes or micro-batches.
    """
    if name not in SCHEDULES:
        raise PipelineScheduleError(f"unknown schedule {name!r}: there are {', '.join(SCHEDULES)}")
    lanes = tuple(lane_of)
    check_lanes(lanes, micro_batches)
    flow = dataflow(len(lanes), edges)
    if name in _POLICIES:
        policy = _POLICIES[name](lanes, micro_batches, flow)
        order = list_schedule(lanes, micro_batches, flow, policy, durations)
    else:
        order = _TEXTBOOK[name](lanes, micro_batches)
    return PipelineSchedule(name, lanes, micro_batches, order)


def textbook_lanes(name: str, stages: int) -> tuple[int, ...]:
    """The lanes that a schedule is published for.

    One lane a stage, but two stages a lane for interleaved (stage s on lane s mod L of L lanes),
    and for zbv and dualpipev (down to the last lane and back up).

    Raises:
        PipelineScheduleError: Two stages a lane, and an odd number of stages.
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
