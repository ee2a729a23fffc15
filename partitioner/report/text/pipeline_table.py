"""A pipeline schedule as a table: time in columns, a row a lane."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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

    Args:
        schedule: One that `check` accepts with these edges.
        edges: Pairs of stages between which data flows forward; None: the chain.
    """
    starts = start_times(schedule, edges)
    end = makespan(schedule, starts)
    stages = _count(schedule.stages, "stage")
    micro_batches = _count(schedule.micro_batches, "micro-batch", "micro-batches")
    units = ", ".join(f"{kind} {units}" for kind, units in UNIT_DURATIONS.items())
    held = in_flight(schedule)
    lines = [
        f"{schedule.name}: {stages} on lanes {_listed(schedule.lane_of)}, {micro_batches}",
        f"{end} time units ({units}), {share(bubble_share(schedule, starts))} bubbles",
        "",
        *_aligned([["time", *map(str, range(end))], *_rows(schedule, starts, end)]),
        "",
        "micro-batches in flight",
        *_aligned([["stage", *map(str, range(len(held)))], ["most", *map(str, held)]]),
        f"stage activations held at once, by lane: {_listed(lane_in_flight(schedule))}",
    ]
    return "\n".join(lines)


def _rows(
    schedule: PipelineSchedule, starts: tuple[tuple[int, ...], ...], end: int
) -> Iterator[list[str]]:
    for lane, (actions, times) in enumerate(zip(schedule.lanes, starts, strict=True)):
        cells = ["."] * end
        for action, start in zip(actions, times, strict=True):
            stop = start + UNIT_DURATIONS[action.kind]
            cells[start:stop] = [str(action), *"-" * (stop - start - 1)]
        yield [f"lane {lane}", *cells]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Rows with a first column flush left, and the others in columns of equal width."""
    first = max(len(row[0]) for row in rows)
    width = max(len(cell) for row in rows for cell in row[1:])
    return [
        f"{row[0]:{first}}  {' '.join(f'{cell:{width}}' for cell in row[1:])}".rstrip()
        for row in rows
    ]


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
