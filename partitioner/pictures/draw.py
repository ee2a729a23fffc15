"""The partitioned graph as a picture of a page's size, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import networkx as nx

from partitioner.pictures.canvas import draw_file, drawable
from partitioner.pictures.edges import INPUT, OUTPUT, Terminal, comm_lines, group_indices
from partitioner.pictures.fold import Arc, Box, Folded, fold
from partitioner.pictures.layers import Layout, Point, arrange
from partitioner.pictures.palette import COMM, INK, LIGHT, PAPER, QUIET, STRONG, group_colour, tint
from partitioner.pictures.text import ELISION, MAX_CHARACTERS
from partitioner.pictures.timeline import draw_timeline
from partitioner.result import Compiled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MAX_BOXES", "draw_graph", "draw_timeline"]

MAX_BOXES = 60  #: Larger graphs are drawn folded.

_BOX_INCHES = 1.45  #: Width of a box.
_ROW_INCHES = 0.42  #: From layer to layer.
_BOX_SHARE = 0.58  #: Of a layer's height, that a box fills.
_ASPECT = 1.25  #: Height over width that the picture aims at.
_FONT, _SMALL = 6.0, 5.0  #: In points.
_OP_CHARACTERS, _CHARACTERS = 30, 36  #: Of the first and the second line in a box.
_CORNER_INCHES = 0.25  #: From where on a corner of an edge is round.
_MIN_INCHES = 3.5  #: Width of the smallest picture: a column of a page.

End = int | Terminal


def draw_graph(result: Compiled, path: str | Path, *, boxes: int = MAX_BOXES) -> None:
    """Draw the partitioned graph.

    A colour a device group; cut nodes strongly coloured with their cut, replicated ones dashed.
    Edges that need communications are thick and vermillion, with kind, bytes between devices and
    seconds where they are first needed. Graphs of more than `boxes` nodes are folded (`fold`).

    Args:
        result: A compiled model.
        path: Where to; its suffix is .svg, .png or .pdf.
        boxes: Most boxes to draw, inputs and outputs not counted.

    Raises:
        PictureError: Another suffix, or matplotlib is not installed.
        FileError: The file cannot be written.
    """
    draw_file(path, lambda: _Picture.of(result, fold(result, boxes)).figure())


@dataclass(frozen=True)
class _Picture:
    result: Compiled
    folded: Folded
    layout: Layout

    @classmethod
    def of(cls, result: Compiled, folded: Folded) -> _Picture:
        graph = nx.DiGraph()
        graph.add_nodes_from((INPUT, value) for value in result.graph.inputs)
        graph.add_nodes_from(range(len(folded.boxes)))
        graph.add_nodes_from((OUTPUT, value) for value in result.graph.outputs)
        graph.add_edges_from(_downward(arc) for arc in folded.arcs)
        return cls(result, folded, arrange(graph, _ASPECT * _BOX_INCHES / _ROW_INCHES))

    def figure(self) -> Figure:
        from matplotlib.figure import Figure

        layout = self.layout
        wide = max(_MIN_INCHES, (layout.width + 0.2) * _BOX_INCHES)
        figure = Figure(figsize=(wide, (layout.rows + 2.6) * _ROW_INCHES))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        spare = (wide / _BOX_INCHES - layout.width) / 2
        axes.set_xlim(-spare, layout.width + spare)
        axes.set_ylim(layout.rows + 0.9, -1.7)
        axes.axis("off")
        for arc in self.folded.arcs:
            self._draw_arc(axes, arc)
        for index, box in enumerate(self.folded.boxes):
            self._draw_box(axes, box, layout.at[index])
        for kind, values in (
            (INPUT, self.result.graph.inputs),
            (OUTPUT, self.result.graph.outputs),
        ):
            for value in values:
                self._draw_terminal(axes, value, layout.at[kind, value])
        self._title(figure)
        self._legend(figure)
        return figure

    def _draw_box(self, axes: Axes, box: Box, at: Point) -> None:
        colour = group_colour(group_indices(self.result)[box.mesh])
        dashed = box.cut == "replicated"
        _rectangle(
            axes,
            at,
            facecolor=tint(colour, STRONG if box.is_cut else LIGHT),
            edgecolor=tint(colour, 1.0),
            linestyle="--" if dashed else "-",
            linewidth=0.8,
        )
        _two_lines(axes, at, _box_lines(box))

    def _draw_terminal(self, axes: Axes, value: str, at: Point) -> None:
        _rectangle(axes, at, facecolor=PAPER, edgecolor=QUIET, linewidth=0.6, rounding=0.08)
        _two_lines(axes, at, [drawable(value, _CHARACTERS), str(self.result.graph.types[value])])

    def _draw_arc(self, axes: Axes, arc: Arc) -> None:
        from matplotlib.patches import FancyArrowPatch
        from matplotlib.path import Path as Outline

        edge = _downward(arc)
        points = _clipped(self.layout.routes[edge])
        if edge != (arc.source, arc.target):
            points = points[::-1]
        colour, width = (COMM, 1.3) if arc.needs_comm else (QUIET, 0.6)
        vertices, codes = _rounded(points)
        axes.add_patch(
            FancyArrowPatch(
                path=Outline(vertices, codes),
                arrowstyle="-|>",
                mutation_scale=5,
                color=colour,
                linewidth=width,
                linestyle=":" if arc.needs_comm and not arc.comms else "-",
                shrinkA=0,
                shrinkB=0,
                zorder=2 if arc.needs_comm else 1,
                joinstyle="round",
            )
        )
        if arc.comms:
            self._label_arc(axes, "\n".join(comm_lines(arc.comms)), points)

    def _label_arc(self, axes: Axes, text: str, points: Sequence[Point]) -> None:
        (x0, y0), (x1, y1) = points[0], points[1]
        axes.text(
            (x0 + x1) / 2 + 0.02,
            (y0 + y1) / 2,
            text,
            fontsize=_SMALL,
            color=COMM,
            ha="left",
            va="center",
            zorder=5,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.4, "alpha": 0.85},
        )

    def _title(self, figure: Figure) -> None:
        graph, cluster = self.result.graph, self.result.cluster
        count = f"{len(graph.nodes)} nodes"
        if len(self.folded.boxes) < len(graph.nodes):
            count += f" in {len(self.folded.boxes)} boxes"
        title = f"{drawable(graph.name, 40)} on {drawable(cluster.name, 40)}, {count}"
        figure.text(
            0.5, 1 - 0.08 / figure.get_figheight(), title, ha="center", va="top", fontsize=8
        )

    def _legend(self, figure: Figure) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        used = {box.mesh for box in self.folded.boxes}
        entries: list[Any] = [
            Patch(
                facecolor=tint(group_colour(i), STRONG), edgecolor=group_colour(i), label=str(mesh)
            )
            for mesh, i in group_indices(self.result).items()
            if mesh in used
        ]
        if any(box.is_cut for box in self.folded.boxes):
            entries.append(Patch(facecolor=tint(INK, 0.35), edgecolor=INK, label="cut"))
        if any(box.cut == "replicated" for box in self.folded.boxes):
            pale = tint(INK, 0.1)
            entries.append(Patch(facecolor=pale, edgecolor=INK, linestyle="--", label="replicated"))
        if any(arc.needs_comm for arc in self.folded.arcs):
            entries.append(Line2D([], [], color=COMM, linewidth=1.3, label="communication"))
        columns = max(1, min(len(entries), int(figure.get_figwidth() / 1.1)))
        figure.legend(
            handles=entries, loc="lower center", ncols=columns, fontsize=_FONT, frameon=False
        )


def _box_lines(box: Box) -> tuple[str, str]:
    """Op and cut, and the name; of several nodes the first and the last, and their number."""
    first, last, count = box.nodes[0].node, box.nodes[-1].node, len(box.nodes)
    cut = "" if box.cut == "replicated" else drawable(box.cut, 16)
    if count == 1:
        return f"{_clipped_op(first.op, 18)} {cut}".strip(), drawable(first.name, _CHARACTERS)
    number = f" ({count} nodes)"
    ops = _pair(_clipped_op, first.op, last.op, _OP_CHARACTERS - len(number)) + number
    room = _CHARACTERS - (len(cut) + 2 if cut else 0)
    names = _pair(drawable, first.name, last.name, room)
    return ops, f"{cut}: {names}" if cut else names


def _pair(shorten: Callable[[str, int], str], first: str, last: str, limit: int) -> str:
    room = limit - len(" ... ")
    pairs = (first, last), (last, first)
    return " ... ".join(shorten(one, max(room // 2, room - len(other))) for one, other in pairs)


def _clipped_op(op: str, limit: int) -> str:
    """An op is known by its start, a name by its end."""
    text = drawable(op, MAX_CHARACTERS)
    return text if len(text) <= limit else text[: limit - 1] + ELISION


def _downward(arc: Arc) -> tuple[End, End]:
    """The arc as it is laid out: stretches of a plan (`fold`) may feed each other both ways."""
    if isinstance(arc.source, int) and isinstance(arc.target, int) and arc.source > arc.target:
        return arc.target, arc.source
    return arc.source, arc.target


def _rectangle(axes: Axes, at: Point, *, rounding: float = 0.04, **look: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    box = FancyBboxPatch(
        (at[0] - 0.5, at[1] - _BOX_SHARE / 2),
        1.0,
        _BOX_SHARE,
        boxstyle=f"round,pad=0,rounding_size={rounding}",
        mutation_aspect=_BOX_INCHES / _ROW_INCHES,
        zorder=3,
        **look,
    )
    axes.add_patch(box)


def _two_lines(axes: Axes, at: Point, lines: Sequence[str]) -> None:
    for line, shift, size, colour in zip(
        lines, (-0.12, 0.14), (_FONT, _SMALL), (INK, "#444444"), strict=True
    ):
        axes.text(
            at[0],
            at[1] + shift,
            line,
            fontsize=size,
            color=colour,
            ha="center",
            va="center",
            zorder=4,
        )


def _clipped(points: Sequence[Point]) -> list[Point]:
    """A route from the bottom of its first box to the top of its last."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    return [(x0, y0 + _BOX_SHARE / 2), *points[1:-1], (x1, y1 - _BOX_SHARE / 2)]


def _rounded(points: Sequence[Point]) -> tuple[list[Point], list[int]]:
    """Vertices and codes of a line whose corners are round, and near the corners only."""
    from matplotlib.path import Path as Outline

    found, codes = [points[0]], [int(Outline.MOVETO)]
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        found += [_toward(here, before), here, _toward(here, after)]
        codes += [int(Outline.LINETO), int(Outline.CURVE3), int(Outline.CURVE3)]
    return [*found, points[-1]], [*codes, int(Outline.LINETO)]


def _toward(corner: Point, other: Point) -> Point:
    """A point from the corner towards another, at most half the way."""
    x, y = other[0] - corner[0], other[1] - corner[1]
    inches = math.hypot(x * _BOX_INCHES, y * _ROW_INCHES)
    share = min(0.5, _CORNER_INCHES / inches) if inches else 0.0
    return corner[0] + share * x, corner[1] + share * y
