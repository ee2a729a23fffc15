"""Large graphs made small enough to draw: runs of nodes that the plan treats alike become a box."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.cost_model.schedule import Task
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode
from partitioner.pictures.edges import Edge, Terminal, edges, how_cut, placed_nodes
from partitioner.result import Compiled


@dataclass(frozen=True)
class Box:
    """Nodes drawn as one, all on one device group.

    Attributes:
        nodes: At least one, in the plan's order.
        mesh: Their group.
        cut: How they are cut, if they are cut alike (see `how_cut`).
        is_cut: Whether any of them is cut.
    """

    nodes: tuple[PlacedNode, ...]
    mesh: DeviceMesh
    cut: str
    is_cut: bool


@dataclass(frozen=True)
class Arc:
    """All values from one box, input or output to another.

    Attributes:
        source: Index of a box, or a terminal.
        target: Likewise.
        values: Their names, in order, each once.
        comms: Communications that carry them and no earlier arc.
        needs_comm: Whether any value needs communications, these or an earlier arc's.
    """

    source: int | Terminal
    target: int | Terminal
    values: tuple[str, ...]
    comms: tuple[Task, ...]
    needs_comm: bool


@dataclass(frozen=True)
class Folded:
    """The boxes and what runs between them."""

    boxes: tuple[Box, ...]
    arcs: tuple[Arc, ...]


#: What must be equal for neighbours to share a box, from the gentlest folding to the hardest.
_LEVELS: tuple[Callable[[PlacedNode], Hashable], ...] = (
    lambda placed: (placed.mesh, how_cut(placed)),
    lambda placed: (placed.mesh, _axes(placed)),
    lambda placed: (placed.mesh, bool(placed.layouts)),
    lambda placed: placed.mesh,
)
_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  #: Longest runs tried, before any length.


def fold(result: Compiled, limit: int) -> Folded:
    """The gentlest folding to at most `limit` boxes.

    Short runs of consecutive nodes that are cut alike are joined first, then longer ones, then
    those cut over the same axes, cut at all, and all of one group. If the plan changes between
    groups too often for that, a box is all that a group does in a stretch of the plan; the
    stretches are as short as the limit allows. Nodes of different groups never share a box.
    """
    placed = placed_nodes(result)
    runs = next((runs for runs in _foldings(placed) if len(runs) <= limit), None) or _stretches(
        placed, limit
    )
    boxes = [_box(run) for run in runs]
    return Folded(tuple(boxes), _arcs(boxes, edges(result)))


def _foldings(placed: Sequence[PlacedNode]) -> Iterator[list[list[PlacedNode]]]:
    for level in _LEVELS:
        runs = [list(run) for _, run in itertools.groupby(placed, key=level)]
        for length in (*_LENGTHS, len(placed)):
            yield [run[i : i + length] for run in runs for i in range(0, len(run), length)]


def _stretches(placed: Sequence[PlacedNode], limit: int) -> list[list[PlacedNode]]:
    groups = len({node.mesh for node in placed})
    length = math.ceil(len(placed) / max(1, limit // groups))
    runs: dict[Hashable, list[PlacedNode]] = defaultdict(list)
    for index, node in enumerate(placed):
        runs[index // length, node.mesh].append(node)
    return list(runs.values())


def _axes(placed: PlacedNode) -> Hashable:
    return tuple(sorted({axis for layout in placed.layouts.values() for axis in layout.axes}))


def _box(run: Sequence[PlacedNode]) -> Box:
    cuts = {how_cut(placed) for placed in run}
    is_cut = any(placed.layouts for placed in run)
    cut = cuts.pop() if len(cuts) == 1 else ("mixed cuts" if is_cut else "")
    return Box(tuple(run), run[0].mesh, cut, is_cut)


def _arcs(boxes: Sequence[Box], drawn: Sequence[Edge]) -> tuple[Arc, ...]:
    home = {placed.node.name: i for i, box in enumerate(boxes) for placed in box.nodes}
    found: dict[tuple[int | Terminal, int | Terminal], list[Edge]] = defaultdict(list)
    for edge in drawn:
        ends = _end(edge.source, home), _end(edge.target, home)
        if ends[0] != ends[1]:
            found[ends].append(edge)
    return tuple(
        Arc(
            source,
            target,
            tuple(dict.fromkeys(edge.value for edge in run)),
            tuple(task for edge in run for task in edge.new),
            any(edge.comms for edge in run),
        )
        for (source, target), run in found.items()
    )


def _end(terminal: Terminal, home: Mapping[str, int]) -> int | Terminal:
    return home[terminal[1]] if terminal[0] == "node" else terminal
