"""The command on pipeline schedules: `partition schedule NAME|FILE`."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import typer

from partitioner.cli.options import count, listed, wrong
from partitioner.foundations import units
from partitioner.foundations.files import read_text
from partitioner.ir.pipeline.actions import UNIT_DURATIONS, PipelineSchedule, PipelineScheduleError
from partitioner.ir.pipeline.generate import SCHEDULES, pipeline_schedule, textbook_lanes
from partitioner.ir.pipeline.text import from_csv, to_csv
from partitioner.ir.pipeline.timeline import (
    bubble_share,
    check,
    in_flight,
    lane_in_flight,
    makespan,
    start_times,
)
from partitioner.report.text.tables import safe

_MOST_CHARACTERS = 2**26  #: Of a file; a table of 1,000 lanes and micro-batches has some 2**24.


def _edges(text: str) -> list[tuple[int, int]]:
    """The pairs of ``0-1,1-2``; none of the empty text."""
    pairs = [re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", part) for part in text.split(",")]
    if text and not all(pairs):
        wrong(f"{text!r} are no edges like 0-1,1-2")
    return [(int(pair[1]), int(pair[2])) for pair in pairs if pair]


def _lanes(text: str) -> tuple[int, ...]:
    return tuple(count(part, text, least=0) for part in text.split(","))


def schedule(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE", help=f"{', '.join(SCHEDULES)}; or a CSV file of PyTorch's."
        ),
    ],
    stages: Annotated[int | None, listed("schedule", "stages")] = None,
    micro_batches: Annotated[int | None, listed("schedule", "micro_batches")] = None,
    lanes: Annotated[Any, listed("schedule", "lanes", _lanes)] = None,
    edges: Annotated[Any, listed("schedule", "edges", _edges)] = None,
    form: Annotated[Literal["table", "csv"], listed("schedule", "form")] = "table",
) -> int:
    """Print and check a pipeline schedule, by name or from a file."""
    args = SimpleNamespace(**locals())
    if source not in SCHEDULES:
        table = _read(args)
    elif micro_batches is None or (stages is None and lanes is None):
        wrong(f"{source} needs --micro-batches, and --stages or --lanes")
    else:
        lanes = lanes or textbook_lanes(args.source, args.stages)
        if stages not in (None, len(lanes)):
            wrong(f"--lanes has lanes of {len(lanes)} stages, but --stages is {stages}")
        table = pipeline_schedule(args.source, lanes, micro_batches, edges)
    check(table, edges)
    if form == "csv":
        print(to_csv(table), end="")
        return 0
    print(safe(_pipeline_table(table, edges)))
    return 0


def _read(args: SimpleNamespace) -> PipelineSchedule:
    path = Path(args.source)
    if not path.exists():
        raise PipelineScheduleError(
            f"{args.source!r} is no file and no schedule: there are {', '.join(SCHEDULES)}"
        )
    for name in ("stages", "micro_batches", "lanes"):
        if getattr(args, name) is not None:
            wrong(f"--{name.replace('_', '-')} is of a NAME: {args.source} is a file")
    try:
        text = read_text(path)
    except UnicodeError:
        raise PipelineScheduleError(f"cannot read {path}: it is not UTF-8 text") from None
    except OSError as error:
        raise PipelineScheduleError(f"cannot read {path}: {error.strerror or error}") from None
    if len(text) > _MOST_CHARACTERS:
        raise PipelineScheduleError(f"{path} has more than {_MOST_CHARACTERS} characters")
    try:
        return from_csv(text, path.stem)
    except PipelineScheduleError as error:
        raise PipelineScheduleError(f"{path}: {error}") from None


def _pipeline_table(schedule: PipelineSchedule, edges: list[tuple[int, int]] | None) -> str:
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
    durations = ", ".join(f"{kind} {each}" for kind, each in UNIT_DURATIONS.items())
    held, lanes = in_flight(schedule), ",".join(map(str, schedule.lane_of))
    by_lane = ",".join(map(str, lane_in_flight(schedule)))
    lines = [
        f"{schedule.name}: {stages} on lanes {lanes}, {micro_batches}",
        f"{end} time units ({durations}), {units.share(bubble_share(schedule, starts))} bubbles",
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
