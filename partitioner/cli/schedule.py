"""The command on pipeline schedules: `partition schedule NAME|FILE`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from partitioner.cli.options import Parser, command, count, positive, safe
from partitioner.ir.pipeline import (
    SCHEDULES,
    PipelineSchedule,
    PipelineScheduleError,
    check,
    from_csv,
    pipeline_schedule,
    textbook_lanes,
    to_csv,
)

_MOST_CHARACTERS = 2**26  #: Of a file; a table of 1,000 lanes and micro-batches has some 2**24.


def schedule_command(argv: Sequence[str]) -> int:
    """Make a pipeline schedule, or read one, check it and print it."""
    parser = command("schedule", "A pipeline schedule by name, or one in a file, checked.")
    add = parser.add_argument
    add("source", metavar="NAME|FILE", help=f"{', '.join(SCHEDULES)}; or a CSV file of PyTorch's")
    add("--stages", type=positive, metavar="S", help="of NAME: number of stages")
    add("--micro-batches", type=positive, metavar="M", help="of NAME: number of micro-batches")
    add(
        "--lanes",
        type=_lanes,
        metavar="0,1,0",
        help="of NAME: lane of each stage (default: those that the schedule is published for)",
    )
    add(
        "--edges",
        type=_edges,
        metavar="0-1,1-2,0-2",
        help="stages between which data flows forward (default: the chain of all stages)",
    )
    add("--format", choices=("table", "csv"), default="table", help="default: table")
    args = parser.parse_args(argv)
    schedule = _made(parser, args) if args.source in SCHEDULES else _read(parser, args)
    check(schedule, args.edges)
    if args.format == "csv":
        print(to_csv(schedule), end="")
        return 0
    from partitioner.report.text.pipeline_table import pipeline_table

    print(safe(pipeline_table(schedule, args.edges)))
    return 0


def _made(parser: Parser, args: argparse.Namespace) -> PipelineSchedule:
    if args.micro_batches is None or (args.stages is None and args.lanes is None):
        parser.error(f"{args.source} needs --micro-batches, and --stages or --lanes")
    lanes = args.lanes or textbook_lanes(args.source, args.stages)
    if args.stages not in (None, len(lanes)):
        parser.error(f"--lanes has lanes of {len(lanes)} stages, but --stages is {args.stages}")
    return pipeline_schedule(args.source, lanes, args.micro_batches, args.edges)


def _read(parser: Parser, args: argparse.Namespace) -> PipelineSchedule:
    path = Path(args.source)
    if not path.exists():
        raise PipelineScheduleError(
            f"{args.source!r} is no file and no schedule: there are {', '.join(SCHEDULES)}"
        )
    for option in ("stages", "micro_batches", "lanes"):
        if getattr(args, option) is not None:
            parser.error(f"--{option.replace('_', '-')} is of a NAME: {args.source} is a file")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read(_MOST_CHARACTERS + 1)
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


def _lanes(text: str) -> tuple[int, ...]:
    """The lanes of ``0,1,0``."""
    return tuple(count(part, text, least=0) for part in text.split(","))


def _edges(text: str) -> list[tuple[int, int]]:
    """The pairs of ``0-1,1-2``; none of the empty text."""
    pairs = [re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", part) for part in text.split(",")]
    if text and not all(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} are no edges like 0-1,1-2")
    return [(int(pair[1]), int(pair[2])) for pair in pairs if pair]
