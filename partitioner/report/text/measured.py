"""Predicted beside measured, as text: the step, each rank, and the tasks with the worst errors."""

from __future__ import annotations

from collections.abc import Iterator

from partitioner.foundations import units
from partitioner.report.measured import Comparison
from partitioner.report.planned import Planned
from partitioner.report.schema import MeasuredRankRow
from partitioner.report.text.show import clean
from partitioner.report.text.tables import table

#: Tasks in the table of the worst errors.
WORST = 10
#: Longest name of a task in that table.
_WIDTH = 60


def measured_text(comparison: Comparison[Planned]) -> str:
    """A plan's prediction beside a measured run of it."""
    ranks = [_rank(rank, totals) for rank, totals in enumerate(comparison.totals)]
    head = ("rank", "compute", "communication", "waiting", "layouts", "peak memory")
    worst = []
    for row in comparison.worst[:WORST]:
        name = clean(row.name)
        of = (
            name if len(name) <= _WIDTH else f"{name[: _WIDTH - 3]}...",
            str(row.rank),
            units.seconds(row.predicted_s),
            units.seconds(row.measured.seconds),
            "-" if row.ratio is None else units.digits(row.ratio),
        )
        worst.append(of)
    parts = [list(_head(comparison)), table([head, *ranks])]
    if worst:
        parts.append(table([("worst errors", "rank", "predicted", "measured", "ratio"), *worst]))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(comparison: Comparison[Planned]) -> Iterator[str]:
    measured = comparison.measured
    threads = f"{units.count(measured.threads, 'thread')} a rank"
    date = measured.measured_at.replace("T", " ").removesuffix("+00:00")
    yield f"measured by {measured.backend}, {threads}, {measured.steps} steps, {date} UTC"
    yield f"  on         {clean(measured.device)}"
    predicted_s = comparison.predicted.latency_s
    step = _beside(predicted_s, measured.step_s)
    recorded = units.seconds(measured.recorded_step_s)
    yield f"  one step   {step} (with the recording: {recorded})"
    if measured.stream_s is not None:
        yield f"  a stream   {_beside(comparison.result.evaluation.step_s, measured.stream_s)}"


def _beside(predicted_s: float, measured_s: float) -> str:
    ratio = f": {units.digits(measured_s / predicted_s)} times that" if predicted_s else ""
    return f"predicted {units.seconds(predicted_s)}, measured {units.seconds(measured_s)}{ratio}"


def _rank(rank: int, totals: MeasuredRankRow) -> tuple[str, ...]:
    peak = "not measured" if totals["peak_bytes"] is None else units.size(totals["peak_bytes"])
    return (
        str(rank),
        _pair(totals["predicted_compute_s"], totals["compute_s"]),
        _pair(totals["predicted_comm_s"], totals["comm_s"]),
        units.seconds(totals["waited_s"]),
        units.seconds(totals["other_s"]),
        f"{units.size(totals['predicted_peak_bytes'])} -> {peak}",
    )


def _pair(predicted_s: float, measured_s: float) -> str:
    return f"{units.seconds(predicted_s)} -> {units.seconds(measured_s)}"
