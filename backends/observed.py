"""The events that ranks recorded in measured steps, and the figures of each task over the steps.

All times of a step are on one clock, that of rank 0 (see `process_group.clock_offset`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, TypeAlias

#: Steps that are recorded unless the user says otherwise.
STEPS = 10


class Role(StrEnum):
    """A rank's part in an event."""

    COMPUTE = "compute"
    SEND = "send"  #: It hands over its parts of a communication.
    RECEIVE = "receive"  #: It waits for the other ranks' parts.


@dataclass(frozen=True)
class Event:
    """A span of time in which a rank was busy with one thing."""

    #: The plan's nodes that one kernel computed, several if it is fused; none of a communication,
    #: and of a kernel that no node asked for.
    nodes: tuple[str, ...]
    #: Positions in the global order of the communications that went together.
    comms: tuple[int, ...]
    label: str  #: Name of the kernel or collective in its runtime.
    role: Role  #: The rank's part.
    begin_s: float  #: Seconds on the ranks' clock.
    end_s: float  #: The same of the end.
    micro_batch: int = 0  #: In stages, the micro-batch that it is of.

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Event:
        """An event from its JSON form."""
        parts = {name: tuple(data[name]) for name in ("nodes", "comms")}
        return cls(**{**data, **parts, "role": Role(data["role"])})


#: The events of one task: its nodes, its communications and its label.
Key: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], str]


@dataclass(frozen=True)
class Step:
    """A step on one rank: one request, or one forward and backward pass."""

    begin_s: float
    end_s: float
    events: tuple[Event, ...]


@dataclass(frozen=True)
class RankLog:
    """The records of one rank."""

    backend: str  #: Name of the runtime, with its version: "onnxruntime 1.31.0".
    threads: int  #: Threads of one operator.
    steps: tuple[Step, ...]  #: The recorded steps.
    unrecorded_s: tuple[float, ...]  #: Seconds of steps of the slowest rank without any recording.
    peak_bytes: int | None  #: Most bytes that the rank held; None if they were not measured.
    #: Name of the GPU that it ran on, as the driver reports it; "" for the processor.
    gpu: str = ""

    @classmethod
    def load(cls, path: Path) -> RankLog:
        """Read the fields of one, written as JSON."""
        data = json.loads(path.read_text())
        steps = tuple(
            Step(step["begin_s"], step["end_s"], tuple(map(Event.of, step["events"])))
            for step in data["steps"]
        )
        unrecorded_s = tuple(data["unrecorded_s"])
        head = data["backend"], data["threads"]
        return cls(*head, steps, unrecorded_s, data["peak_bytes"], data["gpu"])

    def shifted(self, offset_s: float) -> RankLog:
        """The same on a clock that is `offset_s` behind."""

        def moved(step: Step) -> Step:
            events = tuple(
                replace(event, begin_s=event.begin_s - offset_s, end_s=event.end_s - offset_s)
                for event in step.events
            )
            return Step(step.begin_s - offset_s, step.end_s - offset_s, events)

        return replace(self, steps=tuple(map(moved, self.steps)))


@dataclass(frozen=True)
class MeasuredTask:
    """A task on one rank, over all recorded steps; in stages, of all micro-batches together."""

    nodes: tuple[str, ...]  #: As of an `Event`.
    comms: tuple[int, ...]  #: As of an `Event`.
    label: str  #: As of an `Event`.
    #: Median of the start of its longest event, from the begin of the step; the waiting comes
    #: first.
    start_s: float
    seconds: float  #: Median of its busy seconds, without the waiting for other ranks.
    waited_s: float = 0.0  #: Median of the seconds in which it waited for other ranks to begin.
    #: Half the distance of the quartiles of `seconds`, as a share of the median.
    spread: float = 0.0


@dataclass(frozen=True)
class MeasuredRank:
    """The tasks of one rank in order of their start, and the most bytes that it held."""

    peak_bytes: int | None
    tasks: tuple[MeasuredTask, ...]


def recorded_step_s(logs: Sequence[RankLog]) -> float:
    """Median seconds of a recorded step, from the first rank's begin to the last rank's end."""
    steps = zip(*(log.steps for log in logs), strict=True)
    seconds: float = statistics.median(
        max(step.end_s for step in ranks) - min(step.begin_s for step in ranks) for ranks in steps
    )
    return seconds


def measured_ranks(logs: Sequence[RankLog]) -> tuple[MeasuredRank, ...]:
    """The figures of every task on every rank, of the logs of all ranks in order."""
    runs: list[dict[Key, list[_Run]]] = [{} for _ in logs]
    for ranks in zip(*(log.steps for log in logs), strict=True):
        zero = min(step.begin_s for step in ranks)
        begun: dict[_Sent, float] = {}  # when the last of the ranks that send began each
        for event in (event for step in ranks for event in step.events):
            if event.comms and event.role is Role.SEND:
                sent = event.comms, event.micro_batch
                begun[sent] = max(begun.get(sent, event.begin_s), event.begin_s)
        for rank, step in enumerate(ranks):
            for key, run in _runs(step, zero, begun).items():
                runs[rank].setdefault(key, []).append(run)
    return tuple(
        MeasuredRank(
            log.peak_bytes,
            tuple(sorted(map(_task, by_key, by_key.values()), key=attrgetter("start_s"))),
        )
        for log, by_key in zip(logs, runs, strict=True)
    )


@dataclass(frozen=True)
class _Run:
    """A task in one step."""

    start_s: float  #: Start of its longest event.
    seconds: float  #: Of all its events, without the waiting.
    waited_s: float  #: Of the waiting.


#: Communications that go together, of a micro-batch.
_Sent: TypeAlias = tuple[tuple[int, ...], int]


def _runs(step: Step, zero: float, begun: Mapping[_Sent, float]) -> dict[Key, _Run]:
    events: dict[Key, list[tuple[float, float, float]]] = {}  # seconds, of waiting, begin
    for event in step.events:
        waited_s = 0.0
        if event.role is Role.RECEIVE:
            sent = event.comms, event.micro_batch
            until = min(event.end_s, begun.get(sent, event.begin_s))
            waited_s = max(0.0, until - event.begin_s)
        of_task = events.setdefault((event.nodes, event.comms, event.label), [])
        of_task.append((event.end_s - event.begin_s, waited_s, event.begin_s - zero))
    return {
        key: _Run(
            max(of_task, key=itemgetter(0))[2],
            sum(whole_s - waited_s for whole_s, waited_s, _ in of_task),
            sum(waited_s for _, waited_s, _ in of_task),
        )
        for key, of_task in events.items()
    }


def _task(key: Key, runs: Sequence[_Run]) -> MeasuredTask:
    seconds = [run.seconds for run in runs]
    median, spread = statistics.median(seconds), 0.0
    if len(seconds) > 1 and median:
        low, _, high = statistics.quantiles(seconds, n=4)
        spread = (high - low) / 2 / median
    return MeasuredTask(
        *key,
        statistics.median(run.start_s for run in runs),
        median,
        statistics.median(run.waited_s for run in runs),
        spread,
    )
