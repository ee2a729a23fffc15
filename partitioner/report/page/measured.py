"""The measured run of a plan beside its prediction, as data of the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from partitioner.foundations import units
from partitioner.ir.program import Comm
from partitioner.report.measured import Comparison, Row
from partitioner.report.planned import Planned
from partitioner.report.schema import (
    MeasuredEvents,
    MeasuredRun,
    MeasuredTaskRow,
)

_COMPUTE, _COMM, _WAITING, _OTHER = range(4)

#: Rank, kind, ref, name, start and seconds of an event.
_Event: TypeAlias = tuple[int, int, int | None, str, float, float]


def measured_run(comparison: Comparison[Planned], refs: Sequence[int]) -> MeasuredRun:
    """The data of a measured run; `refs` (see `schema`) are of the tasks of the plan's schedule."""
    measured, result = comparison.measured, comparison.result
    by_name = _Refs(comparison, refs)
    seen = list(_measured(comparison, by_name))
    timeline = comparison.predicted
    planned = [
        (
            event.device,
            int(event.kind == "comm"),
            by_name.of_task(event.task),
            event.name,
            event.start_s,
            event.end_s - event.start_s,
        )
        for event in timeline.events
    ]
    return MeasuredRun(
        backend=measured.backend,
        threads=measured.threads,
        steps=measured.steps,
        measured_at=measured.measured_at,
        predicted_step_s=timeline.latency_s,
        step_s=measured.step_s,
        recorded_step_s=measured.recorded_step_s,
        predicted_stream_s=None if measured.stream_s is None else result.evaluation.step_s,
        stream_s=measured.stream_s,
        end_s=max([timeline.latency_s, *(start + seconds for *_, start, seconds in seen)]),
        predicted=_columns(planned),
        measured=_columns(seen),
        ranks=list(comparison.totals),
        tasks=[_task(row, by_name) for row in comparison.worst],
    )


class _Refs:
    """Refs of the tasks that the ranks run, of which the report knows those of the plan's cost."""

    def __init__(self, comparison: Comparison[Planned], refs: Sequence[int]) -> None:
        by_comm: dict[Comm, int] = {}
        by_node: dict[str, int] = {}
        for shown, row in zip(comparison.result.schedule.tasks, refs, strict=True):
            if shown.comm is not None:
                by_comm[shown.comm.renamed(seq=0)] = row
            elif shown.placed is not None:
                by_node[shown.placed.node.name] = row
        self._by_task: list[int | None] = []
        self.by_seq: dict[int, int | None] = {}
        self.by_node: Mapping[str, int] = by_node
        for task in comparison.schedule.tasks:
            ref = by_node.get(task.name)
            if task.comm is not None:
                ref = self.by_seq[task.comm.seq] = by_comm.get(task.comm.renamed(seq=0))
            self._by_task.append(ref)

    def of_task(self, position: int) -> int | None:
        return self._by_task[position]

    def first(self, nodes: Sequence[str], comms: Sequence[int]) -> int | None:
        refs = (*map(self.by_node.get, nodes), *map(self.by_seq.get, comms))
        return next((ref for ref in refs if ref is not None), None)


def _measured(comparison: Comparison[Planned], refs: _Refs) -> Iterable[_Event]:
    names = {(row.rank, row.nodes, row.comms): row.name for row in comparison.rows}
    for rank, measured in enumerate(comparison.measured.ranks):
        for task in measured.tasks:
            name = names.get((rank, task.nodes, task.comms), task.label)
            ref = refs.first(task.nodes, task.comms)
            kind = _COMPUTE if task.nodes else _COMM if task.comms else _OTHER
            if task.waited_s:
                yield rank, _WAITING, ref, name, task.start_s, task.waited_s
            yield rank, kind, ref, name, task.start_s + task.waited_s, task.seconds


def _columns(events: Iterable[_Event]) -> MeasuredEvents:
    columns = list(zip(*events, strict=True)) or [()] * 6
    rank, kind, ref, name, start_s, duration_s = map(list, columns)
    return MeasuredEvents(
        rank=rank,
        kind=kind,
        ref=ref,
        name=name,
        start_s=[units.short(value) for value in start_s],
        duration_s=[units.short(value) for value in duration_s],
    )


def _task(row: Row, refs: _Refs) -> MeasuredTaskRow:
    return MeasuredTaskRow(
        rank=row.rank,
        name=row.name,
        ref=refs.first(row.nodes, row.comms),
        predicted_s=units.short(row.predicted_s),
        measured_s=units.short(row.measured.seconds),
        waited_s=units.short(row.measured.waited_s),
        spread=round(row.measured.spread, 4),
    )
