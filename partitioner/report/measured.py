"""A measured run of a plan, and its prediction beside it, task by task.

The record is `measured.json` in the plan's folder: JSON with one task a line. It has nothing of the
prediction, which is computed from the plan.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from partitioner.backends.observed import (
    MeasuredRank,
    MeasuredTask,
    RankLog,
    measured_ranks,
    recorded_step_s,
)
from partitioner.cost_model.cluster.resolve import cpu_fingerprint, gpu_fingerprint, is_of_gpu
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.schedule.simulate import Timeline, simulate
from partitioner.foundations import units
from partitioner.foundations.files import ResultError
from partitioner.ir.checks import read
from partitioner.report.planned import Planned
from partitioner.report.schema import MeasuredRankRow

#: Name of the record in a plan's folder.
FILE = "measured.json"
_VERSION = 1
_NAMED = ("nodes", "comms", "label")  #: Fields of a task that are left out if empty.

PlannedT_co = TypeVar("PlannedT_co", bound=Planned, covariant=True)


@dataclass(frozen=True)
class Measured:
    """A measured run of a plan."""

    plan: str  #: Digest of the plan.
    backend: str  #: What ran it, with its version: "onnxruntime 1.31.0".
    device: str  #: Fingerprint of the device of each rank.
    threads: int  #: Threads of one operator.
    measured_at: str  #: Date and time, ISO 8601, UTC.
    steps: int
    step_s: float  #: Median seconds of a step without recording, on the slowest rank.
    recorded_step_s: float  #: Median seconds of a recorded step.
    #: Seconds between requests with several of them in flight; None if there was one.
    stream_s: float | None
    ranks: tuple[MeasuredRank, ...]  #: In order.

    @classmethod
    def of(cls, plan: str, logs: Sequence[RankLog], stream_s: float | None = None) -> Measured:
        """The record of what all ranks of a plan recorded on this machine, in order of rank."""
        first = logs[0]
        return cls(
            plan,
            first.backend,
            gpu_fingerprint(first.gpu) if first.gpu else cpu_fingerprint(),
            first.threads,
            units.now(),
            len(first.steps),
            statistics.median(first.unrecorded_s),
            recorded_step_s(logs),
            stream_s,
            measured_ranks(logs),
        )

    def is_on(self, cluster: Cluster) -> bool:
        """Tell if it ran on such devices as a plan's cluster has: those of its profile, or GPUs."""
        return all(
            is_of_gpu(self.device) and spec.is_gpu
            if spec.profile is None
            else spec.profile.device == self.device
            for spec in cluster.first_of_spec
        )

    def to_json(self) -> str:
        """The record as text, one task a line."""
        head: dict[str, Any] = {"version": _VERSION}
        for name, value in vars(self).items():
            if name != "ranks":
                head[name] = _rounded(value) if isinstance(value, float) else value
        lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        ranks = []
        for rank in self.ranks:
            rows = []
            for task in rank.tasks:
                data: dict[str, Any] = {k: v for k in _NAMED if (v := getattr(task, k))}
                data |= {"start_s": _rounded(task.start_s), "seconds": _rounded(task.seconds)}
                more = {"waited_s": _rounded(task.waited_s), "spread": round(task.spread, 4)}
                data |= {key: value for key, value in more.items() if value}
                rows.append(f"   {json.dumps(data)}")
            tasks = ",\n".join(rows)
            peak = json.dumps(rank.peak_bytes)
            ranks.append(f'  {{"peak_bytes": {peak}, "tasks": [\n{tasks}\n  ]}}')
        text = ",\n".join(ranks)
        return "\n".join(["{", *lines, f' "ranks": [\n{text}\n ]', "}", ""])

    @classmethod
    def from_json(cls, text: str) -> Measured:
        """Read what `to_json` wrote; a ResultError if it is no record, or of another version."""
        try:
            data = json.loads(text)
            version = data.pop("version")
            measured = None
            if version == _VERSION:
                for task in (task for rank in data["ranks"] for task in rank["tasks"]):
                    task.update({"nodes": [], "comms": [], **task})
                measured = read(cls, data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ResultError(f"it is no record of a run ({why[:80]})") from None
        if measured is None:
            raise ResultError(f"it has version {version!r}, not {_VERSION}")
        return measured


def _rounded(seconds: float) -> float:
    return max(0.0, round(seconds, 9))


@dataclass(frozen=True)
class Row:
    """A task on a rank: its prediction beside its measurement."""

    rank: int
    nodes: tuple[str, ...]  #: The plan's nodes that one kernel computes.
    comms: tuple[int, ...]  #: Communications that went together, as positions in the plan's run.
    name: str  #: For people: the nodes, or kind and tensor of the communication.
    #: Seconds that the plan's cost has for them on this rank; in stages, of all micro-batches
    #: together.
    predicted_s: float
    measured: MeasuredTask

    @property
    def ratio(self) -> float | None:
        """Measured seconds as a multiple of the predicted ones; None if those are 0."""
        return self.measured.seconds / self.predicted_s if self.predicted_s else None


@dataclass(frozen=True)
class Comparison(Generic[PlannedT_co]):
    """A plan's prediction beside a measured run of it."""

    result: PlannedT_co
    measured: Measured

    @cached_property
    def predicted(self) -> Timeline:
        """The predicted timeline of one step."""
        return simulate(self.result.run_schedule)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The tasks of all ranks that were both predicted and measured, in order of rank."""
        run, rows = self.result.run_schedule, list[Row]()
        by_node = {task.placed.node.name: task for task in run.tasks if task.placed is not None}
        by_seq = {task.comm.seq: task for task in run.tasks if task.comm is not None}
        for rank, measured in enumerate(self.measured.ranks):
            for task in measured.tasks:
                planned = [by_node[name] for name in task.nodes if name in by_node]
                planned += [by_seq[seq] for seq in task.comms if seq in by_seq]
                if planned:
                    seconds = sum(run.times(one) * one.devices.get(rank, 0.0) for one in planned)
                    name = " + ".join(one.name for one in planned)
                    rows.append(Row(rank, task.nodes, task.comms, name, seconds, task))
        return tuple(rows)

    @cached_property
    def worst(self) -> tuple[Row, ...]:
        """The rows by the size of their error in seconds, the largest first."""
        return tuple(
            sorted(self.rows, key=lambda row: -abs(row.measured.seconds - row.predicted_s))
        )

    @cached_property
    def totals(self) -> tuple[MeasuredRankRow, ...]:
        """The sums of every rank."""
        figures, run, totals = self.result.evaluation, self.result.run_schedule, []
        for rank, measured in enumerate(self.measured.ranks):
            held = figures.executor_peak.get(rank)  # of the executor, where that is known
            compute_s = comm_s = 0.0
            for task in run.tasks:
                seconds = run.times(task) * task.devices.get(rank, 0.0)
                if task.kind == "compute":
                    compute_s += seconds
                else:
                    comm_s += seconds
            others = [task for task in measured.tasks if not task.nodes]
            row = MeasuredRankRow(
                predicted_compute_s=compute_s,
                compute_s=sum(task.seconds for task in measured.tasks if task.nodes),
                predicted_comm_s=comm_s,
                comm_s=sum(task.seconds for task in others if task.comms),
                other_s=sum(task.seconds for task in others if not task.comms),
                waited_s=sum(task.waited_s for task in measured.tasks),
                predicted_peak_bytes=held.bytes if held else figures.held_bytes.get(rank, 0),
                peak_bytes=measured.peak_bytes,
            )
            totals.append(row)
        return tuple(totals)
