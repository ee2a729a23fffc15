"""A pipeline schedule as a table: time in columns, a row a lane."""

from __future__ import annotations

from collections.abc import Iterable

from partitioner.foundations.units import share
from partitioner.ir.pipeline import (
    UNIT_DURATIONS,
    PipelineSchedule,
    bubble_share,
    in_flight,
    lane_in_flight,
    makespan,
    start_times,
)


def pipeline_table(
    schedule: PipelineSchedule, edges: Iterable[tuple[int, int]] | None = None
) -> str:
    """Draw when each lane runs what, the share of idle time, and the activations in flight.

    Communication takes no time; an action that takes two units goes on in a cell "-".
    """
    starts = start_times(schedule, edges)
    end = makespan(schedule, starts)
    stages = f"{schedule.stages} stage{'' if schedule.stages == 1 else 's'}"
    count = schedule.micro_batches
    micro_batches = f"{count} micro-batch{'' if count == 1 else 'es'}"
    rows = [["time", *map(str, range(end))]]
    for lane, (actions, times) in enumerate(zip(schedule.lanes, starts, strict=True)):
        cells = ["."] * end
        for action, start in zip(actions, times, strict=True):
            stop = start + UNIT_DURATIONS[action.kind]
            cells[start:stop] = [str(action), *"-" * (stop - start - 1)]
        rows.append([f"lane {lane}", *cells])
    units = ", ".join(f"{kind} {units}" for kind, units in UNIT_DURATIONS.items())
    held, lanes = in_flight(schedule), ",".join(map(str, schedule.lane_of))
    by_lane = ",".join(map(str, lane_in_flight(schedule)))
    lines = [
        f"{schedule.name}: {stages} on lanes {lanes}, {micro_batches}",
        f"{end} time units ({units}), {share(bubble_share(schedule, starts))} bubbles",
        "",
        *_aligned(rows),
        "",
        "micro-batches in flight",
        *_aligned([["stage", *map(str, range(len(held)))], ["most", *map(str, held)]]),
        f"stage activations held at once, by lane: {by_lane}",
    ]
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    """Rows with a first column flush left, and the others in columns of equal width."""
    first = max(len(row[0]) for row in rows)
    width = max(len(cell) for row in rows for cell in row[1:])
    return [
        f"{row[0]:{first}}  {' '.join(f'{cell:{width}}' for cell in row[1:])}".rstrip()
        for row in rows
    ]
