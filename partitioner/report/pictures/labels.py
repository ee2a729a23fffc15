"""The texts of a picture: two lines that fit into a box, and the communications of an arc."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from partitioner.cost_model.schedule.tasks import Task
from partitioner.foundations import units
from partitioner.ir.mesh import DeviceMesh
from partitioner.report.pictures.canvas import drawable
from partitioner.report.pictures.fold import Box
from partitioner.report.pictures.text import ELISION, MAX_CHARACTERS
from partitioner.report.planned import Planned
from partitioner.report.steps import comm_bytes

_FIRST, _SECOND = 30, 36  #: Characters of the two lines.


def box_lines(box: Box, group: str) -> tuple[str, str]:
    """Op and cut, and the name; of several nodes the first and the last, and their number.

    Args:
        group: Name of its device group; "" to leave it out.
    """
    first, last, count = box.nodes[0].node, box.nodes[-1].node, len(box.nodes)
    cut = "" if box.cut == "replicated" else drawable(box.cut, 16)
    if count == 1:
        op = f"{_clipped(first.op, 18)} {cut}".strip()
        return op, _named(group, lambda room: drawable(first.name, room))
    number = f" ({count} nodes)"
    ops = _pair(_clipped, first.op, last.op, _FIRST - len(number)) + number
    about = ", ".join(filter(None, (group, cut)))
    return ops, _named(about, lambda room: _pair(drawable, first.name, last.name, room))


def terminal_lines(values: Sequence[str], kind: str, first_type: str) -> tuple[str, str]:
    """The name and type of one terminal, or the names and number of several drawn as one."""
    if len(values) == 1:
        return drawable(values[0], _FIRST), first_type
    return _pair(drawable, values[0], values[-1], _FIRST), f"{len(values)} {kind}s"


def comm_lines(comms: Iterable[Task]) -> Iterator[str]:
    """A line for each kind of communication: kind, bytes between devices, seconds."""
    kinds: dict[str, list[Task]] = defaultdict(list)
    for task in comms:
        assert task.comm is not None
        kinds[str(task.comm.kind)].append(task)
    for kind, tasks in kinds.items():
        times = f"{len(tasks)}x " if len(tasks) > 1 else ""
        sent = sum(map(comm_bytes, tasks))
        seconds = sum(task.longest_s for task in tasks)
        yield f"{times}{kind} {units.size(sent)} {units.seconds(seconds)}"


def group_indices(result: Planned) -> dict[DeviceMesh, int]:
    """The number of each device group."""
    return {mesh: index for index, mesh in enumerate(result.plan.groups)}


def _named(about: str, name: Callable[[int], str]) -> str:
    return f"{about}: {name(_SECOND - len(about) - 2)}" if about else name(_SECOND)


def _pair(shorten: Callable[[str, int], str], first: str, last: str, limit: int) -> str:
    room = limit - len(" ... ")
    pairs = (first, last), (last, first)
    return " ... ".join(shorten(one, max(room // 2, room - len(other))) for one, other in pairs)


def _clipped(op: str, limit: int) -> str:
    """The start of an op, which tells more than its end."""
    text = drawable(op, MAX_CHARACTERS)
    return text if len(text) <= limit else text[: limit - 1] + ELISION
