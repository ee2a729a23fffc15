"""Schedules as CSV, in the format of torch.distributed.pipelining: a row a lane, a cell an action.

A cell is empty where the lane is idle. Tables that PyTorch has lowered are read too: sends,
receives and the rest must fit the computations, and are then dropped, since the schedule implies
them. Lines at the top that begin with "#" are ours; PyTorch does not read them.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from partitioner.ir.pipeline.actions import (
    Action,
    ActionKind,
    PipelineSchedule,
    PipelineScheduleError,
)

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})")
_OVERLAP = re.compile(r"\(([^()]*)\)" + ActionKind.OVERLAP_F_B)
_HEADER = re.compile(r"#\s*(name|lanes)\s*:\s*(.*)")
_KINDS = frozenset(kind.value for kind in ActionKind)
#: Words of a stage as a whole, without a micro-batch.
_OF_STAGE = (ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD)
_BACKWARD = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_INPUT)
_LAST = (ActionKind.FULL_BACKWARD, ActionKind.BACKWARD_WEIGHT)

_Word = tuple[int, ActionKind, int | None]  #: Stage, kind, micro-batch.


def to_csv(schedule: PipelineSchedule, *, header: bool = False) -> str:
    """The actions, a row a lane; a `header` has name and lanes, which PyTorch does not read."""
    lines = [",".join(map(str, lane)) for lane in schedule.lanes]
    if header:
        lanes = ",".join(map(str, schedule.lane_of))
        lines = [f"# name: {schedule.name}", f"# lanes: {lanes}", *lines]
    return "".join(f"{line}\n" for line in lines)


def from_csv(text: str, name: str = "csv") -> PipelineSchedule:
    """The schedule of a table; the lane of a stage is the row that its actions stand in.

    That it can run is not checked here: see `check`.

    Args:
        name: Of the schedule, if the table says none.
    """
    header, rows = _split(text)
    words = [list(_words(lane, row)) for lane, row in enumerate(rows)]
    lanes = tuple(
        tuple(Action(s, kind, m) for s, kind, m in row if kind.computes and m is not None)
        for row in words
    )
    lane_of = _lane_of(lanes)
    if "lanes" in header and header["lanes"] != ",".join(map(str, lane_of)):
        raise PipelineScheduleError(
            f"the comment says lanes {header['lanes']}, but the rows are of lanes "
            f"{','.join(map(str, lane_of))}"
        )
    for lane, row in enumerate(words):
        _check_communication(lane, row, lane_of)
    _check_pairs(words)
    micro_batches = 1 + max(action.micro_batch for lane in lanes for action in lane)
    return PipelineSchedule(header.get("name", name), lane_of, micro_batches, lanes)


def _split(text: str) -> tuple[dict[str, str], list[list[str]]]:
    """The comments at the top by name, and the cells of each row."""
    lines = text.removeprefix("\ufeff").rstrip().splitlines()
    header = {}
    while lines and lines[0].startswith("#"):
        if match := _HEADER.fullmatch(lines.pop(0)):
            header[match[1]] = match[2].strip()
    if "lanes" in header:
        header["lanes"] = header["lanes"].replace(" ", "")
    try:
        return header, list(csv.reader(lines, strict=True))
    except csv.Error as error:
        raise PipelineScheduleError(f"no CSV: {error}") from None


def _words(lane: int, row: list[str]) -> Iterator[_Word]:
    for cell in row:
        cell = cell.strip()
        overlapped = _OVERLAP.fullmatch(cell)
        parts = overlapped[1].split(";") if overlapped else [cell] if cell else []
        for part in parts:
            match = _CELL.fullmatch(part.strip())
            word = match[2] if match and match[2] in _KINDS else ActionKind.OVERLAP_F_B
            is_word = word != ActionKind.OVERLAP_F_B
            if match is None or not is_word or bool(match[3]) == (word in _OF_STAGE):
                raise PipelineScheduleError(
                    f"lane {lane}: {_quoted(cell)} is no action; one is a stage, a kind and a "
                    "micro-batch, like 0F3, or (0F3;1B2)OVERLAP_F_B"
                )
            kind = ActionKind(match[2])
            if overlapped and not kind.computes:
                raise PipelineScheduleError(
                    f"lane {lane}: {_quoted(cell)} overlaps {kind}, which computes nothing"
                )
            yield int(match[1]), kind, int(match[3]) if match[3] else None


def _lane_of(lanes: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for lane, actions in enumerate(lanes):
        for action in actions:
            if found.setdefault(action.stage, lane) != lane:
                raise PipelineScheduleError(
                    f"lane {lane}: {action} is of stage {action.stage}, which lane "
                    f"{found[action.stage]} runs"
                )
    if not found:
        raise PipelineScheduleError("the table holds no action")
    if len(found) != max(found) + 1:
        missing = next(stage for stage in range(max(found)) if stage not in found)
        raise PipelineScheduleError(
            f"stage {missing} has no action, but stage {max(found)} has: stages count from 0"
        )
    return tuple(found[stage] for stage in range(len(found)))


def _check_communication(lane: int, row: list[_Word], lane_of: tuple[int, ...]) -> None:
    """Refuse communications that stand on the wrong side of their computations in one row."""
    place: dict[_Word, int] = {}
    last: dict[int, int] = {}
    for index, (stage, kind, m) in enumerate(row):
        word = (stage, ActionKind.FULL_BACKWARD if kind in _BACKWARD else kind, m)
        place.setdefault(word, index)
        if kind in _LAST:
            last[stage] = index
    for index, (stage, kind, m) in enumerate(row):
        if kind.computes:
            continue
        if stage >= len(lane_of) or lane_of[stage] != lane:
            raise PipelineScheduleError(
                f"lane {lane}: {_spelt(stage, kind, m)} is of stage {stage}, which this lane "
                "does not run"
            )
        if kind is ActionKind.REDUCE_GRAD and index < last.get(stage, len(row)):
            raise PipelineScheduleError(
                f"lane {lane}: {_spelt(stage, kind, m)} stands before the last backward pass of "
                f"stage {stage}"
            )
        if kind in _OF_STAGE:
            continue
        forward = kind in (ActionKind.SEND_F, ActionKind.RECV_F)
        computed = ActionKind.FORWARD if forward else ActionKind.FULL_BACKWARD
        at = place.get((stage, computed, m))
        sends = kind in (ActionKind.SEND_F, ActionKind.SEND_B)
        if at is None or (at > index) == sends:
            raise PipelineScheduleError(
                f"lane {lane}: {_spelt(stage, kind, m)} does not stand "
                f"{'after' if sends else 'before'} {_spelt(stage, computed, m)}"
            )


def _check_pairs(words: list[list[_Word]]) -> None:
    """Refuse a send that no other lane receives, and a receive that none sends."""
    lanes: dict[_Word, int] = {}
    counts = Counter(word for row in words for word in row)
    for lane, row in enumerate(words):
        lanes.update(dict.fromkeys(row, lane))
    for word, lane in lanes.items():
        stage, kind, m = word
        if kind not in _PAIRS:
            continue
        step, other = _PAIRS[kind]
        pair = (stage + step, other, m)
        if counts[word] != 1 or counts[pair] != 1 or lanes[pair] == lane:
            raise PipelineScheduleError(
                f"lane {lane}: {_spelt(*word)} stands {counts[word]} times in the table, and "
                f"{_spelt(*pair)} {counts[pair]} times; each must stand once, on two lanes"
            )


#: Of each communication the distance in stages to the other side, and its word.
_PAIRS: Mapping[ActionKind, tuple[int, ActionKind]] = {
    ActionKind.SEND_F: (1, ActionKind.RECV_F),
    ActionKind.RECV_F: (-1, ActionKind.SEND_F),
    ActionKind.SEND_B: (-1, ActionKind.RECV_B),
    ActionKind.RECV_B: (1, ActionKind.SEND_B),
}


def _spelt(stage: int, kind: ActionKind, micro_batch: int | None) -> str:
    return f"{stage}{kind}{'' if micro_batch is None else micro_batch}"


def _quoted(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else f"{cell[:37]}...")
