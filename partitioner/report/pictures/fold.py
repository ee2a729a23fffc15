"""Folding of large graphs: neighbours of a module with equal cuts are one box; texts of both."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.cost_model.schedule.tasks import Task
from partitioner.foundations import units
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.pieces.folding import Path, paths
from partitioner.ir.plan import PlacedNode
from partitioner.report.pictures.canvas import ELISION, MAX_CHARACTERS, drawable
from partitioner.report.planned import Planned
from partitioner.report.steps import (
    INPUT,
    NODE,
    OUTPUT,
    Edge,
    Terminal,
    comm_bytes,
    edges,
    placed_nodes,
)

MAX_TERMINALS = 12  #: More inputs, or outputs, are joined if they go to the same boxes.
MAX_JOINED = 60  #: If that leaves more, all are joined.
_FIRST, _SECOND = 30, 36  #: Characters of the two lines of a box.

End = int | Terminal  #: Index of a box, or a terminal.
Home = dict[Terminal, End]  #: Where nodes, inputs and outputs are drawn.


@dataclass(frozen=True)
class Box:
    """Nodes drawn as one, all on one device group."""

    nodes: tuple[PlacedNode, ...]  #: At least one, in the plan's order.
    mesh: DeviceMesh
    cut: str  #: Their cut (`how_cut`), or "mixed cuts" if these differ.
    is_cut: bool


@dataclass(frozen=True)
class Arc:
    """All values from one box, input or output to another."""

    source: End
    target: End
    comms: tuple[Task, ...]  #: Communications between devices that carry them and no earlier arc.
    needs_comm: bool  #: Any of them needs communications, these or an earlier arc's.


@dataclass(frozen=True)
class Diagram:
    """Boxes in the plan's order, and the arcs between them and the terminals."""

    boxes: tuple[Box, ...]
    arcs: tuple[Arc, ...]
    #: Drawn inputs and outputs, with the values that each stands for.
    terminals: Mapping[Terminal, tuple[str, ...]]


_Key = Callable[[PlacedNode], Hashable]
#: Neighbours with an equal key share a box; from the finest folding to the coarsest.
_LEVELS: tuple[_Key, ...] = (
    lambda placed: (placed.mesh, how_cut(placed)),
    lambda placed: (
        placed.mesh,
        tuple(sorted({axis for layout in placed.layouts.values() for axis in layout.axes})),
    ),
    lambda placed: (placed.mesh, bool(placed.layouts)),
    lambda placed: placed.mesh,
)
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  #: Longest runs tried, before any length.


def how_cut(placed: PlacedNode) -> str:
    """Say how a node is cut: "m/y n/x", "replicated" on several devices, "" if whole on one."""
    return placed.cut_text or ("replicated" if placed.mesh.size() > 1 else "")


def fold(result: Planned, limit: int) -> Diagram:
    """The finest folding to at most `limit` boxes, each of nodes of one group.

    Short runs of consecutive nodes of one module (`report.blocks.paths`) with equal cuts are joined
    first, then longer ones, then those of outer modules and of any, then those cut over the same
    axes, cut at all, and all of one group. If the plan changes between groups too often for that, a
    box holds all nodes of a group in a stretch of the plan, as short as the limit allows.
    """
    placed = placed_nodes(result.schedule)
    groups = [result.plan.nodes[node.name].group for node in result.graph.nodes]
    names = [node.name for node in result.graph.nodes]
    around = dict(zip(names, paths(result.graph, groups), strict=True))
    runs = next((runs for runs in _foldings(placed, around) if len(runs) <= limit), [])
    if not runs:
        length = math.ceil(len(placed) / max(1, limit // len({node.mesh for node in placed})))
        stretches: dict[Hashable, list[PlacedNode]] = defaultdict(list)
        for index, node in enumerate(placed):
            stretches[index // length, node.mesh].append(node)
        runs = list(stretches.values())
    boxes = []
    for nodes in runs:
        cuts, is_cut = {how_cut(node) for node in nodes}, any(node.layouts for node in nodes)
        cut = cuts.pop() if len(cuts) == 1 else ("mixed cuts" if is_cut else "")
        boxes.append(Box(tuple(nodes), nodes[0].mesh, cut, is_cut))
    drawn = tuple(edges(result.graph, result.schedule))
    home: Home = {(NODE, p.node.name): i for i, box in enumerate(boxes) for p in box.nodes}
    terminals: dict[Terminal, tuple[str, ...]] = {}
    for side, values in ((INPUT, result.graph.inputs), (OUTPUT, result.graph.outputs)):
        for same in _joined(side, values, drawn, home):
            terminals[side, same[0]] = same
            home.update({(side, value): (side, same[0]) for value in same})
    between: dict[tuple[End, End], list[Edge]] = defaultdict(list)
    for edge in drawn:
        ends = home[edge.source], home[edge.target]
        if ends[0] != ends[1]:
            between[ends].append(edge)
    arcs = tuple(
        Arc(
            source,
            target,
            tuple(task for edge in run for task in edge.new),
            any(edge.crosses for edge in run),
        )
        for (source, target), run in between.items()
    )
    return Diagram(tuple(boxes), arcs, terminals)


def _foldings(
    placed: Sequence[PlacedNode], paths: Mapping[str, Path]
) -> Iterator[list[list[PlacedNode]]]:
    """The foldings, from the finest: boxes end where modules do, then where outer modules do."""
    deepest = max(map(len, paths.values()), default=0)
    for level in _LEVELS:
        for depth in range(deepest, -1, -1):

            def key(
                node: PlacedNode, level: _Key = level, depth: int = depth
            ) -> tuple[Path, Hashable]:
                return paths[node.node.name][:depth], level(node)

            runs = [list(run) for _, run in itertools.groupby(placed, key=key)]
            for length in (*_LENGTHS, len(placed)):
                yield [run[i : i + length] for run in runs for i in range(0, len(run), length)]


def _joined(
    side: str, values: Sequence[str], drawn: Sequence[Edge], home: Home
) -> Sequence[tuple[str, ...]]:
    """Groups of inputs, or outputs, that are drawn as one: see `MAX_TERMINALS`."""
    if len(values) <= MAX_TERMINALS:
        return [(value,) for value in values]
    near: dict[str, set[End]] = {value: set() for value in values}
    for edge in drawn:
        for here, other in ((edge.source, edge.target), (edge.target, edge.source)):
            if here[0] == side and other in home:
                near[here[1]].add(home[other])
    runs: dict[frozenset[End], list[str]] = defaultdict(list)
    for value in values:
        runs[frozenset(near[value])].append(value)
    return [tuple(values)] if len(runs) > MAX_JOINED else [tuple(run) for run in runs.values()]


def box_lines(box: Box, group: str) -> tuple[str, str]:
    """Op and cut, and the name; of several nodes the first and the last, and their number."""
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
